"""Gaussian process on the features: how little the training samples near a sample say about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.spatial.distance import pdist
from scipy.special import log_softmax, softmax

from terrafirma.core._checks import check_count, check_positive
from terrafirma.core._threads import row_ranges, threads
from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import ROWS, Score, classes_of, matrix_of

__all__ = ["GaussianProcess"]

WAVES = 1024  # random Fourier features, as in the paper
MEDIAN_ROWS = 1000  # evenly spaced, whose distances set the unit of the scale
PUBLISHED_SCALES = (1.0, 2.0, 4.0, 8.0)


class GaussianProcess(Score):
    """The posterior standard deviation of a Gaussian process with a squared exponential kernel, by random Fourier features.

    With ``phi(x) = sqrt(2 / D) cos(W x / scale + b)`` and weights of variance 1 a priori, the posterior covariance is exact.

    Parameters
    ----------
    scale : float, optional
        The kernel's length, in multiples of the median distance between training samples.
    likelihood : "regression" or "classification"
        ``"regression"``: precision ``I + sum phi phi^T``, for noise of variance 1; one matrix serves all classes, and the
        unreliability falls wherever there is data. ``"classification"``: Laplace's approximation for a softmax, ``I + sum
        p_c (1 - p_c) phi phi^T`` for the predicted class c. Mind that certain samples say little there: the deviation of a
        class's logit grows far inside the class, too. It takes one matrix of 8 MB for each class.
    seed : int
        Of the random features.
    variant : "published", optional
        Regression with a scale of 1, 2, 4 or 8 units of the features, chosen by the accuracy of the process itself.

    """

    name: ClassVar[str] = "gaussian_process"
    paper: ClassVar[str] = "Liu et al., NeurIPS 2020"
    cost: ClassVar[str] = (
        "fit O(N D (D + d)), D = 1024; in classification for each class, minutes; a query O(D (D + d))"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"scale": (1.0, 0.25, 0.5, 2.0, 4.0)}
    needs = frozenset({"features"})
    scale_: float
    waves_: dict[str, FloatArray]  # frequencies (D, d), phases (D,), centre (d,)
    factors_: FloatArray  # Cholesky factors of the precision, (1 or C, D, D)

    def __init__(
        self,
        scale: float | None = None,
        likelihood: str = "regression",
        seed: int = 0,
        variant: str | None = None,
    ) -> None:
        self.scale = scale
        self.likelihood = likelihood
        self.seed = seed
        self.variant = variant
        if variant == "published":
            self.needs = self.needs | {"labels"}
        elif likelihood == "classification":
            self.needs = self.needs | {"labels", "outputs"}

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.scale is not None:
            check_positive("scale", self.scale, "the kernel's length in median distances of training samples")
        check_count("seed", self.seed, least=0)
        if self.likelihood not in ("regression", "classification"):
            raise InvalidInput(
                f"likelihood must be 'regression' or 'classification'. Got {self.likelihood!r:.80}; the first is quick."
            )
        if self.variant == "published" and self.likelihood != "regression":
            raise InvalidInput(
                f"likelihood must be 'regression' in the variant 'published'. Got {self.likelihood!r}; leave it out."
            )

    def open_settings(self, train: Recorded) -> list[dict[str, Any]]:
        """As published, scales are in units of the features."""
        if self.variant == "published" and self.scale is None:
            return [{"scale": scale} for scale in PUBLISHED_SCALES]
        return super().open_settings(train)

    def trials(self, train: Recorded, validation: Recorded | None) -> Iterator[tuple[Self, FloatArray]]:
        """As published, the most accurate process alone; of equals the first."""
        if self.variant != "published" or validation is None or self.scale is not None:
            yield from super().trials(train, validation)
            return
        best: tuple[float, Self] | None = None
        for setting in self.open_settings(train):
            trial = self.with_setting(setting)
            trial.learn(train, validation)
            accuracy = trial._accuracy(train, validation)
            best = (accuracy, trial) if best is None or accuracy > best[0] else best
        if best is not None:
            yield best[1], best[1].unreliability(validation)

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Draw the random features and find the posterior precision."""
        features = matrix_of(train, "features", self.name)
        draw = np.random.default_rng(self.seed)
        frequencies = draw.standard_normal((WAVES, features.shape[1]))
        phases = draw.uniform(0, 2 * np.pi, WAVES)
        unit = 1.0 if self.variant == "published" else _median_distance(features)
        centre = features.mean(axis=0, dtype=np.float64)  # moves phases, not the kernel; far out, it saves digits
        self.waves_ = {"frequencies": frequencies / (self.scale_ * unit), "phases": phases, "centre": centre}
        if self.likelihood == "regression":
            blocks = (self._phi(features[rows]) for rows in row_ranges(len(features), ROWS))
            self.factors_ = _factor(blocks)[None]
        else:
            width = matrix_of(train, "outputs", self.name).shape[1]
            self.factors_ = self._laplace(features, classes_of(train, self.name, width), width)

    def score(self, recorded: Recorded) -> FloatArray:
        """The posterior standard deviation; in classification, of the predicted class's logit."""
        phi = self._phi(matrix_of(recorded, "features", self.name, self.waves_["frequencies"].shape[1]))
        if self.likelihood == "regression":
            return _deviation(self.factors_[0], phi)
        matrix_of(recorded, "outputs", self.name, len(self.factors_))  # there is a factor for each column
        predicted, found = recorded.predictions, np.empty(len(phi))
        for c in np.unique(predicted):
            found[predicted == c] = _deviation(self.factors_[c], phi[predicted == c])
        return found

    def _phi(self, features: npt.NDArray[Any]) -> FloatArray:
        """The random features (n, D)."""
        turns = (features - self.waves_["centre"]) @ self.waves_["frequencies"].T
        turns += self.waves_["phases"]
        threads(lambda rows: np.cos(turns[rows], out=turns[rows]), row_ranges(len(turns), 256))
        turns *= np.sqrt(2 / WAVES)
        return np.asarray(turns)

    def _accuracy(self, train: Recorded, validation: Recorded) -> float:
        """Of the posterior mean of one-hot targets, on validation data."""
        by = f"The variant 'published' of the score {self.name}"
        classes, labels = classes_of(train, by), classes_of(validation, by)
        features, to_judge = matrix_of(train, "features", by), matrix_of(validation, "features", by)
        sums = np.zeros((WAVES, int(classes.max()) + 1))
        for rows in row_ranges(len(features), ROWS):
            sums += self._phi(features[rows]).T @ np.eye(sums.shape[1])[classes[rows]]
        weights = cho_solve((self.factors_[0], True), sums)
        right = [
            (self._phi(to_judge[rows]) @ weights).argmax(axis=1) == labels[rows]
            for rows in row_ranges(len(to_judge), ROWS)
        ]
        return float(np.concatenate(right).mean())

    def _laplace(self, features: npt.NDArray[Any], classes: IntArray, width: int) -> FloatArray:
        """A factor for each class, at the most probable weights."""
        phi = np.empty((len(features), WAVES), dtype=np.float32)  # the only array with a row for each sample
        for rows in row_ranges(len(features), ROWS):
            phi[rows] = self._phi(features[rows])
        weights = _most_probable(phi, classes, width)
        certainty = np.concatenate([softmax(phi[rows] @ weights, axis=1) for rows in row_ranges(len(phi), ROWS)])
        deviations = np.sqrt(certainty * (1 - certainty))
        factors = np.empty((width, WAVES, WAVES))
        for c in range(width):
            factors[c] = _factor(phi[rows] * deviations[rows, c : c + 1] for rows in row_ranges(len(phi), ROWS))
        return factors


