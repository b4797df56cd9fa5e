"""Scores of several networks, trained alike from different seeds: recordings of the same samples, one for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import ONLY_TO_LEARN, Score
from terrafirma.scores.logits import check_logits
from terrafirma.scores.subfunction_search import Subfunction

__all__ = [
    "EnsembleMaxResponse",
    "EnsembleScore",
    "EnsembleSubfunction",
    "EnsembleVariance",
    "joint",
    "mean_probabilities",
]

Networks = Sequence[Recorded]


class EnsembleScore(Score):
    """What scores of several networks share: ``fit`` and ``unreliability`` take a list of recordings, one for each network."""

    paper = "Lakshminarayanan et al., NIPS 2017"
    cost = "every network runs"
    needs = frozenset({"outputs"})
    n_networks_: int

    def fit(self, train: Networks, validation: Networks | None = None) -> Self:  # type: ignore[override]  # several networks
        """Learn from what each network did on its training data."""
        self.check()
        self._check_networks(train, "train", self.needs)
        if validation is not None:
            self._check_networks(validation, "validation", self.needs - ONLY_TO_LEARN)
            if len(validation) != len(train):
                raise InvalidInput(
                    f"validation must have a recording for each of the {len(train)} networks. Got {len(validation)}."
                )
        self.learn_all(train, validation)
        self.n_networks_, self.settings_ = len(train), {}
        return self

    def unreliability(self, recorded: Networks) -> FloatArray:  # type: ignore[override]  # several networks
        """One number for each sample, float64 (n,): higher = less reliable."""
        self.check_fitted("unreliability")
        self._check_networks(recorded, "recorded", self.needs - ONLY_TO_LEARN)
        if len(recorded) != self.n_networks_:
            raise InvalidInput(f"recorded must be of the {self.n_networks_} networks of fit. Got {len(recorded)}.")
        return self.score_all(recorded)

    def learn_all(self, train: Networks, validation: Networks | None) -> None:
        """Learn; nothing, by default."""

    def score_all(self, recorded: Networks) -> FloatArray:
        """The unreliability of the networks' samples."""
        raise NotImplementedError

    def _check_networks(self, recorded: Any, role: str, fields: frozenset[str]) -> None:
        if isinstance(recorded, Recorded) or not isinstance(recorded, Sequence) or len(recorded) < 2:
            got = f"{len(recorded)} of them" if isinstance(recorded, Sequence) else type(recorded).__name__
            raise InvalidInput(
                f"{role} must be a list of recordings, one for each of several networks. Got {got}; "
                "for one network choose another score."
            )
        for one in recorded:
            self.check_needs(one, role, fields)
        sources = {one.source.data_fingerprint for one in recorded if one.source is not None}
        if len({len(one) for one in recorded}) > 1 or (role == "recorded" and len(sources) > 1):
            counts = ", ".join(str(len(one)) for one in recorded)
            raise InvalidInput(
                f"{role} must be recordings of the same samples, in the same order. Got {counts} samples of different data; "
                "record each network on the same."
            )


class EnsembleVariance(EnsembleScore):
    """Variance of the predicted probabilities over networks, summed over classes: nothing where all agree."""

    name: ClassVar[str] = "ensemble_variance"

    def score_all(self, recorded: Networks) -> FloatArray:
        """The summed variance."""
        mean = mean_probabilities(recorded)
        return np.asarray(sum(((_probabilities(one) - mean) ** 2).sum(axis=1) for one in recorded) / len(recorded))


class EnsembleMaxResponse(EnsembleScore):
    """One minus the largest mean probability, summed from the other classes."""

    name: ClassVar[str] = "ensemble_max_response"

    def score_all(self, recorded: Networks) -> FloatArray:
        """What is left to the other classes."""
        mean = np.sort(mean_probabilities(recorded), axis=1)
        return np.asarray(mean[:, :-1].sum(axis=1))


class EnsembleSubfunction(EnsembleScore):
    """Mean over networks of the log bound; rho and delta that are not given are chosen on each one's validation recording."""

    name: ClassVar[str] = "ensemble_subfunction"
    paper: ClassVar[str] = "Ji et al., CoLLAs 2022"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = Subfunction.grid
    needs = Subfunction.needs
    scores_: list[Subfunction]

    def __init__(self, rho: float | None = None, delta: float | None = None) -> None:
        self.rho = rho
        self.delta = delta

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        Subfunction(self.rho, self.delta).check()

    def learn_all(self, train: Networks, validation: Networks | None) -> None:
        """Fit a bound for each network."""
        own = [None] * len(train) if validation is None else validation
        self.scores_ = [Subfunction(self.rho, self.delta).fit(one, val) for one, val in zip(train, own, strict=True)]

    def score_all(self, recorded: Networks) -> FloatArray:
        """The mean of the log bounds."""
        bounds = [score.unreliability(one) for score, one in zip(self.scores_, recorded, strict=True)]
        return np.asarray(np.mean(bounds, axis=0))

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that a file needs: that of each bound."""
        self.check_fitted("save")
        parts = [score.to_arrays() for score in self.scores_]
        arrays = {f"{i}/{name}": value for i, (own, _) in enumerate(parts) for name, value in own.items()}
        return arrays, {
            "name": self.name,
            "parameters": self.parameters(),
            "scores": [settings for _, settings in parts],
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any], model: Any = None
    ) -> Self:
        """A fitted score of what ``to_arrays`` gave."""
        score = cls(**settings["parameters"])
        score.scores_ = []
        for i, own in enumerate(settings["scores"]):
            part = {name.partition("/")[2]: value for name, value in arrays.items() if name.startswith(f"{i}/")}
            score.scores_.append(Subfunction.from_arrays(part, own))
        score.n_networks_, score.settings_ = len(score.scores_), {}
        return score


def joint(recorded: Networks) -> Recorded:
    """The ensemble as one network: its outputs are the logs of the mean probabilities, its errors theirs."""
    logs = np.log(np.maximum(mean_probabilities(recorded), np.finfo(np.float64).tiny))
    return Recorded(outputs=logs, labels=recorded[0].labels)


def mean_probabilities(recorded: Networks) -> FloatArray:
    """Class probabilities, averaged over networks."""
    shapes = {check_logits(one.outputs).shape for one in recorded}
    if len(shapes) > 1:
        listed = ", ".join(map(str, sorted(shapes)))
        raise InvalidInput(
            f"outputs of the networks must have one shape. Got {listed}; an ensemble shares its classes."
        )
    return np.asarray(sum(_probabilities(one) for one in recorded) / len(recorded))


def _probabilities(recorded: Recorded) -> FloatArray:
    return np.asarray(np.exp(log_softmax(check_logits(recorded.outputs), axis=1)))
