"""The distance kernel beside a C loop, faiss and a matrix product: pairs of patterns per second.

All compare 2 000 queries with 42 500 training patterns. They do not end with the same thing: kernel and C
loop with histograms of distances, faiss with each query's nearest pattern, the matrix product with all
distances. So first it is checked that they agree where they can.

The *ceiling* is the C loop that computes the distances and does nothing with them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import c_loop
from benchmarks.c_loop import Variant
from benchmarks.common import N_TRAIN, BoolArray, Clusters, Figure, Report, Watch, race
from terrafirma import PackedPatterns, SubfunctionBound
from terrafirma.core._threads import n_threads
from terrafirma.core.patterns import IntArray
from terrafirma.core.sums import distance_histograms

SIZES = (512, 2048, 4096)
N_QUERIES = 2000
PRODUCT_ROWS = 250  # queries multiplied at a time: the product of all would take 340 MB
HEATS = 3  # turns of every C loop
FINALISTS = 2  # C loops of one kind that go on
SECONDS = 2.0  # of each competitor

TO_C_LOOP = 0.95
TO_FAISS = {512: 1.5, 2048: 2.5, 4096: 2.5}
TO_PRODUCT = {512: 8.0, 2048: 16.0, 4096: 16.0}
SCORING_TO_CEILING = {512: 0.6, 2048: 0.85, 4096: 0.85}

Runs = dict[str, Callable[[], Any]]


def run() -> Report:
    notes, figures = [], []
    lacking = c_loop.missing()
    if lacking:
        notes.append(f"C loop and ceiling left out: {lacking}.")
    notes += [_faiss_note(), _product_note()]
    variants = () if lacking else c_loop.HISTOGRAMS + c_loop.CEILINGS
    with TemporaryDirectory() as folder, ThreadPoolExecutor(n_threads()) as pool:
        functions = c_loop.compile_variants(variants, Path(folder))
        for M in SIZES:
            new_figures, new_notes = _measure(M, functions, pool)
            figures += new_figures
            notes += new_notes
    title = f"Pairs per second: {N_QUERIES} queries x {N_TRAIN} training patterns of M bits"
    return Report("kernel", title, figures, notes).finish()


def _measure(M: int, functions: dict[Variant, Any], pool: ThreadPoolExecutor) -> tuple[list[Figure], list[str]]:
    clusters = Clusters.seeded(M)
    train, queries = clusters.draw(N_TRAIN), clusters.draw(N_QUERIES)
    packed = PackedPatterns.pack(queries)
    est = SubfunctionBound(rho=M / 32).fit(train, np.zeros(N_TRAIN))
    table = est.regions_
    table.panel_counts  # noqa: B018  # cached by the first use

    runs: Runs = {"kernel": lambda: distance_histograms(packed, table.panels, table.panel_counts)}
    truth = runs["kernel"]()
    loops = {v: c_loop.prepare(function, v, packed, table, pool) for v, function in functions.items()}
    for variant, loop in loops.items():
        _check_loop(variant, loop(), truth)
    finalists = _finalists(loops)
    runs |= {str(v): loops[v] for same_kind in finalists.values() for v in same_kind}
    runs |= _faiss(train, packed, truth)
    runs |= _product(train, queries, truth)
    runs["scoring"] = lambda: est.unreliability(packed)

    with Watch() as watch:
        times = race(runs, seconds=SECONDS)
    notes = watch.note(f"M = {M}")
    for kind, variants in finalists.items():
        best = min(variants, key=lambda v: times[str(v)])
        times[kind] = times[str(best)]
        notes.append(f"M = {M}, {kind}: the best tile was {best}.")
    rates = {name: N_QUERIES * N_TRAIN / seconds for name, seconds in times.items()}
    return _figures(M, rates), notes


def _figures(M: int, rates: dict[str, float]) -> list[Figure]:
    shown = ("ceiling", "C loop, int64", "C loop, uint32", "kernel", "faiss", "float32 product", "scoring")
    figures = [Figure(f"M = {M}: {name}", rates[name] / 1e9, "10⁹ pairs/s") for name in shown if name in rates]
    ratios = (
        ("kernel", "C loop, int64", TO_C_LOOP, False),
        ("kernel", "C loop, uint32", TO_C_LOOP, False),
        ("kernel", "ceiling", None, False),
        ("kernel", "faiss", TO_FAISS[M], False),
        ("kernel", "float32 product", TO_PRODUCT[M], False),
        ("scoring", "ceiling", SCORING_TO_CEILING[M], True),
    )
    return figures + [
        Figure(f"M = {M}: {name} / {other}", rates[name] / rates[other], "x", at_least=target, stretch=stretch)
        for name, other, target, stretch in ratios
        if other in rates
    ]


def _finalists(loops: dict[Variant, Callable[[], Any]]) -> dict[str, list[Variant]]:
    """Choose the fastest C loops of each kind, from a few turns of all."""
    times = race({str(v): loop for v, loop in loops.items()}, seconds=0.0, least=HEATS, warm_up=False)
    fastest_first = sorted(loops, key=lambda v: times[str(v)])
    kinds: dict[str, list[Variant]] = {}
    for variant in fastest_first:
        kinds.setdefault(_kind(variant), []).append(variant)
    return {kind: variants[:FINALISTS] for kind, variants in kinds.items()}


def _kind(variant: Variant) -> str:
    if variant.mode == "DISTANCES":
        return "ceiling"
    return f"C loop, {variant.dtype.__name__}"


def _check_loop(variant: Variant, histograms: IntArray | None, truth: IntArray) -> None:
    if histograms is not None and not np.array_equal(histograms, truth):
        raise AssertionError(f"The C loop {variant} and the kernel count differently.")


def _faiss(train: BoolArray, queries: PackedPatterns, truth: IntArray) -> Runs:
    """Search the exhaustive binary index for each query's nearest pattern."""
    try:
        import faiss
    except ImportError:
        return {}
    faiss.omp_set_num_threads(n_threads())
    index = faiss.IndexBinaryFlat(train.shape[1])
    index.add(PackedPatterns.pack(train).words.view(np.uint8))
    codes = queries.words.view(np.uint8)
    nearest = index.search(codes, 1)[0][:, 0]
    if not np.array_equal(nearest, (truth > 0).argmax(axis=1)):
        raise AssertionError("faiss and the kernel find different nearest distances.")
    return {"faiss": lambda: index.search(codes, 1)}


