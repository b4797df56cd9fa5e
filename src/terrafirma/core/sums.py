"""Sums over all training samples around a query: ``sum_j N_j f(Hamming)``.

Distances do not depend on the weighting ``f``. For many weightings, one pass counts for each query the training samples at
each distance; each sum is that histogram times the table of ``f``. For a single one the entries of its table are summed
straight, which is faster; rows so far from all samples that floats might underflow there go by histogram.

Counts are integers, so histograms are exact, and each query meets the samples in one order, so sums are the same to the
bit, whatever the chunks, the threads or the other queries. The two ways to sum agree to rounding.

Training patterns come in panels with a weight for each row (see ``_pairs``); rows that only fill the last panel weigh 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrafirma.core import _kernels, _pairs
from terrafirma.core._threads import Map, n_threads, row_ranges, threads
from terrafirma.core.patterns import PANEL, CountArray, FloatArray, IntArray, PackedPatterns, WordArray

__all__ = ["DistanceTables", "distance_histograms", "log_sums", "occupied_distances"]

Weights = npt.NDArray[np.uint32 | np.int64 | np.float64]
HISTOGRAM_BYTES = 6 << 20  # of histograms in flight in each thread
SMALL_WORK = 1 << 20  # comparisons of words below which threads cost more than they save
HALF_SCALE = 460  # a straight sum's largest entry is 2^(2 * 460): times 2^62 samples it is still a float
LEAST = 2.0**-900  # of straight sums that lost nothing: 2^62 times the least normal float is 2^-960
LOG_2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class DistanceTables:
    """Functions of distance that are to be summed, by their values at 0..M.

    Attributes
    ----------
    logs : float64 array (R, M + 1)
    base : float
        The largest log.
    scaled : float64 array (M + 1,), or None if there are several
        The one function divided by its largest value, times a power of two, which rounds nothing.

    """

    logs: FloatArray
    base: float
    scaled: FloatArray | None

    @classmethod
    def of(cls, logs: FloatArray) -> DistanceTables:
        """Tables of these logs."""
        base = float(logs.max())
        if len(logs) > 1:
            return cls(logs, base, None)
        with np.errstate(under="ignore"):
            return cls(logs, base, np.ldexp(np.exp((logs[0] - base) / 2), HALF_SCALE) ** 2)


def distance_histograms(
    queries: PackedPatterns, panels: WordArray, counts: CountArray, *, mapper: Map = threads
) -> CountArray:
    """Training samples by Hamming distance from each query: integers (queries, M + 1).

    panels (n, W, 32), counts (n, 32) of a type that holds their sum; the histograms are of that type, too.
    """
    out = np.zeros((_whole(len(queries)), queries.n_units + 1), dtype=counts.dtype)

    def count(rows: slice) -> None:
        _pairs.count_histograms(_query_panels(queries.words[rows]), panels, counts, out[_whole_rows(rows)])

    mapper(count, _ranges(len(queries), panels))
    return out[: len(queries)]


def occupied_distances(
    queries: PackedPatterns, panels: WordArray, counts: CountArray, *, mapper: Map = threads
) -> IntArray:
    """The Hamming distances that occur between queries and training samples, rising."""
    width = queries.n_units + 1
    occupied = np.zeros(width, dtype=np.bool_)

    def mark(rows: slice) -> None:
        occupied[_histograms(queries.words[rows], panels, counts, width).any(axis=(0, 2))] = True

    mapper(mark, _ranges(len(queries), panels, 8 * width))
    return np.flatnonzero(occupied)


def log_sums(
    queries: PackedPatterns, panels: WordArray, weights: Weights, tables: DistanceTables, *, mapper: Map = threads
) -> FloatArray:
    """Log of ``sum_l v_rl f_r(Hamming(query, p_l))`` for functions of distance f_r: float64 (R, queries).

    weights: counts (n, 32), which serve all tables, or float64 (n, 32, R), values from 0 to 1 for each.
    """
    if tables.scaled is None:
        return _by_histogram(queries, panels, weights, tables, mapper)
    sums = _straight(queries, panels, weights.reshape(-1, PANEL), tables.scaled, mapper)
    mantissa, exponent = np.frexp(np.maximum(sums, LEAST))
    out = np.log(mantissa) + (exponent - 2 * HALF_SCALE) * LOG_2 + tables.base
    far = sums < LEAST
    if far.any():
        (out[far],) = _by_histogram(queries[far], panels, weights, tables, mapper)
    return np.asarray(out[None])


def _straight(
    queries: PackedPatterns, panels: WordArray, weights: Weights, table: FloatArray, mapper: Map
) -> FloatArray:
    """Weighted sums of the entries of one table, float64 (queries,)."""
    sums = np.zeros(_whole(len(queries)))

    def add(rows: slice) -> None:
        _pairs.add_weights(_query_panels(queries.words[rows]), panels, weights, table, sums[_whole_rows(rows)])

    mapper(add, _ranges(len(queries), panels))
    return sums[: len(queries)]


def _by_histogram(
    queries: PackedPatterns, panels: WordArray, weights: Weights, tables: DistanceTables, mapper: Map
) -> FloatArray:
    """Log sums for any tables, (R, queries)."""
    width = queries.n_units + 1
    out = np.empty((len(queries), len(tables.logs)))

    def add(rows: slice) -> None:
        histograms = _histograms(queries.words[rows], panels, weights, width)
        _kernels.log_sums(histograms, tables.logs, out[rows])

    mapper(add, _ranges(len(queries), panels, 8 * width * weights[0, 0].size))
    return out.T


def _histograms(words: WordArray, panels: WordArray, weights: Weights, width: int) -> Weights:
    """Weights by distance from each query, (queries, M + 1, R); the last axis is 1 for counts."""
    grouped, n = _query_panels(words), len(words)
    columns = weights[0, 0].size
    out = np.zeros((_whole(n), width, columns), dtype=weights.dtype)
    if weights.ndim == 2:
        _pairs.count_histograms(grouped, panels, weights, out[:, :, 0])
    else:
        _pairs.value_histograms(grouped, panels, weights, out)
    return out[:n]


def _query_panels(words: WordArray) -> WordArray:
    """Queries in panels, zeros filling the last; few of them one by one."""
    n, W = words.shape
    height = _pairs.QUERIES
    if n < height:
        return np.ascontiguousarray(words)
    padded = np.zeros((_whole(n), W), dtype=np.uint64)
    padded[:n] = words
    return np.ascontiguousarray(padded.reshape(-1, height, W).transpose(0, 2, 1))


def _whole(n: int) -> int:
    """Rows in the panels of ``n`` queries."""
    height = _pairs.QUERIES
    return n if n < height else -(-n // height) * height


def _whole_rows(rows: slice) -> slice:
    return slice(rows.start, rows.start + _whole(rows.stop - rows.start))


def _ranges(n: int, panels: WordArray, bytes_per_query: int = 0) -> list[slice]:
    """Chunks of queries: whole panels, bounded memory, and the same work for each thread where it is worth it."""
    chunks = max(1, -(-n * bytes_per_query // HISTOGRAM_BYTES))
    if n * panels.size > SMALL_WORK:
        chunks = -(-chunks // n_threads()) * n_threads()
    step = -(-n // chunks)
    return row_ranges(n, -(-max(1, step) // _pairs.QUERIES) * _pairs.QUERIES)
