"""Shared fixtures: one seeded generator, and the reference values that ship with the tests."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("same every time", deadline=None, derandomize=True)
settings.load_profile("same every time")
DATA = Path(__file__).parent / "data"


def pytest_configure(config):
    config.addinivalue_line("markers", "jit: needs compiled kernels to be bearable; skipped with NUMBA_DISABLE_JIT=1")


@pytest.fixture
def rng():
    return np.random.default_rng(20221118)


@pytest.fixture(params=["M12", "M64"])
def reference(request):
    """Arrays of one reference file, patterns unpacked to bool."""
    with np.load(DATA / f"{request.param}.npz") as file:
        arrays = dict(file)
    M = int(arrays["M"])
    for name in ("train_bits", "val_bits", "test_bits"):
        arrays[name] = np.unpackbits(arrays[name], axis=1, count=M).astype(bool)
    return arrays
