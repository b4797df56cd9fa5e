"""Calibrated probability of error, for users who want a number between 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import check_count, check_scores
from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.errors import InvalidInput
from terrafirma.policy._common import Arrays, Settings, Stored, scores_and_errors

__all__ = ["ErrorProbability", "Reliability"]


@dataclass(frozen=True, eq=False)
class Reliability:
    """How well predicted probabilities of error agree with errors, in bins of about equal mass.

    Attributes
    ----------
    predicted, observed : float64 array (k,)
        Mean predicted probability and mean error of each bin.
    count : int64 array (k,)
        Samples of each bin; samples of equal probability share one, so that there may be fewer bins than asked for.

    """

    predicted: FloatArray
    observed: FloatArray
    count: IntArray

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the mean gap between predicted and observed, weighted by count."""
        return float(np.average(np.abs(self.predicted - self.observed), weights=self.count))

    def __repr__(self) -> str:
        return (
            f"<Reliability of {self.count.sum()} samples in {len(self.count)} bins: {self.calibration_error:.4f} off>"
        )


@dataclass(frozen=True, eq=False, repr=False)
class ErrorProbability(Stored):
    """Probability of error by isotonic regression: a rising step function of the unreliability, never 0 or 1.

    Attributes
    ----------
    thresholds : float64 array (k,)
        The greatest unreliability of each step, rising; greater ones belong to the last step.
    values : float64 array (k,)
        The probability of error on each step, rising.

    """

    thresholds: FloatArray
    values: FloatArray

    def __post_init__(self) -> None:
        for name in ("thresholds", "values"):
            object.__setattr__(self, name, check_scores(getattr(self, name), name))
        rising = (np.diff(self.values) > 0).all() and (self.thresholds[1:] > self.thresholds[:-1]).all()
        if not rising or self.thresholds.shape != self.values.shape or self.values[0] <= 0 or self.values[-1] >= 1:
            raise InvalidInput(
                "thresholds and values must be as many, both rising, the values between 0 and 1. "
                f"Got {self.thresholds!s:.60} and {self.values!s:.60}; let fit find them."
            )

    @classmethod
    def fit(cls, unreliability: Any, errors: Any) -> ErrorProbability:
        """Learn from samples used for nothing before; errors in [0, 1].

        Two samples are made up, an error at the least unreliability and a right answer at the greatest: what was never
        seen among n samples is not impossible.
        """
        from sklearn.isotonic import isotonic_regression

        u, errors = scores_and_errors(unreliability, errors)
        levels, place = np.unique(u, return_inverse=True)
        counts = np.bincount(place).astype(np.float64)
        sums = np.bincount(place, weights=errors)
        sums[0] += 1
        counts[0] += 1
        counts[-1] += 1
        values = isotonic_regression(sums / counts, sample_weight=counts)
        last = values < np.append(values[1:], np.inf)
        return cls(levels[last], values[last])

    def probability(self, unreliability: Any) -> FloatArray:
        """Probability of error, float64 (n,)."""
        step = np.searchsorted(self.thresholds, check_scores(unreliability, may_be_empty=True), side="left")
        return self.values[np.minimum(step, len(self.values) - 1)]

    def reliability(self, unreliability: Any, errors: Any, bins: int = 10) -> Reliability:
        """The reliability curve on samples that ``fit`` did not see."""
        u, errors = scores_and_errors(unreliability, errors)
        bins = check_count("bins", bins, least=1)
        predicted = self.probability(u)
        edges = np.quantile(predicted, np.arange(1, bins) / bins)
        _, place, count = np.unique(
            np.searchsorted(edges, predicted, side="left"), return_inverse=True, return_counts=True
        )
        sums = np.bincount(place, weights=predicted), np.bincount(place, weights=errors)
        return Reliability(sums[0] / count, sums[1] / count, count)

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Its arrays and settings, for a file."""
        return {"thresholds": self.thresholds, "values": self.values}, {}

    @classmethod
    def from_arrays(cls, arrays: Arrays, settings: Settings) -> Self:
        """What ``to_arrays`` took apart, checked anew."""
        return cls(arrays["thresholds"], arrays["values"], **settings)

    def __repr__(self) -> str:
        return f"<ErrorProbability of {len(self.values)} steps from {self.values[0]:.4g} to {self.values[-1]:.4g}>"
