"""The four figures of a comparison with bootstrap intervals: rows are sorted once, and draws only change their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.metrics import MOST_DRAWS, Interval

__all__ = ["FIGURES", "figures"]

TPR = 0.95
FIGURES = {"auroc": True, "aucea": True, "fpr95": False, "aurc": False}  # whether higher is better


def figures(unreliability: Any, errors: Any, draws: int, confidence: float, seed: int) -> dict[str, Interval | None]:
    """Each figure with its interval, None where it is not defined; the same draws for every score of as many rows.

    As ``metrics.bootstrap``: percentiles over resampled rows.
    """
    ranked = _Ranked.of(np.asarray(unreliability, dtype=np.float64), np.asarray(errors, dtype=np.float64))
    n = len(ranked.errors)
    found = {name: measure(ranked, np.ones(n, dtype=np.int64)) for name, measure in MEASURES.items()}
    values: dict[str, list[float]] = {name: [] for name, value in found.items() if value is not None}
    rng = np.random.default_rng(seed)
    for _ in range(MOST_DRAWS * draws):
        if not values or all(len(some) == draws for some in values.values()):
            break
        weights = np.bincount(rng.integers(n, size=n), minlength=n)[ranked.order]
        for name, some in values.items():
            value = MEASURES[name](ranked, weights) if len(some) < draws else None
            if value is not None:
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

    def by_run(self, weights: IntArray) -> tuple[IntArray, FloatArray]:
        """Rows of each run, and their summed errors."""
        return np.add.reduceat(weights, self.starts), np.add.reduceat(weights * self.errors, self.starts)


def _auroc(ranked: _Ranked, weights: IntArray) -> float | None:
    rows, wrong = ranked.by_run(weights)
    right = rows - wrong
    if not ranked.binary or not wrong.any() or not right.any():
        return None
    below = np.cumsum(right) - right
    return float((wrong * (below + 0.5 * right)).sum() / (wrong.sum() * right.sum()))


def _fpr95(ranked: _Ranked, weights: IntArray) -> float | None:
    rows, wrong = (part[::-1] for part in ranked.by_run(weights))
    right = rows - wrong
    if not ranked.binary or not wrong.any() or not right.any():
        return None
    enough = np.argmax(np.cumsum(wrong) / wrong.sum() >= TPR)
    return float(np.cumsum(right)[enough] / right.sum())


def _aurc(ranked: _Ranked, weights: IntArray) -> float:
    rows, wrong = ranked.by_run(weights)
    mean = np.divide(wrong, rows, out=np.zeros(len(rows)), where=rows > 0)
    expected = np.repeat(mean, rows)  # of tied rows, in random order
    return float((np.cumsum(expected) / np.arange(1, len(expected) + 1)).mean())


def _aucea(ranked: _Ranked, weights: IntArray) -> float:
    return 1.0 - _aurc(ranked, weights)


MEASURES: dict[str, Callable[[_Ranked, IntArray], float | None]] = {
    "auroc": _auroc,
    "aucea": _aucea,
    "fpr95": _fpr95,
    "aurc": _aurc,
}


def _quantiles(values: list[float], tail: float) -> tuple[float, float]:
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
