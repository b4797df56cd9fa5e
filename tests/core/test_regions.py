import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.sparse import csr_array

import terrafirma
from terrafirma.core import _kernels, regions
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput
from tests import naive


def build(X, errors=None, **kwargs):
    errors = np.zeros(len(X)) if errors is None else errors
    return RegionTable.build(PackedPatterns.pack(X), errors, **kwargs)


def assert_equal_tables(a, b, *, samples=True):
    assert a.n_units == b.n_units
    np.testing.assert_array_equal(a.panels, b.panels)
    np.testing.assert_array_equal(a.counts, b.counts)
    assert a.counts.dtype == b.counts.dtype == np.int64
    np.testing.assert_allclose(a.error_sum, b.error_sum, rtol=1e-12, atol=1e-12)
    assert (a.label_counts is None) == (b.label_counts is None)
    if a.label_counts is not None:
        assert a.label_counts.shape == b.label_counts.shape
        assert abs(a.label_counts - b.label_counts).nnz == 0
    if samples:
        assert (a.sample_region is None) == (b.sample_region is None)
        if a.sample_region is not None:
            np.testing.assert_array_equal(a.sample_region, b.sample_region)


few_patterns = hnp.arrays(bool, st.tuples(st.integers(1, 40), st.just(3)))


@given(few_patterns, st.data())
def test_counts_and_errors_are_those_of_the_naive_twin(X, data):
    errors = data.draw(hnp.arrays(float, len(X), elements=st.sampled_from([0.0, 0.25, 1.0])))
    table = build(X, errors)
    expected = naive.regions([tuple(row) for row in X.tolist()], errors)
    found = {
        tuple(p): (n, e)
        for p, n, e in zip(table.patterns.to_bool().tolist(), table.counts, table.error_sum, strict=True)
    }
    assert found == expected
    assert len(table) == len(expected)
    assert table.n_samples == len(X)


