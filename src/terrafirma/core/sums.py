"""Sums over all training samples around a query: ``sum_j N_j f(Hamming)``, for many functions f from one pass.

Distances do not depend on f. One pass counts, for each query, the training samples at each distance; then each sum is that
histogram times the table of f. Counts are integers, so histograms are exact whatever the order, the chunks or the threads:
queries that see the same distances get the same score to the last bit, and rank metrics find their ties.

Training patterns come in panels with a weight for each row (see ``_pairs``); rows that only fill the last panel weigh 0.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from terrafirma.core import _kernels, _pairs
from terrafirma.core._threads import Map, n_threads, row_ranges, threads
from terrafirma.core.patterns import PANEL, BoolArray, CountArray, FloatArray, IntArray, PackedPatterns, WordArray

__all__ = ["CHUNK_BYTES", "Queries", "distance_histograms", "log_sums", "occupied_distances"]

Weights = npt.NDArray[np.uint32 | np.int64 | np.float64]
CHUNK_BYTES = 6 << 20  # of histograms in flight in each thread, where those of one panel of queries are not more
SMALL_WORK = 1 << 20  # comparisons of words below which threads cost more than they save


class Queries(Protocol):
    """Patterns that are read slice by slice, as ``PackedPatterns`` are."""

    @property
    def n_units(self) -> int:
        """Units of a pattern (M)."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> PackedPatterns: ...


def distance_histograms(
    queries: Queries, panels: WordArray, counts: CountArray, *, mapper: Map = threads
) -> CountArray:
    """Training samples by Hamming distance from each query: integers (queries, M + 1).

    panels (n, W, 32), counts (n, 32) of a type that holds their sum; the histograms are of that type, too.
    """

    def count(rows: slice) -> Weights:
        return _histograms(queries[rows], panels, counts)[:, :, 0]

    return _joined(mapper(count, _ranges(queries, panels)))


def occupied_distances(queries: Queries, panels: WordArray, counts: CountArray, *, mapper: Map = threads) -> IntArray:
    """The Hamming distances that occur between queries and training samples, rising."""

    def mark(rows: slice) -> BoolArray:
        return np.asarray(_histograms(queries[rows], panels, counts).any(axis=(0, 2)))

    blocks = mapper(mark, _ranges(queries, panels, 8 * (queries.n_units + 1)))
    return np.flatnonzero(np.any(blocks, axis=0))


def log_sums(
    queries: Queries, panels: WordArray, weights: Weights, log_tables: FloatArray, *, mapper: Map = threads
) -> FloatArray:
    """Log of ``sum_l v_rl f_r(Hamming(query, p_l))`` for tables ``log f_r`` (R, M + 1): float64 (R, queries).

    weights: counts (n, 32), which serve all tables, or float64 (n, 32, R), values from 0 to 1 for each.
    """

    def add(rows: slice) -> FloatArray:
        histograms = _histograms(queries[rows], panels, weights)
        out = np.empty((len(histograms), len(log_tables)))
        _kernels.log_sums(histograms, log_tables, out)
        return out

    blocks = mapper(add, _ranges(queries, panels, 8 * (queries.n_units + 1) * weights[:1, :1].size))
    return _joined(blocks).T


def _joined(blocks: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _histograms(queries: PackedPatterns, panels: WordArray, weights: Weights) -> Weights:
    """Weights by distance from each query, (queries, M + 1, R); the last axis is 1 for counts."""
    n, columns = len(queries), 1 if weights.ndim == 2 else weights.shape[2]
    grouped = query_panels(queries.words)
    rows = len(grouped) * (_pairs.QUERIES if grouped.ndim == 3 else 1)
    out = np.zeros((rows, queries.n_units + 1, columns), dtype=weights.dtype)
    if columns == 1:
        _pairs.count_histograms(grouped, panels, weights.reshape(-1, PANEL), out[:, :, 0])
    else:
        _pairs.value_histograms(grouped, panels, weights, out)
    return out[:n]


def query_panels(words: WordArray) -> WordArray:
    """Queries in panels (groups, W, QUERIES), zeros filling the last; few of them one by one, (n, W)."""
    n, W = words.shape
    height = _pairs.QUERIES
    if n < height:
        return np.ascontiguousarray(words)
    padded = np.zeros((-(-n // height) * height, W), dtype=np.uint64)
    padded[:n] = words
    return np.ascontiguousarray(padded.reshape(-1, height, W).transpose(0, 2, 1))


def _ranges(queries: Queries, panels: WordArray, bytes_per_query: int = 0) -> list[slice]:
    """Chunks of queries, at least one: whole panels, bounded memory, and the same work for each thread where it is worth it."""
    n = len(queries)
    chunks = max(1, -(-n * bytes_per_query // CHUNK_BYTES))
    if n * panels.size > SMALL_WORK:
        chunks = -(-chunks // n_threads()) * n_threads()
    panels_each = max(1, -(-n // (chunks * _pairs.QUERIES)))
    return row_ranges(n, panels_each * _pairs.QUERIES) or [slice(0, 0)]
