"""The table of populated regions: packed rows per second that ``RegionTable.build`` takes in.

Beside it, on fewer rows, numpy's ``unique(axis=0)`` of the same words, which sorts whole rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.common import Figure, Report, race
from terrafirma import PackedPatterns, RegionTable

N, N_NUMPY, M = 1_000_000, 100_000, 512
DUPLICATES = (0.0, 0.9)
ROWS_PER_SECOND = 1e6


def run() -> Report:
    figures = [figure for share in DUPLICATES for figure in _measure(share)]
    return Report("dedup", f"De-duplication of packed patterns of {M} bits", figures).finish()


def _measure(share: float) -> list[Figure]:
    many, few = _patterns(N, share), _patterns(N_NUMPY, share)
    errors = np.zeros(N, dtype=np.bool_)
    _check(few)
    times = race(
        {
            "many": partial(RegionTable.build, many, errors),
            "few": partial(RegionTable.build, few, errors[:N_NUMPY]),
            "numpy": partial(np.unique, few.words, axis=0, return_counts=True),
        },
        seconds=2.0,
    )
    name = f"{share:.0%} duplicates"
    rate, target = N / times["many"] / 1e6, ROWS_PER_SECOND / 1e6
    return [
        Figure(f"{name}: {N} rows", rate, "10⁶ rows/s", at_least=target),
        Figure(f"{name}: {N_NUMPY} rows", N_NUMPY / times["few"] / 1e6, "10⁶ rows/s"),
        Figure(f"{name}: {N_NUMPY} rows, numpy.unique", N_NUMPY / times["numpy"] / 1e6, "10⁶ rows/s"),
        Figure(f"{name}: {N_NUMPY} rows, ratio to numpy.unique", times["numpy"] / times["few"], "x"),
    ]


def _patterns(n: int, share: float) -> PackedPatterns:
    """Draw rows of which this share repeats others."""
    rng = np.random.default_rng(0)
    distinct = n - round(share * n)
    words = rng.integers(0, 2**64, (distinct, M // 64), dtype=np.uint64)
    if distinct < n:
        words = words[np.concatenate([rng.permutation(distinct), rng.integers(0, distinct, n - distinct)])]
        words = words[rng.permutation(n)]
    return PackedPatterns(words, M)


def _check(patterns: PackedPatterns) -> None:
    """Compare with numpy: the same patterns, the same counts."""
    table = RegionTable.build(patterns, np.zeros(len(patterns)))
    words, counts = np.unique(patterns.words, axis=0, return_counts=True)
    order = np.lexsort(table.patterns.words.T[::-1])
    same = np.array_equal(table.patterns.words[order], words) and np.array_equal(table.counts[order], counts)
    if not same:
        raise AssertionError("RegionTable.build and numpy.unique find different patterns.")


if __name__ == "__main__":
    run()
