"""The distance kernel: exact histograms, whatever the sizes, chunks, threads and CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrafirma.core import _kernels, _pairs, sums
from terrafirma.core._threads import n_threads, row_ranges, serial, threads
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.core.sums import distance_histograms
from terrafirma.errors import InvalidInput
from tests import naive


def table_of(X):
    return RegionTable.build(PackedPatterns.pack(X), np.zeros(len(X)))


def histograms(Q, X, **kwargs):
    table = table_of(X)
    return distance_histograms(PackedPatterns.pack(Q), table.panels, table.panel_counts, **kwargs)


def by_counting(Q, X):
    """The same by a comparison of every bit."""
    M = X.shape[1]
    return np.array([np.bincount((q ^ X).sum(axis=1), minlength=M + 1) for q in Q]).reshape(len(Q), M + 1)


@given(st.integers(1, 12), st.integers(0, 10), st.integers(1, 40), st.randoms(use_true_random=False))
def test_histograms_are_those_of_the_naive_twin(M, n_queries, n, random):
    draw = np.random.default_rng(random.getrandbits(32))
    Q, X = draw.random((n_queries, M)) < 0.5, draw.random((n, M)) < 0.5
    expected = [naive.histogram(tuple(q), [tuple(x) for x in X.tolist()], M) for q in Q.tolist()]
    assert histograms(Q, X).tolist() == expected


@pytest.mark.parametrize("M", [1, 63, 64, 65, 448, 449, 512, 513, 960, 1024, 1025, 1984, 2048, 2049, 70_001])
@pytest.mark.parametrize(("n_queries", "n"), [(0, 3), (1, 1), (3, 32), (5, 33), (6, 64), (9, 97)])
def test_every_size_and_remainder(rng, M, n_queries, n):
    Q, X = rng.random((n_queries, M)) < 0.5, rng.random((n, M)) < 0.5
    found = histograms(Q, X)
    np.testing.assert_array_equal(found, by_counting(Q, X))


def test_all_rows_equal_and_all_bits_different():
    X = np.zeros((100, 130), dtype=bool)
    assert histograms(X[:1], X)[0].tolist() == [100] + [0] * 130
    assert histograms(~X[:1], X)[0].tolist() == [0] * 130 + [100]


@pytest.mark.jit
@pytest.mark.parametrize("M", [64, 600])
def test_tables_longer_than_a_strip(rng, M):
    n = 80_000
    assert n * -(-M // 64) > 2 * _pairs.STRIP_WORDS
    Q, X = rng.random((6, M)) < 0.5, rng.random((n, M)) < 0.5
    np.testing.assert_array_equal(histograms(Q, X), by_counting(Q, X))


def test_counts_past_32_bits(rng):
    """Histograms are as narrow as the number of samples allows, and exact on both sides of the limit."""
    X = rng.random((64, 70)) < 0.5
    table = table_of(X)
    for each, dtype in ((2**26 - 1, np.uint32), (2**26, np.int64), (2**40 + 1, np.int64)):
        many = RegionTable(table.panels, 70, table.counts * each, table.error_sum)
        found = distance_histograms(PackedPatterns.pack(X), many.panels, many.panel_counts)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, by_counting(X, X) * each)


def test_chunks_threads_and_strategy_never_change_a_bit(rng, monkeypatch):
    Q, X = rng.random((50, 140)) < 0.5, rng.random((200, 140)) < 0.5
    expected = histograms(Q, X, mapper=serial)
    for work in (0, 1 << 40):
        for workers in ("1", "2", "5"):
            monkeypatch.setattr(sums, "SMALL_WORK", work)
            monkeypatch.setenv("TERRAFIRMA_THREADS", workers)
            np.testing.assert_array_equal(histograms(Q, X, mapper=threads), expected)
    for q in range(50):
        np.testing.assert_array_equal(histograms(Q[q : q + 1], X)[0], expected[q])


def test_log_sums_neither_overflow_nor_underflow():
    counts = np.array([[0, 3, 0, 2], [0, 0, 0, 0], [5, 0, 0, 0]], dtype=np.int64)[:, :, None]
    tables = np.array([[0.0, -5000.0, -6000.0, -5001.0], [0.0, 5000.0, -np.inf, 5001.0], [0.0, -np.inf, 0.0, -np.inf]])
    out = np.empty((3, 3))
    _kernels.log_sums(counts, tables, out)
    expected = [-5000 + np.log(3 + 2 * np.exp(-1)), 5001 + np.log(2 + 3 * np.exp(-1)), -np.inf]
    np.testing.assert_allclose(out[0], expected, rtol=1e-15)
    assert (out[1] == -np.inf).all()
    np.testing.assert_allclose(out[2], np.log(5))


@pytest.mark.parametrize("far", [500.0, 598.0, 599.0, 660.0, 689.0, 691.0, 740.0, 1e5])
def test_log_sums_of_small_and_of_many_terms(far):
    """On both sides of where scaling by the table's largest entry ends, and with 2^62 samples at the far end of it."""
    tables = np.array([[0.0, -far, -far - 1, -1e6]])
    counts = np.array([[0, 3, 2, 1], [1, 0, 0, 0], [0, 1, 2**62, 2**62]], dtype=np.int64)[:, :, None]
    out = np.empty((3, 1))
    _kernels.log_sums(counts, tables, out)
    expected = [np.log(3 + 2 * np.exp(-1)) - far, 0.0, np.log(1 + 2.0**62 * np.exp(-1)) - far]
    np.testing.assert_allclose(out[:, 0], expected, rtol=1e-14, atol=1e-14)