def test_patterns_fill_whole_panels_and_come_back(rng):
    for n in (1, 15, 16, 17, 300, 5000):
        X = rng.random((n, 130)) < 0.5
        table = build(X)
        assert table.panels.shape == (-(-n // 32), 3, 32)
        assert {r.tobytes() for r in table.patterns.to_bool()} == {r.tobytes() for r in X}
        np.testing.assert_array_equal(table.rows(np.array([n - 1])).words[0], table.patterns.words[n - 1])


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("distinct", [True, False])
def test_a_table_that_takes_over_the_patterns_is_the_same(rng, n, distinct):
    X, errors = rng.random((n, 130 if distinct else 3)) < 0.5, rng.random(n)
    assert_equal_tables(RegionTable.build_in_place(PackedPatterns.pack(X), errors), build(X, errors))


def test_patterns_of_the_user_are_never_taken_over(rng):
    packed = PackedPatterns.pack(rng.random((100, 9)) < 0.5)
    before = packed.words.copy()
    terrafirma.SubfunctionBound().fit(packed, np.zeros(100))
    terrafirma.select(packed, np.zeros(100), packed, np.zeros(100), rhos=[1.0])
    np.testing.assert_array_equal(packed.words, before)


def test_row_order_does_not_matter(rng):
    X, errors = rng.random((500, 7)) < 0.5, rng.random(500)
    shuffled = rng.permutation(500)
    assert_equal_tables(build(X, errors), build(X[shuffled], errors[shuffled]))


def test_each_sample_knows_its_region(rng):
    X, labels = rng.random((200, 5)) < 0.5, rng.integers(4, size=200)
    table = build(X, labels=labels, keep_samples=True)
    np.testing.assert_array_equal(table.patterns.to_bool()[table.sample_region], X)
    expected = np.zeros((len(table), 4), dtype=int)
    np.add.at(expected, (table.sample_region, labels), 1)
    np.testing.assert_array_equal(table.label_counts.toarray(), expected)
    assert build(X).sample_region is None
    assert build(X).label_counts is None


@given(few_patterns, st.lists(st.integers(0, 40), min_size=2, max_size=2), st.booleans())
def test_merge_is_the_table_of_the_concatenation_in_any_order(X, cuts, extras):
    rng = np.random.default_rng(len(X))
    errors, labels = rng.random(len(X)), rng.integers(3, size=len(X))
    a, b = sorted(min(c, len(X)) for c in cuts)
    kwargs = [
        {"labels": labels[part], "keep_samples": True} if extras else {}
        for part in (slice(0, a), slice(a, b), slice(b, None), slice(None))
    ]
    parts = [
        build(X[s], errors[s], **k) for s, k in zip((slice(0, a), slice(a, b), slice(b, None)), kwargs, strict=False)
    ]
    whole = build(X, errors, **kwargs[3])
    left = parts[0].merge(parts[1]).merge(parts[2])
    right = parts[0].merge(parts[1].merge(parts[2]))
    backwards = parts[2].merge(parts[1]).merge(parts[0])
    assert_equal_tables(left, whole)
    assert_equal_tables(right, whole)
    assert_equal_tables(backwards, whole, samples=False)


def test_the_empty_table_is_the_unit(rng):
    table = build(rng.random((50, 9)) < 0.5, rng.random(50), labels=rng.integers(2, size=50), keep_samples=True)
    empty = RegionTable.empty(9)
    assert len(empty) == empty.n_samples == 0
    assert_equal_tables(table.merge(empty), table)
    assert_equal_tables(empty.merge(table), table)
    assert len(empty.merge(empty)) == 0


def test_counts_past_32_bits_merge_exactly(rng):
    table = build(rng.random((20, 9)) < 0.5)
    for each in (2**40 + 1, 2**53 + 1):
        big = RegionTable(table.panels, 9, table.counts * each, table.error_sum)
        assert big.merge(table).counts.tolist() == [n * (each + 1) for n in table.counts.tolist()]


def test_errors_sum_as_exactly_as_floats_can():
    """A thousand errors too small to show beside one, before it and after it."""
    errors = np.r_[np.full(500, 1e-17), 1.0, np.full(500, 1e-17)]
    table = build(np.ones((1001, 3)), errors)
    assert table.error_sum[0] == math.fsum(errors) > 1.0


def test_colliding_hashes_are_told_apart(rng, monkeypatch):
    X, errors = rng.random((300, 70)) < 0.02, rng.random(300)
    expected = naive.regions([tuple(row) for row in X.tolist()], errors)

    def collide(words, out):
        out[:] = words[:, 0] % np.uint64(2)

    monkeypatch.setattr(_kernels, "hash_rows", collide)
    table = build(X, errors)
    found = dict(zip([tuple(p) for p in table.patterns.to_bool().tolist()], table.counts.tolist(), strict=True))
    assert found == {p: n for p, (n, _) in expected.items()}
    shuffled = rng.permutation(300)
    assert_equal_tables(table, build(X[shuffled], errors[shuffled]))


def test_the_hash_that_orders_regions_is_fixed():
    words = np.array([[0, 0], [1, 0], [0, 1], [2**63, 12345]], dtype=np.uint64)
    out = np.empty(4, dtype=np.uint64)
    with np.errstate(over="ignore"):
        _kernels.hash_rows(words, out)
    expected = []
    for row in words.tolist():
        h = 0x9E3779B97F4A7C15
        for word in row:
            h = (h ^ word) * 0xFF51AFD7ED558CCD % 2**64
            h ^= h >> 32
        expected.append(h)
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([0.0, 1.0], r"errors must have one entry for each of the 3 rows. Got 2; pair them anew."),
        (
            [[0.0], [0.0], [1.0]],
            r"errors must be numbers of shape \(3,\), one for each row. Got float64 of shape \(3, 1\); for a classifier",
        ),
        (np.array([0, 1, 0], dtype=object), r"Got object of shape \(3,\); .* for objects use astype\(float\)."),
        (["0", "1", "0"], r"Got <U1 of shape \(3,\)"),
        (
            [0.0, 1.5, 0.0],
            r"errors must lie in \[0, 1\]. Got 1.5 in row 1; for a classifier use prediction != label, else scale",
        ),
        ([0.0, 0.0, -0.1], r"Got -0.1 in row 2"),
        ([np.nan, 0.0, 0.0], r"Got nan in row 0; leave out such rows, here and in what goes with them."),
    ],
)
def test_bad_errors_are_named(errors, message):
    with pytest.raises(InvalidInput, match=message):
        build(np.zeros((3, 2)), errors)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1],
        [0, -1, 2],
        np.full(3, 2**63, dtype=np.uint64),
        [0, 1, 2**31],
        [0.5, 1.0, 2.0],
        ["a", "b", "c"],
        [[0], [1, 2], []],
    ],
)
def test_bad_labels_are_named(labels):
    with pytest.raises(
        InvalidInput, match=r"labels must be (integers from 0 to \d+ of shape \(3,\)|a rectangular array)"
    ):
        build(np.zeros((3, 2)), labels=labels)


def test_tables_of_another_size_do_not_merge():
    with pytest.raises(InvalidInput, match=r"patterns of one size. Got 2 and 3 units; record the same layers"):
        build(np.zeros((1, 2))).merge(build(np.zeros((1, 3))))