def _factor(blocks: Iterable[FloatArray]) -> FloatArray:
    """The lower Cholesky factor of ``I + sum phi phi^T``."""
    precision = np.eye(WAVES)
    for block in blocks:
        precision += block.T @ block
    return np.asarray(cholesky(precision, lower=True, overwrite_a=True))


def _deviation(factor: FloatArray, phi: FloatArray) -> FloatArray:
    """The square root of ``phi^T (L L^T)^-1 phi`` for each row."""
    return np.asarray(np.linalg.norm(solve_triangular(factor, phi.T, lower=True), axis=0))


def _most_probable(phi: npt.NDArray[np.float32], classes: IntArray, width: int) -> FloatArray:
    """The weights (D, C) of the softmax that are most probable a posteriori: the loss is convex and has one minimum."""

    def loss(flat: FloatArray) -> tuple[float, FloatArray]:
        weights = flat.reshape(WAVES, width)
        total, slope = 0.5 * float(flat @ flat), weights.copy()
        for rows in row_ranges(len(phi), ROWS):
            block = phi[rows].astype(np.float64)
            log_p = log_softmax(block @ weights, axis=1)
            truth = (np.arange(len(block)), classes[rows])
            total -= float(log_p[truth].sum())
            too_much = np.exp(log_p)
            too_much[truth] -= 1
            slope += block.T @ too_much
        return total, slope.ravel()

    found = minimize(
        loss,
        np.zeros(WAVES * width),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500, "ftol": 1e-13, "gtol": 1e-6},
    )
    return np.asarray(found.x).reshape(WAVES, width)


def _median_distance(features: npt.NDArray[Any]) -> float:
    """The median distance between training samples that differ; 1 where none do."""
    sample = features[:: -(-len(features) // MEDIAN_ROWS)].astype(np.float64)
    distances = pdist(sample)
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0
