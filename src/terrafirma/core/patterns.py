"""Activation patterns as bits: which ReLUs are active, 64 to a word.

Implements eq:regions. (the pattern ``p_i`` that identifies a region).

Unit ``j`` of a pattern is bit ``j % 64`` of word ``j // 64``; unused bits of the last word are 0. A pattern of 4096 units
takes 512 bytes instead of 16 kB of float32. Packing goes through the input in chunks, so that no second full-size copy
ever exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array, check_count
from terrafirma.errors import InvalidInput

__all__ = ["BoolArray", "CountArray", "FloatArray", "IntArray", "PackedPatterns", "WordArray", "as_patterns"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
WordArray = npt.NDArray[np.uint64]
CountArray = npt.NDArray[np.uint32 | np.int64]

TYPES = "bool, float (active where > 0), integers 0 and 1, or PackedPatterns"

WORD = 64
PANEL = 32  # training patterns in a panel; compiled into the kernels, so whoever changes it must clear numba's cache
CHUNK_BYTES = 1 << 18  # of input, packed at a time
CACHE_LINE = 64


@dataclass(frozen=True, eq=False)
class PackedPatterns:
    """Activation patterns, one row each, packed to 64-bit words.

    Parameters
    ----------
    words : uint64 array (n, ceil(n_units / 64))
        Unit ``j`` is bit ``j % 64`` of word ``j // 64``; unused bits are 0.
    n_units : int
        Number of units of a pattern (M in the paper), at least 1.

    Examples
    --------
    >>> import numpy as np
    >>> packed = PackedPatterns.pack(np.array([[0.3, -1.2, 0.0], [2.0, 0.1, -0.5]]))
    >>> packed.to_bool().astype(int)
    array([[1, 0, 0],
           [1, 1, 0]])
    >>> len(packed), packed.n_units
    (2, 3)

    """

    words: WordArray
    n_units: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_units", check_count("n_units", self.n_units, least=1))
        object.__setattr__(self, "words", as_array(self.words, "words"))
        self.check()

    def check(self) -> None:
        """Raise unless words and units fit each other; the kernels rely on it."""
        n_words = words_per_row(self.n_units)
        if self.words.dtype != np.uint64 or self.words.ndim != 2 or self.words.shape[1] != n_words:
            raise InvalidInput(
                f"words must be a uint64 array of shape (n, {n_words}) for {self.n_units} units. "
                f"Got {self.words.dtype} of shape {self.words.shape}; pack activations with PackedPatterns.pack."
            )
        used = self.n_units % WORD
        if used and np.bitwise_or.reduce(self.words[:, -1]) >> np.uint64(used):
            raise InvalidInput(
                f"Bits beyond unit {self.n_units} must be 0. Got some that are set; "
                "pack activations with PackedPatterns.pack."
            )

    @classmethod
    def pack(cls, X: Any) -> PackedPatterns:
        """Pack an array (n, n_units) of activations, booleans or 0-1 integers.

        Memory beyond the result stays below a few MiB, whatever the size of ``X``.
        """
        X = _checked_array(X)
        n, n_units = X.shape
        words = aligned_zeros((-(-n // PANEL) * PANEL, words_per_row(n_units)))[:n]  # see whole_panels
        bytes_of_rows = words.view(np.uint8)
        step = max(1, CHUNK_BYTES // (n_units * X.itemsize))
        for start in range(0, n, step):
            bits = np.packbits(_active(X[start : start + step], start), axis=1, bitorder="little")
            bytes_of_rows[start : start + step, : bits.shape[1]] = bits
        return cls(words, n_units)

    @classmethod
    def empty(cls, n_units: int) -> PackedPatterns:
        """No pattern at all, of ``n_units`` units."""
        n_units = check_count("n_units", n_units, least=1)
        return cls(np.zeros((0, words_per_row(n_units)), dtype=np.uint64), n_units)

    def to_bool(self) -> BoolArray:
        """Unpack to a bool array (n, n_units)."""
        bits = np.unpackbits(
            np.ascontiguousarray(self.words).view(np.uint8), axis=1, count=self.n_units, bitorder="little"
        )
        return bits.view(np.bool_)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, rows: slice | IntArray | BoolArray) -> PackedPatterns:
        return PackedPatterns(self.words[rows], self.n_units)

    def __repr__(self) -> str:
        return f"PackedPatterns({len(self)} patterns of {self.n_units} units)"


def words_per_row(n_units: int) -> int:
    """Number of 64-bit words that hold ``n_units`` bits."""
    return -(-n_units // WORD)


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[Any]:
    """Zeros from the start of a cache line on: loads of whole vectors then never cross one."""
    size, spare = math.prod(shape), CACHE_LINE // np.dtype(dtype).itemsize
    memory = np.zeros(size + spare, dtype)
    start = -memory.ctypes.data % CACHE_LINE // memory.itemsize
    return memory[start : start + size].reshape(shape)


def whole_panels(words: WordArray) -> WordArray | None:
    """The memory of rows that come whole from ``pack``, up to the end of their last panel; None for any other rows."""
    rows, W, memory = -(-len(words) // PANEL) * PANEL, words.shape[1], words.base
    if memory is None or memory.shape != (rows * W + CACHE_LINE // 8,) or not words.flags.c_contiguous:
        return None
    start = (words.ctypes.data - memory.ctypes.data) // 8
    return memory[start : start + rows * W].reshape(rows, W) if start <= CACHE_LINE // 8 else None


def as_patterns(X: Any, *, n_units: int | None = None, name: str = "X") -> PackedPatterns:
    """Patterns of whatever the user has, checked to have ``n_units`` units if that is given.

    Parameters
    ----------
    X : PackedPatterns or array (n, n_units)
        Floats are active where > 0; else booleans or 0-1 integers.

    """
    if isinstance(X, PackedPatterns):
        X.check()  # its words may have been written to since
        patterns = X
    else:
        patterns = PackedPatterns.pack(X)
    if n_units is not None and patterns.n_units != n_units:
        raise InvalidInput(
            f"{name} must have {n_units} units, as the training patterns. "
            f"Got {patterns.n_units}; record the same layers for both."
        )
    return patterns


def _checked_array(patterns: Any) -> npt.NDArray[Any]:
    X = as_array(patterns, "Patterns")
    if X.dtype.kind not in "bfiu":
        raise InvalidInput(
            f"Patterns must be {TYPES}. Got dtype {X.dtype}; convert it first, for example with astype(float)."
        )
    if X.ndim != 2:
        raise InvalidInput(
            f"Patterns must have two dimensions, (samples, units). Got shape {X.shape}; "
            "use X[None] for one sample, X.reshape(len(X), -1) for maps, one layer or np.hstack(layers) for a list of them."
        )
    if X.shape[1] == 0:
        raise InvalidInput(f"Patterns must have at least one unit. Got shape {X.shape}.")
    return X


def _active(rows: npt.NDArray[Any], first: int) -> BoolArray:
    """Which units of these rows are active; ``first`` is the index of the first row, for messages."""
    if rows.dtype.kind == "b":
        return rows
    if rows.dtype.kind == "f":
        finite = np.isfinite(rows)
        if not finite.all():
            i, j = np.argwhere(~finite)[0]
            raise InvalidInput(
                f"Activations must be finite. Got {rows[i, j]} in row {first + i}, unit {j}; "
                "look for an overflow in the network or an input that is not a number."
            )
        return np.asarray(rows > 0)
    valid = (rows == 0) | (rows == 1)
    if not valid.all():
        i, j = np.argwhere(~valid)[0]
        raise InvalidInput(
            f"Integer patterns must be 0 or 1. Got {rows[i, j]} in row {first + i}, unit {j}; "
            "bits that are packed to bytes must be unpacked first (np.unpackbits with count=n_units); for a mask use X > 0."
        )
    return rows.astype(np.bool_)