def test_row_ranges_cover_each_row_once():
    for n in (0, 1, 7, 8):
        for step in (1, 3, 100):
            assert [i for r in row_ranges(n, step) for i in range(n)[r]] == list(range(n))


def test_number_of_threads(monkeypatch):
    monkeypatch.setenv("TERRAFIRMA_THREADS", "3")
    assert n_threads() == 3
    monkeypatch.delenv("TERRAFIRMA_THREADS")
    assert 1 <= n_threads() <= (os.cpu_count() or 1)
    for bad in ("0", "two", "-1", ""):
        monkeypatch.setenv("TERRAFIRMA_THREADS", bad)
        with pytest.raises(InvalidInput, match=f"TERRAFIRMA_THREADS must be a positive integer. Got '{bad}'."):
            n_threads()


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    monkeypatch.setenv("TERRAFIRMA_THREADS", "2")

    def fail(rows):
        raise RuntimeError(f"at {rows.start}")

    with pytest.raises(RuntimeError, match="at 0"):
        threads(fail, row_ranges(4, 1))


PORTABLE = """
import numpy as np
from terrafirma import SubfunctionBound
from terrafirma.core import _pairs
from tests.core.test_kernels import by_counting, histograms
rng = np.random.default_rng(1)
for M, n_queries, n in ((1, 1, 5), (70, 5, 33), (512, 9, 100), (1000, 2, 17)):
    Q, X = rng.random((n_queries, M)) < 0.5, rng.random((n, M)) < 0.5
    np.testing.assert_array_equal(histograms(Q, X), by_counting(Q, X))
    est = SubfunctionBound(rho=M / 8).fit(X, np.zeros(n))
    density = np.log(by_counting(Q, X) @ np.exp(est._fitted.smoother.log_d[0])) - est.log_u_
    np.testing.assert_allclose(est.terms(Q).log_density, density, rtol=1e-12, atol=1e-12)
print("lanes", _pairs.LANES)
"""


@pytest.mark.jit
@pytest.mark.parametrize(("features", "lanes"), [("", 2), ("+avx,+avx2,+popcnt", 4)])
def test_machines_without_avx512(tmp_path, features, lanes):
    """Compiled for a plain x86-64 and for one with AVX2, in a process of its own."""
    if sys.platform == "win32" or os.uname().machine != "x86_64":
        pytest.skip("the target is x86-64")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run([sys.executable, "-c", PORTABLE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["lanes", str(lanes)]


UNWRITABLE = """
from numba.core import caching
implementation = getattr(caching, "CacheImpl", None) or caching._CacheImpl  # by the version of numba
implementation._locator_classes = []  # as where neither the package nor a home can be written to
import numpy as np, terrafirma
X = np.eye(9) > 0
print(terrafirma.SubfunctionBound(rho=2.0).fit(X, np.zeros(9)).unreliability(X[:1]).shape)
"""


@pytest.mark.jit
def test_without_a_place_for_compiled_code_it_is_compiled_anew():
    run = subprocess.run([sys.executable, "-c", UNWRITABLE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["(1,)"]
