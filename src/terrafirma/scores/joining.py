"""Distances in several layers as one number: standardised, and weighted by what they say of errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrafirma.core.patterns import FloatArray

__all__ = ["Joined", "log_odds"]

FEWEST = 5  # wrong and right samples each, to regress on


@dataclass(frozen=True, eq=False)
class Joined:
    """A weighted sum of standardised columns: shift, scale and weights (k,), offset ()."""

    shift: FloatArray
    scale: FloatArray
    weights: FloatArray
    offset: FloatArray

    @classmethod
    def mean(cls, columns: FloatArray) -> Joined:
        """The mean of the standardised columns."""
        k = columns.shape[1]
        shift, spread = columns.mean(axis=0), columns.std(axis=0)
        scale = np.where(spread > 1e-9 * shift, spread, np.where(shift > 0, shift, 1.0))
        return cls(shift, scale, np.ones(k) / k, np.zeros(()))

    @classmethod
    def by_errors(cls, columns: FloatArray, errors: FloatArray, *, any_sign: bool) -> Joined | None:
        """The log odds of an error; None for fewer than 5 wrong or 5 right rows, or where no column tells them apart."""
        wrong, alike = errors > 0.5, cls.mean(columns)
        if min(wrong.sum(), (~wrong).sum()) < FEWEST:
            return None
        found = log_odds((columns - alike.shift) / alike.scale, wrong, any_sign=any_sign)
        return None if found is None else cls(alike.shift, alike.scale, found[0], np.array(found[1]))

    def __call__(self, columns: FloatArray) -> FloatArray:
        """One number for each row."""
        return np.asarray((columns - self.shift) / self.scale @ self.weights + self.offset)


def log_odds(
    columns: FloatArray, wrong: npt.NDArray[np.bool_], *, any_sign: bool = False
) -> tuple[FloatArray, float] | None:
    """Weights and offset of the log odds of ``wrong``; columns with weights below 0 are left out, the lowest first.

    None where no column is left.
    """
    from sklearn.linear_model import LogisticRegression

    kept = list(range(columns.shape[1]))
    while kept:
        fitted = LogisticRegression(tol=1e-8, max_iter=10_000).fit(columns[:, kept], wrong)
        slopes = fitted.coef_[0]
        if any_sign or (slopes > 0).all():
            weights = np.zeros(columns.shape[1])
            weights[kept] = slopes
            return weights, float(fitted.intercept_[0])
        kept.pop(int(slopes.argmin()))
    return None
