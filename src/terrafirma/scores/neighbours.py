"""The exact distances of samples to their nearest neighbours among training samples, shared by several scores.

A float32 matrix product, whose rounding is bounded, says which pairs may be among the nearest; these few are measured anew
in float64. No pair that matters is lost, equal vectors are exactly 0 apart, and no part of the answer depends on blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.core._threads import n_threads, row_ranges, threads
from terrafirma.core.patterns import FloatArray, IntArray

__all__ = ["Points", "nearest", "unit_rows"]

QUERIES, ROWS = 512, 32_768  # in a block, of 64 MB: with more rows at once, fewer pairs look near that are not
NUMBERS = 1 << 25  # of a block's rows, which may be copied
COPIED = 1024  # rows that are float64 at a time
UNIT = 2.0**-24  # what float32 rounds by
TINY = 2.0**-125  # what a float32 product loses to underflow, at most
HUGE = 1e36  # larger squares might overflow in float32


@dataclass(frozen=True, eq=False)
class Points:
    """Training samples to search among.

    ``rows`` (N, d), float32 or float64; ``centre`` (d,), float32, what products are taken about; ``squares`` (N,), squared
    distances from it.
    """

    rows: npt.NDArray[Any]
    centre: npt.NDArray[np.float32]
    squares: FloatArray

    @classmethod
    def of(cls, matrix: npt.NDArray[Any]) -> Points:
        """Points of a matrix of finite floats; it is kept, not copied.

        Products are taken about the mean where that is far from the origin, for there they would lose most of their digits.
        """
        rows = np.ascontiguousarray(matrix)
        points = cls(rows, np.zeros(rows.shape[1], dtype=np.float32), np.zeros(len(rows)))
        points._measure()
        mean = np.zeros(rows.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows stays where it is
            for block in row_ranges(len(rows), COPIED):
                mean += rows[block].sum(axis=0, dtype=np.float64) / len(rows)
            mean = mean.astype(np.float32)
            if np.isfinite(mean).all() and len(rows) * (mean.astype(np.float64) @ mean) > 0.75 * points.squares.sum():
                points.centre[:] = mean
                points._measure()
        return points

    def _measure(self) -> None:
        for block in row_ranges(len(self.rows), COPIED):
            about = self.rows[block].astype(np.float64) - self.centre
            with np.errstate(over="ignore"):
                self.squares[block] = np.einsum("nd,nd->n", about, about)

    def part(self, block: slice) -> Points:
        """The points of some rows."""
        return Points(self.rows[block], self.centre, self.squares[block])

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What they are made of."""
        return dict(vars(self))

    def about_centre(self, block: slice) -> npt.NDArray[np.float32]:
        """Some rows as the product takes them."""
        rows = self.rows[block]
        with np.errstate(over="ignore"):
            return np.asarray(rows - self.centre if self.centre.any() else rows, dtype=np.float32)


def nearest(queries: npt.NDArray[Any], points: Points, k: int, skip: IntArray | None = None) -> FloatArray:
    """Euclidean distances to the ``k`` nearest points, float64 (n, k), ascending; infinite where there are fewer.

    ``skip`` (n, 2): a range of points that each query leaves out.
    """
    best = np.full((len(queries), 2, k), np.inf)
    skip = np.zeros((len(queries), 2), dtype=np.int64) if skip is None else skip
    step = min(ROWS, max(1024, NUMBERS // max(queries.shape[1], 1)))
    buffer = np.empty((min(len(queries), QUERIES), max(1, min(len(points.rows), step))), dtype=np.float32)
    for block in row_ranges(len(queries), QUERIES):
        _search(queries[block].astype(np.float64, order="C"), points, skip[block], best[block], buffer)
    return np.asarray(np.sqrt(best[:, 0]))


def _search(queries: FloatArray, points: Points, skip: IntArray, best: FloatArray, buffer: npt.NDArray[Any]) -> None:
    """Search for one block of queries, in blocks of points.

    Computed in float32, ``|q - t|^2 = |q|^2 + |t|^2 - 2 q.t`` is off by at most (d + 16) units of ``|q|^2 + |t|^2``: the
    product by d + 3 of them, roundings of the terms by less than 13.
    """
    from terrafirma.scores._neighbour_kernels import admit

    n, width = queries.shape
    with np.errstate(over="ignore"):
        about = queries - points.centre
        squares = np.einsum("nd,nd->n", about, about)
        about = about.astype(np.float32)
    off = (width + 16) * UNIT
    safe = (squares < HUGE) & (points.squares.max(initial=0) < HUGE)
    lifts = np.full((n, 2), (-np.inf, np.inf))  # nothing is known, every pair is measured
    lifts[safe, 0] = (1 - off) * squares[safe] - width * TINY
    lifts[safe, 1] = 2 * off * squares[safe] + 2 * width * TINY
    floors = np.outer((1 - off, 2 * off), np.minimum(points.squares, HUGE)).astype(np.float32)
    for block in row_ranges(len(points.rows), buffer.shape[1]):
        rows = points.rows[block]
        products = buffer.reshape(-1)[: n * len(rows)].reshape(n, len(rows))
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(about, points.about_centre(block).T, out=products)
        known = np.ascontiguousarray(floors[:, block])
        here = np.clip(skip - block.start, 0, len(rows))

        def look(part: slice, rows: Any = rows, products: Any = products, known: Any = known, here: Any = here) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # kernels that are not compiled would warn
                admit(products[part], known, rows, queries[part], lifts[part], here[part], best[part])

        threads(look, row_ranges(n, max(32, -(-n // (4 * n_threads())))))


def unit_rows(matrix: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Rows divided by their lengths, in double precision, then rounded to ``dtype`` or that of the matrix; zeros stay zeros."""
    units = np.empty(matrix.shape, dtype=dtype or matrix.dtype)
    for block in row_ranges(len(matrix), COPIED):
        rows = matrix[block].astype(np.float64)
        largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
        rows /= np.where(largest > 0, largest, 1)  # squares neither overflow nor vanish
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        units[block] = rows / np.where(lengths > 0, lengths, 1)
    return units
