"""Peak memory of ``fit`` beyond its input, as a ratio to the packed patterns.

Each case runs in a process of its own. It fits something small with the same types, so that all is loaded and
compiled and threads have their stacks, then measures one fit by the peak of its resident memory (Linux only:
what the process really takes), and another by tracemalloc (what numpy asks for; allocations inside compiled
code are not seen).
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.common import N_TRAIN, BoolArray, Figure, Report
from terrafirma import SubfunctionBound

CASES = ((N_TRAIN, 512), (N_TRAIN, 2048), (N_TRAIN, 4096), (200_000, 2048))
WRONG = 0.01
WARM_UP = 2000  # rows, enough that threads have work
TARGET, STRETCH = 2.2, 1.2
ROOT = Path(__file__).parents[1]
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run() -> Report:
    figures = []
    for n, M in CASES:
        command = [sys.executable, "-m", "benchmarks.memory", str(n), str(M)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        peaks = json.loads(done.stdout)
        packed = n * -(-M // 64) * 8
        figures.append(Figure(f"{n} x {M}: packed patterns", packed / 2**20, "MiB"))
        for how, peak in peaks.items():
            figures.append(Figure(f"{n} x {M}: peak, by {how}", peak / packed, "x packed", at_most=TARGET))
        most = max(peaks.values()) / packed
        name = f"{n} x {M}: peak, the larger of them"
        figures.append(Figure(name, most, "x packed", at_most=STRETCH, stretch=True))
    return Report("memory", "Peak memory of fit from a bool array, beyond the array", figures).finish()


def measure(n: int, M: int) -> dict[str, int]:
    """Fit in this process: peak bytes by each way to see them."""
    rng = np.random.default_rng(0)
    X, errors = _patterns(n, M, rng), rng.random(n) < WRONG
    _fit(X[:WARM_UP].copy(), np.arange(WARM_UP) < WARM_UP // 10)
    peaks = {}
    if RESET.exists():
        peaks["resident memory"] = _resident_peak(X, errors)
    gc.collect()
    tracemalloc.start()
    _fit(X, errors)
    peaks["tracemalloc"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peaks


def _fit(X: BoolArray, errors: BoolArray) -> None:
    est = SubfunctionBound(rho=16.0).fit(X, errors)
    if len(est.regions_) != len(X):
        raise AssertionError("All rows must be distinct.")


def _resident_peak(X: BoolArray, errors: BoolArray) -> int:
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # memory that was freed but kept would hide what fit takes
        libc.malloc_trim(0)
    RESET.write_text("5", encoding="ascii")  # the peak becomes what is resident now
    before = _status("VmRSS")
    _fit(X, errors)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _patterns(n: int, M: int, rng: np.random.Generator) -> BoolArray:
    X = np.empty((n, M), dtype=np.bool_)
    for start in range(0, n, 1024):
        rows = X[start : start + 1024]
        rows[:] = rng.integers(0, 2, rows.shape, dtype=np.uint8)
    return X


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        run()