def _product(train: BoolArray, queries: BoolArray, truth: IntArray) -> Runs:
    """Multiply float32 patterns: products and numbers of ones give the distances."""
    left, right = queries.astype(np.float32), train.astype(np.float32)
    out = np.empty((PRODUCT_ROWS, len(train)), dtype=np.float32)

    def multiply() -> None:
        for start in range(0, len(left), PRODUCT_ROWS):
            rows = left[start : start + PRODUCT_ROWS]
            np.matmul(rows, right.T, out=out[: len(rows)])

    np.matmul(left[:1], right.T, out=out[:1])
    distances = left[0].sum() + right.sum(axis=1) - 2 * out[0]
    if not np.array_equal(np.bincount(distances.astype(np.int64), minlength=truth.shape[1]), truth[0]):
        raise AssertionError("The matrix product and the kernel find different distances.")
    return {"float32 product": multiply}


def _faiss_note() -> str:
    try:
        import faiss
    except ImportError:
        return "faiss left out: not installed (pip install faiss-cpu)."
    config = getattr(faiss, "SIMDConfig", None)  # where one library holds the code for all processors
    level = config.get_level_name() if config is not None else faiss.loader.__name__
    return f"faiss {faiss.__version__}, built with {faiss.get_compile_options().strip()}; running {level}."


def _product_note() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "float32 product: numpy's own BLAS."
    libraries = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    blas = next((pool for pool in libraries if "numpy" in pool["filepath"]), {})  # faiss brings another
    known = [str(blas[key]) for key in ("internal_api", "version", "architecture") if blas.get(key)]
    return f"float32 product: {' '.join(known)}, {blas.get('num_threads', '?')} threads."


if __name__ == "__main__":
    run()
