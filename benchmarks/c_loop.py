"""The hand-written C loop: compiled here for this machine's instructions, in several shapes; run in threads.

The kernel is to be compared with a good C loop, so there are several and the best one counts. A call through
ctypes releases the interpreter's lock, so Python threads serve the C loops as they serve the kernel.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import cpu_info
from terrafirma.core._threads import n_threads
from terrafirma.core.patterns import IntArray, PackedPatterns, WordArray
from terrafirma.core.regions import RegionTable

SOURCE = Path(__file__).with_name("hamming.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
STRIP_BYTES = 1 << 18  # of training patterns that stay in the cache while all queries pass


@dataclass(frozen=True)
class Variant:
    """One way to compile the loop; see ``hamming.c``."""

    mode: str  # DISTANCES, PLAIN or INTERLEAVED
    queries: int
    rows: int
    count_type: str = "int64_t"

    @property
    def dtype(self) -> type[np.generic]:
        """The numpy type of the counts."""
        return np.uint32 if self.count_type == "uint32_t" else np.int64

    def __str__(self) -> str:
        return f"{self.queries}x{self.rows} {self.mode.lower()} {self.count_type}"


SHAPES = (
    ("PLAIN", 4, 32),
    ("INTERLEAVED", 4, 32),
    ("INTERLEAVED", 6, 16),
    ("INTERLEAVED", 8, 16),
    ("INTERLEAVED", 5, 32),
    ("INTERLEAVED", 6, 32),
)
HISTOGRAMS = tuple(Variant(*shape, count_type) for shape in SHAPES for count_type in ("int64_t", "uint32_t"))
CEILINGS = tuple(Variant("DISTANCES", *shape) for shape in ((4, 32), (5, 32), (6, 16), (8, 16)))


def missing() -> str | None:
    """Say what this machine lacks to compile and run the loop; None if nothing."""
    if shutil.which("gcc") is None:
        return "gcc was not found"
    if "avx512_vpopcntdq" not in cpu_info().get("flags", ""):
        return "this CPU has no AVX512_VPOPCNTDQ"
    return None


def compile_variants(variants: tuple[Variant, ...], folder: Path) -> dict[Variant, Any]:
    """Compile loops. ``folder`` must last as long as they do."""
    with ThreadPoolExecutor(n_threads()) as pool:
        return dict(zip(variants, pool.map(lambda variant: _compile(variant, folder), variants), strict=True))


def _compile(variant: Variant, folder: Path) -> Any:
    library = folder / (str(variant).replace(" ", "_") + ".so")
    defines = (
        f"-DMODE={variant.mode}",
        f"-DQUERIES={variant.queries}",
        f"-DROWS={variant.rows}",
        f"-Dcount_t={variant.count_type}",
    )
    subprocess.run(["gcc", *FLAGS, *defines, SOURCE, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).count
    pointer, integer = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, integer, pointer, integer, integer, pointer, pointer, integer, integer]
    function.restype = None
    return function


def prepare(
    function: Any, variant: Variant, queries: PackedPatterns, table: RegionTable, pool: ThreadPoolExecutor
) -> Callable[[], IntArray | None]:
    """Make a loop ready to run on this data: histograms in a new array, None where it only takes distances.

    Laying the data out is left out of the measured time, as it is for the kernel's own table.
    """
    n, height, M = len(queries), variant.queries, queries.n_units
    grouped = _panels(queries.words, height)
    panels = _panels(table.patterns.words, variant.rows)
    counts = np.zeros(panels.shape[0] * variant.rows, dtype=variant.dtype)
    counts[: len(table)] = table.counts
    strip = max(1, STRIP_BYTES // (8 * variant.rows * panels.shape[1]))
    edges = np.linspace(0, len(grouped), n_threads() + 1).astype(int)

    def part(start: int, stop: int, histograms: IntArray) -> None:
        function(
            grouped[start:].ctypes.data,
            stop - start,
            panels.ctypes.data,
            len(panels),
            panels.shape[1],
            counts.ctypes.data,
            histograms[start * height :].ctypes.data,
            M + 1,
            strip,
        )

    def run() -> IntArray | None:
        counted = variant.mode != "DISTANCES"
        histograms = np.zeros((len(grouped) * height if counted else 0, M + 1), dtype=variant.dtype)
        parts = [pool.submit(part, start, stop, histograms) for start, stop in pairwise(edges.tolist())]
        for each in parts:
            each.result()
        return histograms[:n] if counted else None

    return run


def _panels(words: WordArray, height: int) -> npt.NDArray[np.uint64]:
    """Rows in panels [panel][word][row], zeros filling the last."""
    n, W = words.shape
    padded = np.zeros((-(-n // height) * height, W), dtype=np.uint64)
    padded[:n] = words
    return np.ascontiguousarray(padded.reshape(-1, height, W).transpose(0, 2, 1))
