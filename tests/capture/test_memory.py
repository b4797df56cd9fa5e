"""Capture streams: beyond the table it holds no more than a few batches."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
import numpy as np
from terrafirma.capture.network import Layer, Step
from terrafirma.capture.record import record
from contextlib import contextmanager

UNITS, BATCH, BATCHES = 4096, 1024, 30
KNOWN, PATH = "known" in sys.argv, sys.argv[2] if len(sys.argv) > 2 else None

class Wide:
    '''Activations made from the inputs, 16 MB of them a batch.'''
    name, classes = "Wide", None
    def fingerprint(self): return "wide"
    @contextmanager
    def watch(self, layers, reduce, *, features):
        def run(x):
            h = np.repeat(x, UNITS // x.shape[1], axis=1)
            return Step([Layer("h", "relu", (UNITS,), bits=h > 0)], h[:, :2])
        yield run

class Loader:
    '''Batches made on the way.'''
    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(BATCHES):
            yield rng.normal(size=(BATCH, 64)).astype(np.float32), rng.integers(0, 2, BATCH)
if KNOWN:
    Loader.dataset = range(BATCH * BATCHES)

def peak():
    '''Of resident memory, since this program began: getrusage would begin with that of the parent.'''
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

record(Wide(), np.zeros((2, 64), np.float32))  # what is imported
before = peak()
rec = record(Wide(), Loader(), path=PATH)
assert len(rec) == BATCH * BATCHES
print((peak() - before - rec.patterns.words.nbytes) / (BATCH * UNITS * 4))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory as Linux counts it")
@pytest.mark.parametrize("length", ["known", "unknown"])
@pytest.mark.parametrize("written", [False, True], ids=["returned", "written"])
def test_peak_memory_is_the_packed_table_and_three_batches(length, written, tmp_path):
    """At the best of three, and without huge pages, which round arrays up by as much as 2 MB, depending on where they lie."""
    env = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    peaks = []
    while len(peaks) < 3 and min(peaks, default=3.0) >= 3:
        path = [str(tmp_path / f"rec{len(peaks)}.safetensors")] if written else []
        command = [sys.executable, "-c", CODE, length, *path]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        peaks.append(float(run.stdout))
    assert min(peaks) < 3
