import numba
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from terrafirma.scores import _neighbour_kernels as kernels
from terrafirma.scores import neighbours
from terrafirma.scores.neighbours import Points, nearest, unit_rows


def naive(queries, train, k):
    """All distances by loops, in Python's own floats."""
    found = []
    for q in queries:
        distances = []
        for t in train:
            total = 0.0
            for a, b in zip(q.tolist(), t.tolist(), strict=True):
                total += (a - b) ** 2
            distances.append(total**0.5)
        found.append(sorted(distances)[:k])
    return np.array(found)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that small data has many blocks."""
    monkeypatch.setattr(neighbours, "QUERIES", 7)
    monkeypatch.setattr(neighbours, "ROWS", 19)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_against_loops(rng, dtype, k):
    queries, train = rng.normal(size=(9, 11)).astype(dtype), rng.normal(size=(40, 11)).astype(dtype)
    np.testing.assert_allclose(nearest(queries, Points.of(train), k), naive(queries, train, k), rtol=1e-12)


@pytest.mark.parametrize("train_type", [np.float32, np.float64])
@pytest.mark.parametrize("query_type", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("scale", "shift"), [(1, 0), (1, 1e6), (1e-3, 1), (1e-22, 0), (1e-30, 0), (1e17, 0), (1e25, 0), (1, 1e12)]
)
def test_against_scipy_wherever_it_lies(rng, query_type, train_type, scale, shift):
    queries = (scale * rng.normal(size=(15, 20)) + shift).astype(query_type)
    train = (scale * rng.normal(size=(60, 20)) + shift).astype(train_type)
    expected = np.sort(cdist(queries.astype(np.float64), train.astype(np.float64)), axis=1)[:, :8]
    np.testing.assert_allclose(nearest(queries, Points.of(train), 8), expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1, 1e-20, 1e-22])
def test_float64_where_float32_cannot_tell_apart(rng, scale):
    train = 1 + 1e-9 * rng.normal(size=(80, 6))
    train[40:] += 1e3  # no mean serves both halves
    queries, train = scale * (train[::5] + 1e-10), scale * train
    expected = np.sort(cdist(queries, train), axis=1)[:, :3]
    np.testing.assert_allclose(nearest(queries, Points.of(train), 3), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_that_underflow(rng, dtype):
    train = (1e-22 * rng.choice([-1, 1], size=(80, 1)) * (1 + 0.01 * rng.normal(size=(80, 6)))).astype(dtype)
    expected = np.sort(cdist(train[:40].astype(np.float64), train[40:].astype(np.float64)), axis=1)[:, :1]
    np.testing.assert_allclose(nearest(train[:40], Points.of(train[40:]), 1), expected, rtol=1e-12)


def test_one_outlier_spoils_nothing(rng):
    train = rng.normal(size=(100, 5)).astype(np.float32)
    train[3] = 3e38
    queries = np.concatenate([rng.normal(size=(10, 5)), np.full((1, 5), 1e15)])
    expected = np.sort(cdist(queries, train.astype(np.float64)), axis=1)[:, :4]
    np.testing.assert_allclose(nearest(queries, Points.of(train), 4), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rows_are_exactly_zero_apart(rng, dtype):
    train = (1e4 + rng.normal(size=(50, 30))).astype(dtype)
    train = np.concatenate([train, train])
    found = nearest(train[:50], Points.of(train), 3)
    assert (found[:, :2] == 0).all()
    assert (found[:, 2] > 0).all()


def test_all_rows_equal():
    train = np.full((50, 4), 0.1, dtype=np.float32)
    assert (nearest(train[:3], Points.of(train), 50) == 0).all()


def test_blocks_threads_and_orders_change_nothing(rng, monkeypatch):
    queries, train = rng.normal(size=(50, 12)).astype(np.float32), rng.normal(size=(90, 12)).astype(np.float32)
    expected = nearest(queries, Points.of(train), 10)
    order, train_order = rng.permutation(50), rng.permutation(90)
    np.testing.assert_array_equal(nearest(queries[order], Points.of(train[train_order]), 10), expected[order])
    for sizes in ((1, 1), (50, 90), (1024, 4096)):
        for threads in ("1", "3"):
            monkeypatch.setenv("TERRAFIRMA_THREADS", threads)
            monkeypatch.setattr(neighbours, "QUERIES", sizes[0])
            monkeypatch.setattr(neighbours, "ROWS", sizes[1])
            np.testing.assert_array_equal(nearest(queries, Points.of(train), 10), expected)


def test_a_range_left_out(rng):
    queries, train = rng.normal(size=(20, 4)), rng.normal(size=(60, 4))
    skip = np.sort(rng.integers(0, 61, size=(20, 2)), axis=1)
    skip[0] = 0, 60
    found = nearest(queries, Points.of(train), 2, skip=skip)
    for q, (start, end), distances in zip(queries, skip, found, strict=True):
        expected = np.sort(np.append(cdist([q], np.delete(train, slice(start, end), axis=0)), [np.inf] * 2))[:2]
        np.testing.assert_allclose(distances, expected, rtol=1e-12)


def test_fewer_points_than_asked_for(rng):
    found = nearest(rng.normal(size=(2, 3)), Points.of(rng.normal(size=(1, 3))), 3)
    assert np.isfinite(found).tolist() == [[True, False, False]] * 2
    assert nearest(np.zeros((0, 3)), Points.of(np.zeros((1, 3))), 3).shape == (0, 3)
    assert (nearest(np.zeros((1, 3)), Points.of(np.zeros((0, 3))), 1) == np.inf).all()


def test_as_read_only_and_as_transposed(rng):
    train = rng.normal(size=(6, 30)).T
    expected = nearest(train[:4], Points.of(train.copy()), 2)
    train.setflags(write=False)
    np.testing.assert_array_equal(nearest(train[:4], Points.of(train), 2), expected)


@pytest.mark.skipif(not numba.config.DISABLE_JIT, reason="counts calls, which compiled kernels do not show")
@pytest.mark.parametrize("shift", [0, 1e4])
def test_most_pairs_are_only_glanced_at(rng, monkeypatch, shift):
    """With all distances computed exactly the answer would be the same, but not the time."""
    calls = []
    apart = kernels._apart
    monkeypatch.setattr(kernels, "_apart", lambda *pair: calls.append(1) or apart(*pair))
    train = shift + rng.normal(size=(100, 10))
    nearest(train[:10], Points.of(train), 1)
    assert len(calls) < 10 * 20


def test_unit_rows(rng):
    rows = rng.normal(size=(50, 7)) * 10.0 ** rng.integers(-300, 300, size=(50, 1))
    rows[3] = 0
    units = unit_rows(rows)
    assert (units[3] == 0).all()
    np.testing.assert_allclose(np.delete(np.linalg.norm(units, axis=1), 3), 1, rtol=1e-14)
    assert unit_rows(np.ones((2, 2), dtype=np.float32)).dtype == np.float32
    assert unit_rows(np.ones((2, 2), dtype=np.float32), np.float64).dtype == np.float64
