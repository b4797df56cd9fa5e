"""Populated activation regions: unique patterns with their counts and errors.

Implements eq:emp_risk. (per region: ``N_l`` and the summed error ``N_l R(h_l)``).

Tables form a monoid under ``merge``: the table of two data sets together is the merge of their tables, in any order, and
the empty table is its unit. Regions stand in a canonical order (by a fixed hash of the pattern, then by its words), so
that equal data give equal tables whatever the order of their rows.

The table holds its patterns once, laid out in panels for the kernels; ``patterns`` gives them back row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.core import _kernels
from terrafirma.core._checks import as_array, check_count, check_errors
from terrafirma.core.patterns import (
    PANEL,
    WORD,
    CountArray,
    FloatArray,
    IntArray,
    PackedPatterns,
    WordArray,
    aligned_zeros,
    whole_panels,
    words_per_row,
)
from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["RegionTable", "Rows", "fill_panels", "lay_out"]

MOST_SAMPLES = 2**62  # so that sums of two tables still fit into 64 bits
MOST_LABELS = 2**31


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Populated regions in canonical order.

    Attributes
    ----------
    panels : uint64 array (ceil(L / 32), W, 32)
        The L distinct patterns, ``panels[l // 32, w, l % 32]`` being word w of pattern l; zeros fill the last panel.
    n_units : int
        Units of a pattern (M).
    counts : int64 array (L,)
        Samples in each region (N_l).
    error_sum : float64 array (L,)
        Summed error of the samples in each region (N_l R(h_l)), each error in [0, 1].
    label_counts : sparse int64 array (L, C), optional
        Samples of each label in each region.
    sample_region : int64 array (N,), optional
        The region of each sample.

    """

    panels: WordArray
    n_units: int
    counts: IntArray
    error_sum: FloatArray
    label_counts: csr_array | None = None
    sample_region: IntArray | None = None

    def __post_init__(self) -> None:
        n_units = check_count("n_units", self.n_units, least=1)
        object.__setattr__(self, "n_units", n_units)
        L, W, spare = len(self.counts), words_per_row(n_units), n_units % WORD
        panels = (-(-L // PANEL), W, PANEL)
        for name, value, dtype, shape in (
            ("panels", self.panels, np.uint64, panels),
            ("counts", self.counts, np.int64, (L,)),
            ("error_sum", self.error_sum, np.float64, (L,)),
        ):
            if value.dtype != dtype or value.shape != shape or not value.flags.c_contiguous:
                raise InvalidInput(
                    f"{name} must be a contiguous {dtype.__name__} array of shape {shape}. "
                    f"Got {value.dtype} of shape {value.shape}; make tables with RegionTable.build."
                )
            # read-only, and nobody else's to write: kernels rely on what is checked here, and so does what is derived from it
            kept = value.copy() if value.flags.writeable else value
            kept.setflags(write=False)
            object.__setattr__(self, name, kept)
        if (self.counts < 1).any() or self.counts.sum(dtype=np.float64) >= MOST_SAMPLES:
            raise InvalidInput("counts must be positive, and their sum below 2^62. Got others; look for an overflow.")
        if not ((self.error_sum >= 0) & (self.error_sum <= self.counts * (1 + 1e-9))).all():
            raise InvalidInput(
                "error_sum must lie between 0 and the region's count. Got others; each error is in [0, 1]."
            )
        self._check_optional_parts()
        if spare and np.bitwise_or.reduce(self.panels[:, -1], axis=None) >> np.uint64(spare):
            raise InvalidInput(
                f"Bits beyond unit {self.n_units} must be 0. Got some that are set; pack the patterns anew."
            )

    def _check_optional_parts(self) -> None:
        of_labels = self.counts if self.label_counts is None else self.label_counts.sum(axis=1)
        if not np.array_equal(of_labels, self.counts):
            raise InvalidInput("label_counts must sum to the counts of the regions. Got others; count the labels anew.")
        if self.sample_region is None:
            return
        samples = self.sample_region
        valid = samples.dtype == np.int64 and samples.ndim == 1 and len(samples) == self.counts.sum()
        valid = valid and samples.min(initial=0) >= 0 and samples.max(initial=-1) < len(self)
        if not valid or not np.array_equal(np.bincount(samples, minlength=len(self)), self.counts):
            raise InvalidInput(
                "sample_region must number each sample's region, as often as counts say. Got others; build the table anew."
            )

    @classmethod
    def build(
        cls,
        patterns: PackedPatterns,
        errors: Any,
        *,
        labels: Any = None,
        keep_samples: bool = False,
    ) -> RegionTable:
        """The table of a data set.

        Parameters
        ----------
        patterns : PackedPatterns
            One row each sample.
        errors : array (n,)
            The error of each sample, in [0, 1].
        labels : integer array (n,), optional
            Classes from 0; counted for each region if given.
        keep_samples : bool
            Whether to keep the region of each sample.

        """
        if not isinstance(patterns, PackedPatterns):
            raise InvalidInput(
                f"patterns must be PackedPatterns. Got {type(patterns).__name__}; pack them with PackedPatterns.pack."
            )
        errors = check_errors(errors, len(patterns))
        labels = None if labels is None else _check_labels(labels, len(patterns))
        region, rows, n_regions = _group(patterns.words)
        panels = lay_out(Rows(patterns, rows[:n_regions]))
        label_counts = None if labels is None else _count_labels(region, labels, n_regions)
        return cls(
            panels, patterns.n_units, *_sums(region, errors, n_regions), label_counts, region if keep_samples else None
        )

    @classmethod
    def build_in_place(cls, patterns: PackedPatterns, errors: FloatArray) -> RegionTable:
        """``build`` in the memory of patterns fresh from ``pack``, which are then gone: half the memory. Not for users."""
        region, rows, n_regions = _group(patterns.words)
        panels = _lay_out_in_place(patterns, rows, n_regions)
        del rows
        return cls(panels, patterns.n_units, *_sums(region, errors, n_regions))

    @classmethod
    def empty(cls, n_units: int) -> RegionTable:
        """The table of no sample: the unit of ``merge``."""
        return cls.build(PackedPatterns.empty(n_units), np.zeros(0), keep_samples=True)

    def merge(self, other: RegionTable) -> RegionTable:
        """The table of both data sets together.

        Label counts and the region of each sample (first all of this table's samples, then all of the other's) are kept
        where both tables have them; a table without samples takes nothing away.
        """
        if not isinstance(other, RegionTable):
            raise InvalidInput(
                f"other must be a RegionTable. Got {type(other).__name__}; make one with RegionTable.build."
            )
        if self.n_units != other.n_units:
            raise InvalidInput(
                f"Tables to merge must have patterns of one size. Got {self.n_units} and {other.n_units} units; "
                "record the same layers for both."
            )
        if len(self) == 0 or len(other) == 0:
            return other if len(self) == 0 else self
        both = PackedPatterns(np.concatenate([self.patterns.words, other.patterns.words]), self.n_units)
        region, rows, n_regions = _group(both.words)
        counts = np.zeros(n_regions, dtype=np.int64)
        np.add.at(counts, region, np.concatenate([self.counts, other.counts]))  # bincount would round past 2^53
        counts = _frozen(counts)
        error_sum = _sum_by_region(region, np.concatenate([self.error_sum, other.error_sum]), n_regions)
        label_counts, sample_region = None, None
        if self.label_counts is not None and other.label_counts is not None:
            label_counts = _stack_label_counts(self.label_counts, other.label_counts, region, n_regions)
        if self.sample_region is not None and other.sample_region is not None:
            sample_region = region[np.concatenate([self.sample_region, len(self) + other.sample_region])]
        return RegionTable(
            lay_out(Rows(both, rows[:n_regions])), self.n_units, counts, error_sum, label_counts, sample_region
        )

    def of_samples(self, samples: IntArray, errors: Any) -> RegionTable:
        """The table of some of the samples, in this order, with their errors: what ``build`` gives for these alone.

        Samples are numbered in the order in which they came; the table must have been built with ``keep_samples``.
        """
        if self.sample_region is None:
            raise InvalidInput(
                "The table must know the region of each sample. Got none; build it with keep_samples=True."
            )
        region = self.sample_region[samples]
        errors = check_errors(errors, len(region))
        counts = np.bincount(region, minlength=len(self))
        populated = np.flatnonzero(counts)
        number = np.zeros(len(self), dtype=np.int64)
        number[populated] = np.arange(len(populated))
        panels = self.panels if len(populated) == len(self) else lay_out(Rows(self, populated))
        new_region = number[region]
        return RegionTable(
            panels,
            self.n_units,
            _frozen(counts[populated]),
            _sum_by_region(new_region, errors, len(populated)),
            sample_region=_frozen(new_region),
        )

    @property
    def patterns(self) -> PackedPatterns:
        """The patterns row by row, as a copy."""
        return self.rows(np.arange(len(self)))

    def rows(self, regions: IntArray) -> PackedPatterns:
        """The patterns of some regions, as a copy."""
        if len(regions) and not (regions.min() >= 0 and regions.max() < len(self)):
            raise InvalidInput(f"regions must be numbers from 0 to {len(self) - 1}. Got {regions!r:.80}.")
        return PackedPatterns(self.panels[regions // PANEL, :, regions % PANEL], self.n_units)

    @cached_property
    def panel_counts(self) -> CountArray:
        """Counts by panel and row, (panels, 32): uint32 where their sum fits, else int64; what fills the last panel is 0."""
        return fill_panels(self.counts.astype(np.uint32 if self.n_samples < 2**32 else np.int64))

    @cached_property
    def n_samples(self) -> int:
        """Samples in all regions (N)."""
        return int(self.counts.sum())

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"RegionTable({len(self)} regions of {self.n_units} units, {self.n_samples} samples)"


def _check_labels(labels: Any, n: int) -> IntArray:
    values = as_array(labels, "labels")
    valid = values.dtype.kind in "iu" and values.shape == (n,)
    if not valid or (n and not 0 <= int(values.min()) <= int(values.max()) < MOST_LABELS):
        raise InvalidInput(
            f"labels must be integers from 0 to {MOST_LABELS - 1} of shape ({n},), one for each row of patterns. "
            f"Got {values.dtype} of shape {values.shape}{f', {values.min()} to {values.max()}' if valid else ''}; "
            "number the classes."
        )
    return values.astype(np.int64)


def _group(words: WordArray) -> tuple[IntArray, IntArray, int]:
    """Number the distinct patterns, ordered by the hash of their words, then by the words.

    Returns the region of each row; all rows, first one of each region in order, then the rest; and the number of regions.
    """
    hashes = np.empty(len(words), dtype=np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        _kernels.hash_rows(words, hashes)
    order = np.argsort(hashes, kind="stable")
    first = np.empty(len(order), dtype=np.bool_)
    if _kernels.find_groups(words, hashes, order, first):  # so rare that sorting by all words may take its time
        order = np.lexsort([*words.T[::-1], hashes])
        _kernels.find_groups(words, hashes, order, first)
    del hashes
    region = np.empty(len(order), dtype=np.int64)
    _kernels.number_groups(order, first, region)
    return region, np.concatenate([order[first], order[~first]]), int(first.sum())


@dataclass(frozen=True, eq=False)
class Rows:
    """Some patterns of a data set or a table, gathered slice by slice as they are read."""

    source: PackedPatterns | RegionTable
    indices: IntArray

    @property
    def n_units(self) -> int:
        """Units of a pattern (M)."""
        return self.source.n_units

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: slice) -> PackedPatterns:
        chosen = self.indices[rows]
        return self.source.rows(chosen) if isinstance(self.source, RegionTable) else self.source[chosen]


def lay_out(patterns: PackedPatterns | Rows) -> WordArray:
    """Patterns in panels (see ``_pairs``), zeros filling the last: uint64 (ceil(n / 32), W, 32)."""
    n, W = len(patterns), words_per_row(patterns.n_units)
    panels = aligned_zeros((-(-n // PANEL), W, PANEL))
    step = 256 * PANEL
    for start in range(0, n, step):
        part = patterns[start : start + step].words
        whole = len(part) // PANEL
        target = panels[start // PANEL :]
        target[:whole] = part[: whole * PANEL].reshape(whole, PANEL, W).transpose(0, 2, 1)
        if whole * PANEL < len(part):
            target[whole, :, : len(part) - whole * PANEL] = part[whole * PANEL :].T
    panels.setflags(write=False)
    return panels


def _lay_out_in_place(patterns: PackedPatterns, rows: IntArray, n_regions: int) -> WordArray:
    """``lay_out`` of the first rows of a permutation (used up), in the memory of the patterns, which are nobody else's."""
    words, room = patterns.words, whole_panels(patterns.words)
    if room is None or not words.flags.writeable:
        return lay_out(Rows(patterns, rows[:n_regions]))
    W, n_panels = words.shape[1], -(-n_regions // PANEL)
    _kernels.permute_rows(words, rows)
    room[n_regions:] = 0
    _kernels.rows_to_panels(room.reshape(-1, PANEL, W))
    panels = room.reshape(-1, W, PANEL)
    if 2 * n_panels > len(panels):
        return _frozen(panels[:n_panels])
    few = aligned_zeros((n_panels, W, PANEL))  # so that the larger memory is freed
    few[:] = panels[:n_panels]
    return _frozen(few)


def _sums(region: IntArray, errors: FloatArray, n_regions: int) -> tuple[IntArray, FloatArray]:
    """Counts and summed errors of the regions."""
    return _frozen(np.bincount(region, minlength=n_regions)), _sum_by_region(region, errors, n_regions)


def _sum_by_region(region: IntArray, values: FloatArray, n_regions: int) -> FloatArray:
    """Summed values of each region, as exact as one rounding: the order of samples and of merges never matters."""
    sums = np.zeros(n_regions)
    _kernels.sum_groups(region, values, sums)
    return _frozen(sums)


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def fill_panels(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values (n, ...) by panel and row, (ceil(n / 32), 32, ...), zeros filling the last panel."""
    n = len(values)
    filled = np.zeros((-(-n // PANEL) * PANEL, *values.shape[1:]), dtype=values.dtype)
    filled[:n] = values
    filled.setflags(write=False)
    return filled.reshape(-1, PANEL, *values.shape[1:])


def _count_labels(regions: IntArray, labels: IntArray, n_regions: int) -> csr_array:
    from scipy.sparse import coo_array

    n_labels = int(labels.max(initial=-1)) + 1
    ones = np.ones(len(labels), dtype=np.int64)
    return coo_array((ones, (regions, labels)), shape=(n_regions, n_labels)).tocsr()


def _stack_label_counts(a: csr_array, b: csr_array, region: IntArray, n_regions: int) -> csr_array:
    """Label counts of two tables whose rows go to ``region``."""
    from scipy.sparse import coo_array

    a, b = a.tocoo(), b.tocoo()
    rows = region[np.concatenate([a.row, b.row + a.shape[0]])]
    shape = (n_regions, max(a.shape[1], b.shape[1]))
    columns = np.concatenate([a.col, b.col])
    return coo_array((np.concatenate([a.data, b.data]), (rows, columns)), shape=shape).tocsr()
