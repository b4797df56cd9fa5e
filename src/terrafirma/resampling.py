"""The four figures of a comparison with bootstrap intervals: rows are sorted once, and draws only change their weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.metrics import MOST_DRAWS, Interval

__all__ = ["FIGURES", "figures"]

TPR = 0.95
FIGURES = {"auroc": True, "aucea": True, "fpr95": False, "aurc": False}  # whether higher is better


def figures(unreliability: Any, errors: Any, draws: int, confidence: float, seed: int) -> dict[str, Interval | None]:
    """Each figure with its interval, None where it is not defined; the same draws for every score of as many rows.

    As ``metrics.bootstrap``: percentiles over resampled rows, and draws without a wrong or without a right row again.
    """
    ranked = _Ranked.of(np.asarray(unreliability, dtype=np.float64), np.asarray(errors, dtype=np.float64))
    n = len(ranked.errors)
    found = ranked.measure(np.ones(n, dtype=np.int64))
    values: dict[str, list[float]] = {name: [] for name, value in found.items() if value is not None}
    rng = np.random.default_rng(seed)
    for _ in range(MOST_DRAWS * draws):
        if all(len(some) == draws for some in values.values()):
            break
        measured = ranked.measure(np.bincount(rng.integers(n, size=n), minlength=n)[ranked.order])
        for name, some in values.items():
            value = measured[name]
            if value is not None and len(some) < draws:
                some.append(value)
    tail = (1 - confidence) / 2
    return {
        name: None if value is None else Interval(value, *_quantiles(values[name], tail), confidence)
        for name, value in found.items()
    }


class _Ranked(NamedTuple):
    """Rows from the most to the least reliable, and where each run of ties starts."""

    order: IntArray
    errors: FloatArray
    starts: IntArray
    binary: bool

    @classmethod
    def of(cls, u: FloatArray, errors: FloatArray) -> _Ranked:
        order = np.lexsort([errors, u])
        u = u[order]
        starts = np.flatnonzero(np.concatenate([[True], u[1:] != u[:-1]]))
        return cls(order, errors[order], starts, bool(np.isin(errors, (0, 1)).all()))

    def measure(self, weights: IntArray) -> dict[str, float | None]:
        """All figures, with each row counted as often as its weight says."""
        rows = np.add.reduceat(weights, self.starts)
        wrong = np.add.reduceat(weights * self.errors, self.starts)
        area = _aurc(rows, wrong)
        found: dict[str, float | None] = {"auroc": None, "aucea": 1.0 - area, "fpr95": None, "aurc": area}
        right = rows - wrong
        if self.binary and wrong.any() and right.any():
            found |= {"auroc": _auroc(wrong, right), "fpr95": _fpr95(wrong[::-1], right[::-1])}
        return found


def _auroc(wrong: FloatArray, right: FloatArray) -> float:
    """Of runs of ties, from the most to the least reliable."""
    below = np.cumsum(right) - right
    return float((wrong * (below + 0.5 * right)).sum() / (wrong.sum() * right.sum()))


def _fpr95(wrong: FloatArray, right: FloatArray) -> float:
    """Of runs of ties, from the least to the most reliable."""
    enough = np.argmax(np.cumsum(wrong) / wrong.sum() >= TPR)
    return float(right[: enough + 1].sum() / right.sum())


def _aurc(rows: IntArray, wrong: FloatArray) -> float:
    """Of runs of ties, from the most to the least reliable; tied rows are in random order."""
    mean = np.divide(wrong, rows, out=np.zeros(len(rows)), where=rows > 0)
    expected = np.repeat(mean, rows)
    return float((np.cumsum(expected) / np.arange(1, len(expected) + 1)).mean())


def _quantiles(values: list[float], tail: float) -> tuple[float, float]:
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
