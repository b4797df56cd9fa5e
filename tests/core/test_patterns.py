import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from terrafirma.core import patterns
from terrafirma.core.patterns import PackedPatterns, as_patterns
from terrafirma.errors import InvalidInput


@given(hnp.arrays(bool, st.tuples(st.integers(0, 20), st.integers(1, 200))))
def test_unpacking_returns_what_was_packed(bits):
    packed = PackedPatterns.pack(bits)
    assert packed.words.shape == (len(bits), -(-bits.shape[1] // 64))
    assert packed.words.dtype == np.uint64
    np.testing.assert_array_equal(packed.to_bool(), bits)


def test_unit_j_is_bit_j_of_the_words():
    for j in (0, 1, 63, 64, 129):
        bits = np.zeros((1, 130), dtype=bool)
        bits[0, j] = True
        (row,) = PackedPatterns.pack(bits).words.tolist()
        assert row == [2 ** (j % 64) if w == j // 64 else 0 for w in range(3)]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64, np.float16, np.float32, np.float64])
def test_every_kind_of_input_packs_alike(rng, dtype):
    bits = rng.random((33, 70)) < 0.4
    np.testing.assert_array_equal(PackedPatterns.pack(bits.astype(dtype)).words, PackedPatterns.pack(bits).words)


def test_active_means_positive():
    X = np.array([[-1.0, -0.0, 0.0, 1e-30, 2.0]])
    np.testing.assert_array_equal(PackedPatterns.pack(X).to_bool(), [[False, False, False, True, True]])


def test_chunks_do_not_change_words(rng, monkeypatch):
    X = rng.normal(size=(101, 67))
    whole = PackedPatterns.pack(X).words
    for size in (1, 67 * 8, 10 * 67 * 8):
        monkeypatch.setattr(patterns, "CHUNK_BYTES", size)
        np.testing.assert_array_equal(PackedPatterns.pack(X).words, whole)


def test_strided_and_nested_input(rng):
    X = rng.random((20, 140)) < 0.5
    np.testing.assert_array_equal(PackedPatterns.pack(X[::2, ::2]).to_bool(), X[::2, ::2])
    np.testing.assert_array_equal(PackedPatterns.pack([[1, 0], [0, 1]]).to_bool(), [[True, False], [False, True]])


def test_selecting_rows(rng):
    X = rng.random((20, 70)) < 0.5
    packed = PackedPatterns.pack(X)
    np.testing.assert_array_equal(packed[3:7].to_bool(), X[3:7])
    np.testing.assert_array_equal(packed[np.array([5, 2])].to_bool(), X[[5, 2]])
    assert len(packed) == 20
    assert repr(packed) == "PackedPatterns(20 patterns of 70 units)"


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (np.zeros(3), r"two dimensions, \(samples, units\). Got shape \(3,\); use X\[None\] for one sample"),
        (np.zeros((2, 3, 4)), r"two dimensions, .* Got shape \(2, 3, 4\)"),
        (np.zeros((3, 0)), r"at least one unit. Got shape \(3, 0\)."),
        ([[1, 2], [3]], r"rectangular array"),
        (np.array([["a", "b"]]), r"Got dtype <U1; convert it first, for example"),
        (np.array([[None, 1]]), r"Got dtype object"),
        (np.array([[1j, 1]]), r"Got dtype complex128"),
        (np.array([[0, 1], [1, 255]]), r"must be 0 or 1. Got 255 in row 1, unit 1; bits that are packed to bytes"),
        (np.array([[0, -1]]), r"must be 0 or 1. Got -1 in row 0, unit 1"),
        (np.array([[0.0, 1.0], [np.nan, 1.0]]), r"must be finite. Got nan in row 1, unit 0; look for an overflow"),
        (np.array([[0.0, -np.inf]]), r"must be finite. Got -inf in row 0, unit 1"),
    ],
)
def test_bad_input_is_named(X, message):
    with pytest.raises(InvalidInput, match=message):
        PackedPatterns.pack(X)


def test_the_row_named_is_that_of_the_whole_input(monkeypatch):
    monkeypatch.setattr(patterns, "CHUNK_BYTES", 1)
    X = np.zeros((9, 3))
    X[7, 2] = np.inf
    with pytest.raises(InvalidInput, match="inf in row 7, unit 2"):
        PackedPatterns.pack(X)


@pytest.mark.parametrize(
    ("words", "n_units", "message"),
    [
        (np.zeros((2, 1), np.uint64), 65, r"shape \(n, 2\) for 65 units. Got uint64 of shape \(2, 1\); pack"),
        (np.zeros((2, 1), np.int64), 64, r"must be a uint64 array .* Got int64"),
        (np.zeros(2, np.uint64), 64, r"Got uint64 of shape \(2,\)"),
        ([[0]], 64, r"Got int64 of shape \(1, 1\)"),
        (np.zeros((2, 1), np.uint64), 0, r"n_units must be an integer of at least 1. Got 0."),
        (np.full((1, 1), 2**5, np.uint64), 5, r"Bits beyond unit 5 must be 0. Got some that are set"),
    ],
)
def test_bad_words_are_named(words, n_units, message):
    with pytest.raises(InvalidInput, match=message):
        PackedPatterns(words, n_units)


def test_another_number_of_units_is_named():
    with pytest.raises(InvalidInput, match=r"X must have 4 units, as the training patterns. Got 3; record the same"):
        as_patterns(np.zeros((1, 3)), n_units=4)


def test_a_mask_cannot_hide_bits_from_the_check():
    full = np.full((3, 1), 2**64 - 1, dtype=np.uint64)
    with pytest.raises(InvalidInput, match="words must have a value everywhere. Got masked entries"):
        PackedPatterns(np.ma.array(full, mask=True), 1)
    with pytest.raises(InvalidInput, match="Bits beyond unit 1 must be 0"):
        PackedPatterns(np.ma.array(full, mask=False), 1)


def test_sparse_matrices_are_told_what_to_do():
    from scipy.sparse import csr_array

    with pytest.raises(
        InvalidInput, match=r"Patterns must be dense. Got a sparse csr_array; call its toarray\(\) first."
    ):
        PackedPatterns.pack(csr_array(np.eye(3)))
