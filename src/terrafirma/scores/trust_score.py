"""Trust score: whether the training samples of the predicted class are nearer than those of any other."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import check_count, check_share
from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, classes_of, matrix_of
from terrafirma.scores.neighbours import Points, nearest

__all__ = ["TrustScore"]


class TrustScore(Score):
    """``a / (a + b)`` for the distances ``a`` to the predicted class and ``b`` to the nearest other class.

    It grows with ``a / b``, the inverse of the paper's trust, but is finite where ``b = 0``: 0 on a training sample of the
    predicted class, 1/2 between two classes, and on a training sample of both, 1 on one of another class alone. It is 1, too,
    where either distance does not exist: nothing was learned of the predicted class, or of any other.

    ``alpha``: the share of each class's samples that is left out as outliers, those furthest from their ``k``-th nearest of the
    class, themselves counted; by default none.
    """

    name: ClassVar[str] = "trust_score"
    paper: ClassVar[str] = "Jiang et al., NeurIPS 2018"
    cost: ClassVar[str] = "fit O(Nd), with alpha O(N^2 d / C); a query O(Nd), as a matrix product"
    needs = frozenset({"features", "outputs", "labels"})
    train_: dict[str, npt.NDArray[Any]]  # ordered by class
    starts_: IntArray  # where each class begins, and the end of the last
    width_: int

    def __init__(self, k: int = 10, alpha: float = 0.0) -> None:
        self.k = k
        self.alpha = alpha

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        check_count("k", self.k, least=1)
        if isinstance(self.alpha, bool) or not (np.isscalar(self.alpha) and self.alpha == 0):
            check_share("alpha", self.alpha, "the share of each class left out as outliers; or 0")

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Keep the features of each class, without outliers."""
        self.width_ = matrix_of(train, "outputs", self.name).shape[1]
        features, classes = matrix_of(train, "features", self.name), classes_of(train, self.name, self.width_)
        order = np.argsort(classes, kind="stable")
        if self.alpha:
            ends = np.cumsum(np.bincount(classes))[:-1]
            order = np.concatenate([rows[self._dense(features[rows])] for rows in np.split(order, ends)])
        counts = np.bincount(classes[order], minlength=self.width_)
        self.starts_ = np.concatenate([[0], np.cumsum(counts)])
        self.train_ = Points.of(features[order]).arrays()

    def _dense(self, features: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of a class's samples are no outliers."""
        if not len(features):
            return np.zeros(0, dtype=bool)
        radii = nearest(features, Points.of(features), min(self.k, len(features)))[:, -1]
        return np.asarray(radii <= np.quantile(radii, 1 - self.alpha))

    def score(self, recorded: Recorded) -> FloatArray:
        """The share of the distance to the predicted class."""
        points = Points(**self.train_)
        features = matrix_of(recorded, "features", self.name, points.rows.shape[1])
        matrix_of(recorded, "outputs", self.name, self.width_)
        predicted = recorded.predictions
        own = np.stack([self.starts_[predicted], self.starts_[predicted + 1]], axis=1)
        to_other = nearest(features, points, 1, skip=own)[:, 0]
        to_own = np.full(len(features), np.inf)
        for c in np.unique(predicted):
            of_class = points.part(slice(self.starts_[c], self.starts_[c + 1]))
            to_own[predicted == c] = nearest(features[predicted == c], of_class, 1)[:, 0]
        unreliability = np.ones(len(features))
        known = np.isfinite(to_own) & np.isfinite(to_other)
        total = to_own + to_other
        np.divide(to_own, total, out=unreliability, where=known & (total > 0))
        unreliability[known & (total == 0)] = 0.5
        return unreliability
