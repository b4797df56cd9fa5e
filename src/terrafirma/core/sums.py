"""Sums over all training samples around a query, for many weightings from one pass over distances.

Distances do not depend on the weighting. One pass counts, for each query, the training samples at each distance; then
``sum_j N_j f(Hamming)`` is that histogram times the table of ``f``, for every ``f`` at once. Counts are integers, so the
histograms are exact whatever the order, the chunks or the threads.

Training patterns come in panels with a weight for each row (see ``_kernels``); rows that only fill the last panel weigh 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.core import _kernels
from terrafirma.core._threads import Map, n_threads, row_ranges, threads
from terrafirma.core.patterns import FloatArray, IntArray, PackedPatterns, WordArray

__all__ = ["distance_histograms", "log_count_sums", "log_value_sums", "occupied_distances"]

HISTOGRAM_BYTES = 3 << 18  # of histograms in flight in each thread
SMALL_WORK = 1 << 20  # comparisons of words below which threads cost more than they save


def distance_histograms(
    queries: PackedPatterns, panels: WordArray, counts: IntArray, *, mapper: Map = threads
) -> IntArray:
    """Training samples by Hamming distance from each query: int64 (queries, M + 1).

    panels (n, W, 16), counts int64 (n, 16).
    """
    width = queries.n_units + 1
    out = np.zeros((len(queries), width), dtype=np.int64)

    def count(rows: slice) -> None:
        out[rows] = _count(queries.words[rows], panels, counts, width)

    mapper(count, _ranges(len(queries), panels, 8 * width))
    return out


def occupied_distances(
    queries: PackedPatterns, panels: WordArray, counts: IntArray, *, mapper: Map = threads
) -> IntArray:
    """The Hamming distances that occur between queries and training samples, rising."""
    width = queries.n_units + 1
    occupied = np.zeros(width, dtype=np.bool_)

    def mark(rows: slice) -> None:
        occupied[_count(queries.words[rows], panels, counts, width).any(axis=0)] = True

    mapper(mark, _ranges(len(queries), panels, 8 * width))
    return np.flatnonzero(occupied)


def log_count_sums(
    queries: PackedPatterns, panels: WordArray, counts: IntArray, log_tables: FloatArray, *, mapper: Map = threads
) -> FloatArray:
    """Log of ``sum_j N_j f_r(Hamming(query, p_j))`` for tables ``log f_r`` (R, M + 1): float64 (R, queries)."""
    width = queries.n_units + 1

    def histograms(words: WordArray) -> IntArray:
        return _count(words, panels, counts, width)[:, :, None]

    return _log_sums(queries, panels, log_tables, histograms, 8 * width, mapper)


def log_value_sums(
    queries: PackedPatterns, panels: WordArray, values: FloatArray, log_tables: FloatArray, *, mapper: Map = threads
) -> FloatArray:
    """Log of ``sum_l v_rl f_r(Hamming(query, p_l))`` for ``values`` (n, 16, R): float64 (R, queries)."""
    width, R = queries.n_units + 1, values.shape[2]

    def histograms(words: WordArray) -> FloatArray:
        grouped = _query_panels(words)
        out = np.zeros((grouped.shape[0] * grouped.shape[2], width, R))
        _kernels.value_histograms(grouped, panels, values, out)
        return out[: len(words)]

    return _log_sums(queries, panels, log_tables, histograms, 8 * width * R, mapper)


def _log_sums(
    queries: PackedPatterns,
    panels: WordArray,
    log_tables: FloatArray,
    histograms: Callable[[WordArray], npt.NDArray[Any]],
    bytes_per_query: int,
    mapper: Map,
) -> FloatArray:
    out = np.empty((len(queries), len(log_tables)))

    def add(rows: slice) -> None:
        _kernels.log_sums(histograms(queries.words[rows]), log_tables, out[rows])

    mapper(add, _ranges(len(queries), panels, bytes_per_query))
    return out.T


def _count(words: WordArray, panels: WordArray, counts: IntArray, width: int) -> IntArray:
    grouped = _query_panels(words)
    out = np.zeros((grouped.shape[0] * grouped.shape[2], width), dtype=np.int64)
    _kernels.count_histograms(grouped, panels, counts, out)
    return out[: len(words)]


def _query_panels(words: WordArray) -> WordArray:
    """Queries in panels of 4, the last filled with zeros; up to 3 of them one by one."""
    n, W = words.shape
    height = _kernels.QUERIES
    if n < height:
        return np.ascontiguousarray(words).reshape(n, W, 1)
    padded = np.zeros((-(-n // height) * height, W), dtype=np.uint64)
    padded[:n] = words
    return np.ascontiguousarray(padded.reshape(-1, height, W).transpose(0, 2, 1))


def _ranges(n: int, panels: WordArray, bytes_per_query: int) -> list[slice]:
    """Chunks of queries: bounded memory, whole panels, and a share for each thread where the work is worth it."""
    rows = HISTOGRAM_BYTES // bytes_per_query
    if n * panels.size > SMALL_WORK:
        rows = min(rows, -(-n // n_threads()))
    return row_ranges(n, max(1, -(-rows // _kernels.QUERIES)) * _kernels.QUERIES)
