"""Sums around queries: straight from a table, or by histogram, they are the same."""

import numpy as np
import pytest

from terrafirma.core import sums
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable, fill_panels
from terrafirma.core.sums import DistanceTables, log_sums
from terrafirma.core.weighting import Gaussian

M = 200


@pytest.fixture
def table(rng):
    return RegionTable.build(PackedPatterns.pack(rng.random((90, M)) < 0.1), np.zeros(90))


@pytest.fixture
def queries(rng):
    """From the training patterns' own kind to their opposites: all distances from some 10 to some 190 bits."""
    return PackedPatterns.pack(rng.random((40, M)) < np.linspace(0.1, 1.0, 40)[:, None])


def exact(queries, table, weights, log_table):
    """Each sum by itself, scaled by its own largest term."""
    distances = (queries.to_bool()[:, None] ^ table.patterns.to_bool()).sum(axis=2)
    terms = log_table[distances] + np.log(weights)
    largest = terms.max(axis=1)
    return largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))


@pytest.mark.parametrize("offset", [0.0, -3000.0, 3000.0])
@pytest.mark.parametrize("rho", [0.5, 2.0, 3.0, 5.0, 40.0])
def test_a_single_table_is_summed_straight_and_gives_the_same(rng, table, queries, rho, offset):
    """Near queries straight, far ones by histogram, many tables by histogram: wherever their logs lie."""
    log_table = Gaussian(rho).log_d(M) + offset
    counts = table.counts * rng.integers(1, 1000, len(table))
    expected = exact(queries, table, counts, log_table)
    (found,) = log_sums(queries, table.panels, fill_panels(counts), DistanceTables.of(log_table[None]))
    (of_floats,) = log_sums(
        queries, table.panels, fill_panels(counts[:, None] / 1000.0), DistanceTables.of(log_table[None])
    )
    twice = log_sums(queries, table.panels, fill_panels(counts), DistanceTables.of(np.array([log_table, log_table])))
    for logs in (found, of_floats + np.log(1000.0), *twice):
        np.testing.assert_allclose(logs, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("rho", "some"), [(0.5, True), (2.0, True), (40.0, False)])
def test_just_the_queries_that_floats_cannot_hold_go_by_histogram(table, queries, rho, some, monkeypatch):
    log_table = Gaussian(rho).log_d(M)
    expected = exact(queries, table, table.counts, log_table)
    too_small = expected < np.log(sums.LEAST) - 2 * sums.HALF_SCALE * np.log(2)
    assert too_small.any() == some
    assert not too_small.all()
    seen = [PackedPatterns.empty(M)]
    by_histogram = sums._by_histogram
    monkeypatch.setattr(sums, "_by_histogram", lambda far, *args: (seen.append(far), by_histogram(far, *args))[1])
    log_sums(queries, table.panels, table.panel_counts, DistanceTables.of(log_table[None]))
    np.testing.assert_array_equal(seen[-1].words, queries.words[too_small])


def test_the_sum_near_one_keeps_all_its_digits():
    """The log of a sum of 1 + 1e-9: scaling by anything but a power of two would cost five digits."""
    X = np.zeros((2, M), dtype=bool)
    X[1, 0] = True
    table = RegionTable.build(PackedPatterns.pack(X), np.zeros(2))
    log_table = np.where(np.arange(M + 1) == 0, 0.0, np.log(1e-9))
    ((found,),) = log_sums(
        PackedPatterns.pack(X[:1]), table.panels, table.panel_counts, DistanceTables.of(log_table[None])
    )
    assert found == pytest.approx(np.log1p(1e-9), rel=1e-6)


@pytest.mark.jit
def test_rounding_does_not_grow_with_the_number_of_samples(rng):
    """A million weights of 0.1 in strips of their own: ten times as exact as one after the other."""
    words = rng.integers(0, 2**64, (1_000_000, 1), dtype=np.uint64)
    table = RegionTable.build(PackedPatterns(words, 64), np.zeros(len(words)))
    log_table = np.full((1, 65), np.log(0.1))
    (found,) = log_sums(table.patterns[:1], table.panels, table.panel_counts, DistanceTables.of(log_table))
    assert found[0] == pytest.approx(np.log(0.1) + np.log(1_000_000), rel=1e-14)
