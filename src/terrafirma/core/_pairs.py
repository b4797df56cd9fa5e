"""All pairs: distances between packed patterns, counted. Numba only; no formula of the paper lives here.

The hot loops compare every query with every training pattern: xor, population count, add, once for each pair and each
64-bit word. They reach the hardware because of four choices:

1. *Panels.* Patterns are laid out ``[panel, word, row]``, 6 queries or 32 training patterns to a panel, so that each lane
   of a vector register is one training pattern. A tile of 6 x 32 distances stays in registers while the words pass::

                           training panel
                     word 0   t0 t1 t2 ... t31
        query panel  word 1   t0 t1 t2 ... t31     sum[k, j] += popcount(q_k ^ t_j)
        q0 q1 ... q5   ...

2. *Counting hides behind arithmetic.* To count a distance keeps loads and stores busy, not the vector units. So the tile
   before is counted while the next one is computed: one, two or four of its rows with each word, as few as the words
   allow, and those of query k just before the arithmetic of query k. This order decides: with the same instructions
   grouped by kind, a quarter of the speed is gone.
3. *Strips.* Some hundred kB of the table stay in cache while all queries of a call pass over them.
4. *One order.* Each query meets the training patterns in their order, and counts are integers: strips, threads, chunks and
   how queries are grouped never change a result by a bit.

The tile is LLVM vector code, because no loop that numba compiles keeps it in registers. Vectors are as wide as those of
the CPU; without AVX-512 tiles are smaller, LLVM chooses how to count bits, and the result is the same. With
``NUMBA_DISABLE_JIT=1`` twins in numpy take its place. Tile and loops share this file because numba's cache looks at one
file for changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from terrafirma.core._jit import kernel
from terrafirma.core.patterns import PANEL, CountArray, FloatArray, WordArray

__all__ = ["QUERIES", "ROWS", "count_histograms", "value_histograms"]

ROWS = PANEL  # patterns in a training panel
STRIP_WORDS = 1 << 15  # words of the training panels that one strip holds: 256 kB
DistanceArray = npt.NDArray[np.uint32]


# ------------------------------------------------------------------------------------------------ the tile, in LLVM IR


def _lanes() -> int:
    """64-bit lanes of the vectors: those of this CPU, or of the one that ``NUMBA_CPU_FEATURES`` describes."""
    features: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return 8 if "+avx512f" in features else 4 if "+avx2" in features else 2


LANES = _lanes()
QUERIES = 6 if LANES == 8 else 2  # patterns in a query panel: as many as the registers hold sums for
VECTORS = ROWS // LANES
LEAST_WORDS = 8  # for the tile before to be counted beside them
i32, i64 = ir.IntType(32), ir.IntType(64)
vector, half_vector = ir.VectorType(i64, LANES), ir.VectorType(i32, LANES)


def _const(value: int) -> ir.Constant:
    return ir.Constant(i64, value)


class _Tile:
    """Code for one tile of query panel ``g`` and training panel ``b``: its distances, uint32 (height, ROWS).

    ``signature`` and ``args`` are those of an intrinsic that begins with (queries, g, panels, b, distances). The type of
    ``queries`` tells how many there are: (groups, W, QUERIES) come in panels, (n, W) one by one.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> None:
        values = [
            context.make_array(kind)(context, builder, arg) if isinstance(kind, types.Array) else arg
            for kind, arg in zip(signature.args, args, strict=True)
        ]
        queries, self.g, panels, self.b, distances = values[:5]
        self.rest = values[5:]
        self.builder = builder
        self.height = QUERIES if signature.args[0].ndim == 3 else 1
        self.n_words = builder.extract_value(panels.shape, 1)
        self.query = self.at(queries.data, self.g, self.n_words, self.height)
        self.panel = self.at(panels.data, self.b, self.n_words, ROWS)
        self.distances = distances.data
        self.popcount = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector]), f"llvm.ctpop.v{LANES}i64"
        )

    def compute(self) -> None:
        """Compute all distances."""
        self.start()
        self.add_words(0, self.n_words)
        self.store()

    def at(self, data: ir.Value, *factors: ir.Value | int) -> ir.Value:
        """A pointer into ``data``, as many items in as the product of the factors."""
        offset = _const(1)
        for factor in factors:
            offset = self.builder.mul(offset, _const(factor) if isinstance(factor, int) else factor)
        return self.builder.gep(data, [offset])

    def start(self) -> None:
        """Begin with sums of no word: vector ``v`` of query ``k`` is number ``k * VECTORS + v``."""
        self.sums = [ir.Constant(vector, [0] * LANES)] * (self.height * VECTORS)

    def add_words(self, first: int, stop: ir.Value, beside: Callable[[ir.Value, int], None] | None = None) -> None:
        """Add the distances within words ``first`` to ``stop``, in a loop, with ``beside(w, k)`` before those of query k."""
        b = self.builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "word", "summed"))
        b.branch(head)
        b.position_at_end(head)
        w = b.phi(i64)
        w.add_incoming(_const(first), before)
        phis = [b.phi(vector) for _ in self.sums]
        for phi, value in zip(phis, self.sums, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", w, stop), body, after)
        b.position_at_end(body)
        self.sums = list(phis)
        row, query = self.at(self.panel, w, ROWS), self.at(self.query, w, self.height)
        trained = [self._load_vector(self.at(row, LANES * v)) for v in range(VECTORS)]
        for k in range(self.height):
            if beside:
                beside(w, k)
            self._add_word(k, self._broadcast(b.load(self.at(query, k))), trained)
        w.add_incoming(b.add(w, _const(1)), body)
        for phi, value in zip(phis, self.sums, strict=True):
            phi.add_incoming(value, body)
        b.branch(head)
        b.position_at_end(after)
        self.sums = list(phis)

    def store(self) -> None:
        """Write the distances."""
        b = self.builder
        for i, lanes in enumerate(self.sums):
            target = b.bitcast(self.at(self.distances, i * LANES), half_vector.as_pointer())
            b.store(b.trunc(lanes, half_vector), target, align=4)

    def _add_word(self, k: int, query: ir.Value, trained: list[ir.Value]) -> None:
        b = self.builder
        for i, lanes in enumerate(trained, k * VECTORS):
            self.sums[i] = b.add(self.sums[i], b.call(self.popcount, [b.xor(query, lanes)]))

    def _load_vector(self, pointer: ir.Value) -> ir.Value:
        return self.builder.load(self.builder.bitcast(pointer, vector.as_pointer()), align=8)

    def _broadcast(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(vector, ir.Undefined)
        lane = self.builder.insert_element(undefined, scalar, ir.Constant(i32, 0))
        return self.builder.shuffle_vector(lane, undefined, ir.Constant(half_vector, [0] * LANES))


class _CountingTile(_Tile):
    """The same, while the distances of the tile before, still there, are counted.

    The intrinsic's arguments go on with (counts, histograms).
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> None:
        super().__init__(context, builder, signature, args)
        counts, histograms = self.rest
        width = builder.extract_value(histograms.shape, 1)
        first = self.at(histograms.data, self.g, width, self.height)
        self.histograms = [self.at(first, width, k) for k in range(self.height)]
        self.counts = self.at(counts.data, builder.sub(self.b, _const(1)), ROWS)
        self.add = builder.fadd if isinstance(self.counts.type.pointee, ir.DoubleType) else builder.add

    def compute(self, rows: int = 1) -> None:
        """Compute and count, ``rows`` of the tile before with each word, or twice as many where there are too few words."""
        words = ROWS // rows
        if words < LEAST_WORDS:
            self._count_tile()
            super().compute()
            return
        enough = self.builder.icmp_signed(">=", self.n_words, _const(words))
        with self.builder.if_else(enough) as (then, otherwise):
            with then:
                self.start()
                self.add_words(0, _const(words), partial(self._count_rows, rows))
                self.add_words(words, self.n_words)
                self.store()
            with otherwise:
                self.compute(2 * rows)

    def _count_tile(self) -> None:
        """Count the whole tile before."""
        for j in range(ROWS):
            weight = self.builder.load(self.at(self.counts, j))
            for k in range(self.height):
                distance = self.builder.load(self.at(self.distances, k * ROWS + j))
                self._count(k, self.builder.zext(distance, i64), weight)

    def _count_rows(self, rows: int, w: ir.Value, k: int) -> None:
        """Count for query ``k`` what belongs to word ``w``."""
        b = self.builder
        distances, counts = (self.at(pointer, w, rows) for pointer in (self.at(self.distances, k * ROWS), self.counts))
        if rows == 1:
            self._count(k, b.zext(b.load(distances), i64), b.load(counts))
        for i in range(0, rows - 1, 2):  # two to a load: ports for loads are what is scarce
            both = b.load(b.bitcast(self.at(distances, i), i64.as_pointer()), align=4)
            self._count(k, b.and_(both, _const(0xFFFF_FFFF)), b.load(self.at(counts, i)))
            self._count(k, b.lshr(both, _const(32)), b.load(self.at(counts, i + 1)))

    def _count(self, k: int, distance: ir.Value, weight: ir.Value) -> None:
        place = self.at(self.histograms[k], distance)
        self.builder.store(self.add(self.builder.load(place), weight), place)


def _measure(typing: Any, queries: Any, g: Any, panels: Any, b: Any, distances: Any) -> Any:
    """Write the distances of query panel ``g`` to training panel ``b``: uint32 (height, ROWS)."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _Tile(context, builder, signature, args).compute()
        return context.get_dummy_value()

    return types.void(queries, types.intp, panels, types.intp, distances), generate


def _measure_and_count(
    typing: Any, queries: Any, g: Any, panels: Any, b: Any, distances: Any, counts: Any, histograms: Any
) -> Any:
    """The same, while the distances to panel ``b - 1``, still there, are counted into the histograms of panel ``g``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        _CountingTile(context, builder, signature, args).compute()
        return context.get_dummy_value()

    return types.void(queries, types.intp, panels, types.intp, distances, counts, histograms), generate


def _measure_twin(queries: WordArray, g: int, panels: WordArray, b: int, distances: DistanceArray) -> None:
    different = queries[g].reshape(panels.shape[1], -1, 1) ^ panels[b][:, None, :]
    distances[:] = np.bitwise_count(different).sum(axis=0, dtype=np.uint32)


def _measure_and_count_twin(
    queries: WordArray,
    g: int,
    panels: WordArray,
    b: int,
    distances: DistanceArray,
    counts: CountArray,
    histograms: CountArray,
) -> None:
    height = len(distances)
    for k, row in enumerate(histograms[g * height : (g + 1) * height]):
        np.add.at(row, distances[k], counts[b - 1])
    _measure_twin(queries, g, panels, b, distances)


measure: Any
measure_and_count: Any
if config.DISABLE_JIT:  # type: ignore[attr-defined]
    measure, measure_and_count = _measure_twin, _measure_and_count_twin
else:
    measure = intrinsic(_measure)
    measure_and_count = intrinsic(_measure_and_count)


# ------------------------------------------------------------------------------------------------------------ the loops


# Queries come in panels, uint64 (groups, W, 6), or few of them one by one, (n, W): kernels are compiled for either.


@kernel
def _height(queries: WordArray) -> int:
    """Queries in a panel; known when the kernel is compiled."""
    return QUERIES if queries.ndim == 3 else 1


@kernel
def _strip(panels: WordArray) -> int:
    """Panels that stay in cache while all queries pass over them."""
    return int(max(2, STRIP_WORDS // (ROWS * panels.shape[1])))


@kernel
def count_histograms(queries: WordArray, panels: WordArray, counts: Any, histograms: Any) -> None:
    """Add to ``histograms[q, h]`` the ``counts`` of the training patterns at distance ``h`` from query ``q``.

    panels (n, W, 32), counts (n, 32) of integers or floats, histograms (groups * height, M + 1) of the same type, all
    contiguous.
    """
    height, strip = _height(queries), _strip(panels)
    distances = np.empty((height, ROWS), dtype=np.uint32)
    for start in range(0, len(panels), strip):
        stop = min(start + strip, len(panels))
        for g in range(len(queries)):
            measure(queries, g, panels, start, distances)
            for b in range(start + 1, stop):
                measure_and_count(queries, g, panels, b, distances, counts, histograms)
            for j in range(ROWS):
                for k in range(height):
                    histograms[g * height + k, distances[k, j]] += counts[stop - 1, j]


@kernel
def value_histograms(queries: WordArray, panels: WordArray, values: Any, histograms: FloatArray) -> None:
    """Add to ``histograms[q, h, r]`` the ``values[.., r]`` of the training patterns at distance ``h`` from query ``q``.

    values (n, 32, R), histograms (groups * height, M + 1, R).
    """
    height = _height(queries)
    distances = np.empty((height, ROWS), dtype=np.uint32)
    for g in range(len(queries)):
        for b in range(len(panels)):
            measure(queries, g, panels, b, distances)
            for k in range(height):
                for j in range(ROWS):
                    h = distances[k, j]
                    for r in range(values.shape[2]):
                        histograms[g * height + k, h, r] += values[b, j, r]
