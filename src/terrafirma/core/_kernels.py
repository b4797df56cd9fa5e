"""The loops: distances between packed patterns, counted. Numba only; no formula of the paper lives here.

The hot loop compares every query with every training pattern: xor, population count, add, once for each pair and each
64-bit word. It reaches the hardware because of four choices:

1. *Panels.* Patterns are laid out ``[panel, word, row]``, 4 queries or 16 training patterns to a panel, so that each lane
   of a vector register is one training pattern. A tile of 4 x 16 distances stays in registers while the words pass::

                           training panel
                     word 0   t0 t1 t2 ... t15
        query panel  word 1   t0 t1 t2 ... t15     d[k, j] += popcount(q_k ^ t_j)
        q0 q1 q2 q3    ...

2. *The counting hides behind the arithmetic.* While the distances of one tile are computed, those of the tile before are
   scattered into the histograms, two rows with each word: loads and stores go where the vector units are not.
3. *Strips.* Some hundred kB of the table stay in cache while all queries of a call pass over them.
4. *Integers.* Counts are exact, so tile size, strips, threads and order never change a histogram by a bit.

The tile is LLVM vector code, because no loop that numba compiles keeps it in registers. Vectors are as wide as those of
the CPU; without AVX-512 the result is the same, and LLVM chooses how to count bits. With ``NUMBA_DISABLE_JIT=1`` a twin
in numpy takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from terrafirma.core.patterns import PANEL, BoolArray, FloatArray, IntArray, WordArray

QUERIES = 4  # patterns in a query panel; single queries come in panels of 1
ROWS = PANEL  # patterns in a training panel: 16
STRIP_WORDS = 1 << 14  # words of the training panels that one strip holds: 128 kB

kernel = njit(nogil=True, cache=True, boundscheck=False)


# ------------------------------------------------------------------------------------------------ the tile, in LLVM IR


def _lanes() -> int:
    """64-bit lanes of this CPU's vectors, by the features that numba compiles for."""
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return 8 if "+avx512f" in features else 4 if "+avx2" in features else 2


LANES = _lanes()
VECTORS = ROWS // LANES
i32, i64 = ir.IntType(32), ir.IntType(64)
vector = ir.VectorType(i64, LANES)
Values = list[ir.Value]


def _const(value: int) -> ir.Constant:
    return ir.Constant(i64, value)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