def test_layout_fills_with_zeros(rng):
    values = rng.random((40, 3))
    filled = regions.fill_panels(values)
    assert filled.shape == (2, 32, 3)
    np.testing.assert_array_equal(filled.reshape(64, 3)[:40], values)
    assert not filled.reshape(64, 3)[40:].any()


def test_tables_cannot_be_written_to():
    table = build(np.eye(3))
    for array in (table.panels, table.counts, table.error_sum, table.panel_counts):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 7


def test_arrays_handed_to_a_table_stay_the_users():
    """The table keeps copies: bits set later, beyond the last unit, would be counted out of bounds."""
    table = build(np.eye(3))
    panels, counts = table.panels.copy(), table.counts.copy()
    other = RegionTable(panels, 3, counts, table.error_sum)
    panels[:], counts[:] = 2**64 - 1, 7
    assert_equal_tables(other, table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.array([1, 0, 1])}, r"counts must be positive, and their sum below 2\^62. Got others"),
        (
            {"counts": np.array([2**61, 2**61, 2**61])},
            r"counts must be positive, and their sum below 2\^62. Got others",
        ),
        ({"error_sum": np.array([0.0, 1.5, 0.0])}, "error_sum must lie between 0 and the region's count. Got others"),
        (
            {"error_sum": np.array([0.0, np.nan, 0.0])},
            "error_sum must lie between 0 and the region's count. Got others",
        ),
        ({"counts": np.ones(3)}, r"counts must be a contiguous int64 array of shape \(3,\). Got float64"),
        ({"panels": np.full((1, 1, 32), 8, np.uint64)}, "Bits beyond unit 3 must be 0. Got some that are set"),
        ({"label_counts": csr_array(np.eye(3, 2, dtype=int))}, "label_counts must sum to the counts of the regions"),
        ({"label_counts": csr_array(np.eye(4, dtype=int))}, "label_counts must sum to the counts of the regions"),
        ({"sample_region": np.array([0, 1, 1])}, "sample_region must number each sample's region, as often as counts"),
        ({"sample_region": np.array([0, 1, 10**15])}, "sample_region must number each sample's region, as often as"),
        ({"sample_region": np.array([0, 1, 2, 99])}, "sample_region must number each sample's region, as often as"),
        ({"sample_region": np.array([0.0, 1.0, 2.0])}, "sample_region must number each sample's region, as often as"),
    ],
)
def test_tables_that_cannot_be_are_named(change, message):
    table = build(np.eye(3), np.zeros(3))
    parts = {"panels": table.panels, "n_units": 3, "counts": table.counts, "error_sum": table.error_sum} | change
    with pytest.raises(InvalidInput, match=message):
        RegionTable(**parts)


@pytest.mark.parametrize("rows", [[-1], [3], [0, 99]])
def test_rows_that_do_not_exist_are_named(rows):
    with pytest.raises(InvalidInput, match=r"regions must be numbers from 0 to 2. Got array"):
        build(np.eye(3)).rows(np.array(rows))


def test_only_tables_merge():
    with pytest.raises(
        InvalidInput, match=r"other must be a RegionTable. Got NoneType; make one with RegionTable.build."
    ):
        build(np.eye(3)).merge(None)


@pytest.mark.parametrize("n_units", [0, 3.0, True])
def test_the_number_of_units_is_checked(n_units):
    table = build(np.eye(3))
    with pytest.raises(InvalidInput, match="n_units must be an integer of at least 1. Got"):
        RegionTable(table.panels, n_units, table.counts, table.error_sum)


@pytest.mark.parametrize(
    "kept", [np.arange(0, 300, 3), np.arange(300)[::-1], np.array([5, 5, 7])], ids=["few", "all, reversed", "twice"]
)
def test_the_table_of_some_samples_is_that_of_these_alone(rng, kept):
    bits, errors = rng.random((300, 7)) < 0.3, rng.random(300)
    table = RegionTable.build(PackedPatterns.pack(bits), errors, keep_samples=True)
    some = table.of_samples(kept, errors[kept])
    alone = RegionTable.build(PackedPatterns.pack(bits[kept]), errors[kept], keep_samples=True)
    for name in ("panels", "counts", "error_sum", "sample_region"):
        np.testing.assert_array_equal(getattr(some, name), getattr(alone, name))


def test_the_table_of_some_samples_needs_to_know_them(rng):
    table = RegionTable.build(PackedPatterns.pack(rng.random((9, 7)) < 0.5), np.zeros(9))
    message = "The table must know the region of each sample. Got none; build it with keep_samples=True."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        table.of_samples(np.arange(3), np.zeros(3))
