"""The loops of the search for nearest neighbours: a glance at all pairs, an exact look at the few that may matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrafirma.core._jit import kernel
from terrafirma.core.patterns import FloatArray, IntArray

GLANCE = 64  # columns judged together: none of them is near, almost always
ROUND_UP = 2.0**-22  # so that a limit never falls when it is rounded to float32


@kernel
def admit(
    products: Any, floors: Any, rows: Any, queries: FloatArray, lifts: FloatArray, skip: IntArray, best: FloatArray
) -> None:
    """Put squared distances of queries (n, d) to rows (m, d) among the k smallest so far, ``best[:, 0]``, ascending.

    What float32 products know of a distance is that its square lies between ``floors[0, j] - 2 products[i, j] + lifts[i, 0]``
    and that plus ``floors[1, j] + lifts[i, 1]``. ``best[:, 1]``: the k smallest upper ends so far. First these of all rows,
    then the distances, in float64, of the few whose lower end they leave. Columns from ``skip[i, 0]`` to ``skip[i, 1]`` are
    left out.
    """
    for i in range(len(products)):
        for exact in (False, True):
            for part in range(2):
                first = 0 if part == 0 else skip[i, 1]
                end = skip[i, 0] if part == 0 else len(rows)
                known = (products[i, first:end], floors[0, first:end], floors[1, first:end])
                _admit(known, rows[first:end], queries[i], lifts[i], best[i], exact)


@kernel
def _admit(known: Any, rows: Any, query: FloatArray, lift: FloatArray, best: FloatArray, exact: bool) -> None:
    """The same for one query: upper ends alone, or exact distances."""
    products, lows, gaps = known
    for start in range(0, len(products), GLANCE):
        seen, low = products[start : start + GLANCE], lows[start : start + GLANCE]
        limit = _limit(best, lift)
        if not _any_near(seen, low, limit):
            continue
        for j in range(len(seen)):
            if low[j] - np.float32(2) * seen[j] > limit:
                continue
            if exact:
                _insert(best[0], _apart(rows[start + j], query))
            else:
                lower = float(low[j]) - 2.0 * float(seen[j]) + lift[0]
                _insert(best[1], lower + (float(gaps[start + j]) + lift[1]))
            limit = _limit(best, lift)


@kernel
def _limit(best: FloatArray, lift: FloatArray) -> Any:
    """What float32 products are held against; asked whether they are above it, so that NaN is not."""
    above = min(best[0, -1], best[1, -1]) - lift[0]
    return np.float32(above + abs(above) * ROUND_UP)


@kernel
def _any_near(products: Any, floors: Any, limit: Any) -> bool:
    """Counted to the end, over whole arrays: only such a loop is compiled to one that takes many at a time."""
    near = np.int32(0)
    for j in range(len(products)):
        near += np.int32(not floors[j] - np.float32(2) * products[j] > limit)
    return bool(near > 0)


@kernel
def _insert(best: FloatArray, value: float) -> None:
    """Put a value in its place among ascending ones; the largest drops out."""
    if not value < best[-1]:
        return
    place = len(best) - 1
    while place > 0 and best[place - 1] > value:
        best[place] = best[place - 1]
        place -= 1
    best[place] = value


@kernel
def _apart(row: Any, query: FloatArray) -> float:
    """The squared distance of two vectors, in eight sums side by side."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = 0.0
    whole = len(query) // 8 * 8
    for u in range(0, whole, 8):
        a0 += (row[u] - query[u]) ** 2
        a1 += (row[u + 1] - query[u + 1]) ** 2
        a2 += (row[u + 2] - query[u + 2]) ** 2
        a3 += (row[u + 3] - query[u + 3]) ** 2
        a4 += (row[u + 4] - query[u + 4]) ** 2
        a5 += (row[u + 5] - query[u + 5]) ** 2
        a6 += (row[u + 6] - query[u + 6]) ** 2
        a7 += (row[u + 7] - query[u + 7]) ** 2
    for u in range(whole, len(query)):
        a0 += (row[u] - query[u]) ** 2
    return float(((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7)))