class _Tile:
    """Code for one tile: ``height`` queries x ROWS training patterns.

    Distances leave packed, two queries to a 64-bit lane: ``distances[k // 2, j] >> 32 * (k % 2)``.
    """

    def __init__(
        self, height: int, builder: ir.IRBuilder, queries: ir.Value, panel: ir.Value, n_words: ir.Value
    ) -> None:
        self.height, self.builder, self.n_words = height, builder, n_words
        self.queries, self.panel = queries, panel
        self.popcount = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector]), f"llvm.ctpop.v{LANES}i64"
        )
        self.sums: Values = [_splat(0)] * (height * VECTORS)

    def add_word(self, w: ir.Value) -> None:
        """Add the distances within word ``w`` to the sums."""
        b = self.builder
        row = b.gep(self.panel, [b.mul(w, _const(ROWS))])
        trained = [self._load(b.gep(row, [_const(LANES * v)])) for v in range(VECTORS)]
        first_query = b.gep(self.queries, [b.mul(w, _const(self.height))])
        for k in range(self.height):
            query = self._broadcast(b.load(b.gep(first_query, [_const(k)])))
            for v in range(VECTORS):
                i = k * VECTORS + v
                self.sums[i] = b.add(self.sums[i], b.call(self.popcount, [b.xor(query, trained[v])]))

    def add_words(self, start: ir.Value) -> None:
        """Add all words from ``start`` on, in a loop."""
        b = self.builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "word", "counted"))
        b.branch(head)
        b.position_at_end(head)
        w = b.phi(i64)
        w.add_incoming(start, before)
        phis = [b.phi(vector) for _ in self.sums]
        for phi, value in zip(phis, self.sums, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", w, self.n_words), body, after)
        b.position_at_end(body)
        self.sums = list(phis)
        self.add_word(w)
        w.add_incoming(b.add(w, _const(1)), body)
        for phi, value in zip(phis, self.sums, strict=True):
            phi.add_incoming(value, body)
        b.branch(head)
        b.position_at_end(after)
        self.sums = list(phis)

    def store(self, distances: ir.Value) -> None:
        """Write the packed distances."""
        b = self.builder
        for k in range(0, self.height, 2):
            for v in range(VECTORS):
                lanes = self.sums[k * VECTORS + v]
                if k + 1 < self.height:
                    lanes = b.or_(lanes, b.shl(self.sums[(k + 1) * VECTORS + v], _splat(32)))
                target = b.gep(distances, [_const(k // 2 * ROWS + v * LANES)])
                b.store(lanes, b.bitcast(target, vector.as_pointer()), align=8)

    def load_distances(self, distances: ir.Value, j: int) -> Iterator[ir.Value]:
        """The distances of training row ``j``, one for each query."""
        b = self.builder
        for k in range(0, self.height, 2):
            pair = b.load(b.gep(distances, [_const(k // 2 * ROWS + j)]))
            yield b.and_(pair, _const(0xFFFFFFFF))
            if k + 1 < self.height:
                yield b.lshr(pair, _const(32))

    def _load(self, pointer: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.bitcast(pointer, vector.as_pointer()), align=8)

    def _broadcast(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(vector, ir.Undefined)
        lane = self.builder.insert_element(undefined, scalar, ir.Constant(i32, 0))
        return self.builder.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(i32, LANES), [0] * LANES))


def _open_tile(height: int, context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> tuple[_Tile, list[Any]]:
    """A tile for (queries, g, panels, b, ...), and the arguments, arrays as their structs."""
    values = [
        context.make_array(kind)(context, builder, arg) if isinstance(kind, types.Array) else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]
    queries, g, panels, b = values[:4]
    n_words = builder.extract_value(panels.shape, 1)
    query = builder.gep(queries.data, [builder.mul(g, builder.mul(n_words, _const(height)))])
    panel = builder.gep(panels.data, [builder.mul(b, builder.mul(n_words, _const(ROWS)))])
    return _Tile(height, builder, query, panel, n_words), values


def _tile_intrinsics(height: int) -> tuple[Any, Any]:
    """Two functions for query panels of this height: distances alone, and distances while counting the tile before."""

    @intrinsic
    def measure(typing: Any, queries: Any, g: Any, panels: Any, b: Any, distances: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            tile, values = _open_tile(height, context, builder, signature, args)
            tile.add_words(_const(0))
            tile.store(values[4].data)
            return context.get_dummy_value()

        return types.void(queries, types.intp, panels, types.intp, distances), generate

    @intrinsic
    def measure_and_count(
        typing: Any,
        queries: Any,
        g: Any,
        panels: Any,
        b: Any,
        distances: Any,
        counts: Any,
        histograms: Any,
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            tile, values = _open_tile(height, context, builder, signature, args)
            _, g, _, b, distances, counts, histograms = values
            width = builder.extract_value(histograms.shape, 1)
            first = builder.gep(histograms.data, [builder.mul(g, builder.mul(width, _const(height)))])
            rows = [builder.gep(first, [builder.mul(width, _const(k))]) for k in range(height)]
            last_counts = builder.gep(counts.data, [builder.mul(builder.sub(b, _const(1)), _const(ROWS))])

            def count(j: int) -> None:
                """Scatter row ``j`` of the tile before."""
                weight = builder.load(builder.gep(last_counts, [_const(j)]))
                for row, distance in zip(rows, list(tile.load_distances(distances.data, j)), strict=True):
                    place = builder.gep(row, [distance])
                    builder.store(builder.add(builder.load(place), weight), place)

            with builder.if_else(builder.icmp_signed(">=", tile.n_words, _const(ROWS // 2))) as (wide, narrow):
                with wide:
                    for j in range(ROWS):
                        if j % 2 == 0:
                            tile.add_word(_const(j // 2))
                        count(j)
                    tile.add_words(_const(ROWS // 2))
                    tile.store(distances.data)
                with narrow:
                    for j in range(ROWS):
                        count(j)
                    tile.sums = [_splat(0)] * len(tile.sums)
                    tile.add_words(_const(0))
                    tile.store(distances.data)
            return context.get_dummy_value()

        return types.void(queries, types.intp, panels, types.intp, distances, counts, histograms), generate

    return measure, measure_and_count


def _tile_twins(height: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The same two functions in plain numpy, for ``NUMBA_DISABLE_JIT=1``."""

    def measure(queries: WordArray, g: int, panels: WordArray, b: int, distances: WordArray) -> None:
        different = queries[g][:, :, None] ^ panels[b][:, None, :]
        tile = np.bitwise_count(different).sum(axis=0, dtype=np.uint64)
        distances[:] = tile[0::2]
        distances[: height // 2] |= tile[1::2] << np.uint64(32)

    def measure_and_count(
        queries: WordArray,
        g: int,
        panels: WordArray,
        b: int,
        distances: WordArray,
        counts: IntArray,
        histograms: IntArray,
    ) -> None:
        _count(distances, counts, b - 1, histograms, g, height)
        measure(queries, g, panels, b, distances)

    return measure, measure_and_count


_make = _tile_twins if config.DISABLE_JIT else _tile_intrinsics  # type: ignore[attr-defined]
_measure4, _measure_and_count4 = _make(QUERIES)
_measure1, _measure_and_count1 = _make(1)


# ------------------------------------------------------------------------------------------------------------ the loops


@kernel
def _distance(distances: WordArray, k: int, j: int) -> int:
    """Distance of query ``k`` to row ``j`` of a tile."""
    return int((distances[k >> 1, j] >> np.uint64(32 * (k & 1))) & np.uint64(0xFFFFFFFF))


@kernel
def _count(distances: WordArray, counts: IntArray, b: int, histograms: IntArray, g: int, height: int) -> None:
    """Scatter the tile of query panel ``g`` and training panel ``b``."""
    for j in range(ROWS):
        for k in range(height):
            histograms[g * height + k, _distance(distances, k, j)] += counts[b, j]


@kernel
def count_histograms(queries: WordArray, panels: WordArray, counts: IntArray, histograms: IntArray) -> None:
    """Add to ``histograms[q, h]`` the ``counts`` of the training patterns at distance ``h`` from query ``q``.

    queries (groups, W, 4 or 1), panels (n, W, 16), counts (n, 16), histograms (groups * 4 or 1, M + 1), all contiguous.
    """
    groups, n_words, height = queries.shape
    distances = np.empty(((height + 1) // 2, ROWS), dtype=np.uint64)
    strip = max(2, STRIP_WORDS // (ROWS * n_words))
    for start in range(0, len(panels), strip):
        stop = min(start + strip, len(panels))
        for g in range(groups):
            if height == QUERIES:
                _measure4(queries, g, panels, start, distances)
                for b in range(start + 1, stop):
                    _measure_and_count4(queries, g, panels, b, distances, counts, histograms)
            else:
                _measure1(queries, g, panels, start, distances)
                for b in range(start + 1, stop):
                    _measure_and_count1(queries, g, panels, b, distances, counts, histograms)
            _count(distances, counts, stop - 1, histograms, g, height)


@kernel
def value_histograms(queries: WordArray, panels: WordArray, values: FloatArray, histograms: FloatArray) -> None:
    """Add to ``histograms[q, h, r]`` the ``values[.., r]`` of the training patterns at distance ``h`` from query ``q``.

    values (n, 16, R), histograms (groups * 4 or 1, M + 1, R). Each query meets the patterns in their order, so the sums
    do not depend on how queries are grouped.
    """
    groups, _, height = queries.shape
    distances = np.empty(((height + 1) // 2, ROWS), dtype=np.uint64)
    for g in range(groups):
        for b in range(len(panels)):
            if height == QUERIES:
                _measure4(queries, g, panels, b, distances)
            else:
                _measure1(queries, g, panels, b, distances)
            for k in range(height):
                for j in range(ROWS):
                    h = _distance(distances, k, j)
                    for r in range(values.shape[2]):
                        histograms[g * height + k, h, r] += values[b, j, r]


@kernel
def log_sums(histograms: Any, log_tables: FloatArray, out: FloatArray) -> None:
    """Logs of histograms times tables: ``out[q, r] = log sum_h histograms[q, h, r] exp(log_tables[r, h])``.

    histograms (Q, M + 1, R or 1), a last axis of 1 serving all tables. Scaled by the largest entry of the table among
    occupied distances, so that nothing overflows and only what is nothing beside it underflows.
    """
    n, width, columns = histograms.shape
    occupied = np.empty(width, dtype=np.intp)
    for q in range(n):
        m = 0
        for h in range(width):
            for c in range(columns):
                if histograms[q, h, c] != 0:
                    occupied[m] = h
                    m += 1
                    break
        for r in range(len(log_tables)):
            c = r if columns > 1 else 0
            log_table = log_tables[r]
            largest = -np.inf
            for i in range(m):
                if histograms[q, occupied[i], c] != 0:
                    largest = max(largest, log_table[occupied[i]])
            total = 0.0
            if largest > -np.inf:
                for i in range(m):
                    h = occupied[i]
                    total += histograms[q, h, c] * math.exp(log_table[h] - largest)
            out[q, r] = largest + math.log(total) if total > 0 else -np.inf


@kernel
def hash_rows(words: WordArray, out: WordArray) -> None:
    """A 64-bit hash of each row: equal rows have equal hashes. Part of the file format: it orders the regions."""
    for i in range(len(words)):
        h = np.uint64(0x9E3779B97F4A7C15)
        for w in range(words.shape[1]):
            h = (h ^ words[i, w]) * np.uint64(0xFF51AFD7ED558CCD)
            h ^= h >> np.uint64(32)
        out[i] = h


@kernel
def find_groups(words: WordArray, hashes: WordArray, order: IntArray, first: BoolArray) -> bool:
    """Mark in ``first`` where row ``order[i]`` is another pattern than the one before it.

    Returns whether two different neighbours have one hash, so that equal patterns may stand apart.
    """
    collision = False
    for i in range(len(order)):
        first[i] = i == 0
        for w in range(words.shape[1]):
            if first[i]:
                break
            first[i] = words[order[i], w] != words[order[i - 1], w]
        collision |= i > 0 and first[i] and hashes[order[i]] == hashes[order[i - 1]]
    return collision


@kernel
def number_groups(order: IntArray, first: BoolArray, group: IntArray) -> None:
    """Number the groups that begin where ``first`` is set: the group of each row."""
    g = -1
    for i in range(len(order)):
        g += first[i]
        group[order[i]] = g


@kernel
def permute_rows(words: WordArray, permutation: IntArray) -> None:
    """Put row ``permutation[i]`` at ``i`` for all rows, in place, cycle by cycle; the permutation is used up."""
    lifted = np.empty(words.shape[1], dtype=np.uint64)
    for start in range(len(words)):
        if permutation[start] < 0:
            continue
        lifted[:] = words[start]
        i = start
        while permutation[i] != start:
            source = permutation[i]
            words[i] = words[source]
            permutation[i] = -1
            i = source
        words[i] = lifted
        permutation[i] = -1


@kernel
def rows_to_panels(blocks: WordArray) -> None:
    """Turn each block of 16 rows (n, 16, W) into a panel (W, 16), in its own memory."""
    _, height, n_words = blocks.shape
    block = np.empty((height, n_words), dtype=np.uint64)
    for b in range(len(blocks)):
        block[:] = blocks[b]
        panel = blocks[b].reshape(n_words, height)
        for w in range(n_words):
            for j in range(height):
                panel[w, j] = block[j, w]


@kernel
def log_binomial_sum(n: int, shift: float, rho: float, scale: float, log_factorial: FloatArray) -> float:
    """Log of ``sum_c C(n, c) exp(-scale ((c + shift) / rho)^2)`` over c = 0..n.

    The terms are log-concave: the largest is found by bisection on the ratio of neighbours, and the sum runs outward from
    it, term by ratio of terms, until nothing is left to add.
    """
    low, high = 0, n  # the peak: the first c whose ratio to the next term is at most 1
    while low < high:
        c = (low + high) // 2
        if math.log((n - c) / (c + 1.0)) > scale * ((2 * (c + shift) + 1) / rho) / rho:
            low = c + 1
        else:
            high = c
    peak = low
    total, term = 1.0, 1.0
    for c in range(peak, n):
        term *= (n - c) / (c + 1.0) * math.exp(-scale * ((2 * (c + shift) + 1) / rho) / rho)
        total += term
        if term < 1e-22:
            break
    term = 1.0
    for c in range(peak, 0, -1):
        term *= c / (n - c + 1.0) * math.exp(scale * ((2 * (c + shift) - 1) / rho) / rho)
        total += term
        if term < 1e-22:
            break
    x = (peak + shift) / rho
    return float(log_factorial[n] - log_factorial[peak] - log_factorial[n - peak] - scale * x * x + math.log(total))
