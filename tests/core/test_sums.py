"""Sums around queries: exact whatever their logs, the chunks, the threads and the mapper."""

import multiprocessing

import numpy as np
import pytest

from terrafirma.core import sums
from terrafirma.core._threads import serial, threads
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable, fill_panels
from terrafirma.core.sums import log_sums, occupied_distances
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
@pytest.mark.parametrize("rho", [0.5, 2.0, 5.0, 40.0])
def test_sums_of_counts_and_of_values(rng, table, queries, rho, offset):
    log_table = Gaussian(rho).log_d(M) + offset
    counts = table.counts * rng.integers(1, 1000, len(table))
    values = rng.random((len(table), 2))
    tables = np.array([log_table, log_table / 3])
    by_counts = log_sums(queries, table.panels, fill_panels(counts), tables)
    by_values = log_sums(queries, table.panels, fill_panels(values), tables)
    for r in range(2):
        np.testing.assert_allclose(by_counts[r], exact(queries, table, counts, tables[r]), rtol=1e-13)
        np.testing.assert_allclose(by_values[r], exact(queries, table, values[:, r], tables[r]), rtol=1e-13)


def test_one_table_or_many_is_the_same_to_the_last_bit(rng, table, queries):
    tables = np.array([Gaussian(rho).log_d(M) for rho in (2.0, 5.0, 40.0)])
    counts, values = table.panel_counts, rng.random((len(table), 3))
    for weights_of in (lambda r: counts, lambda r: fill_panels(values[:, r])):
        together = log_sums(queries, table.panels, weights_of(slice(None)), tables)
        for r in range(3):
            alone = log_sums(queries, table.panels, weights_of(slice(r, r + 1)), tables[r : r + 1])
            np.testing.assert_array_equal(alone[0], together[r])


def test_queries_that_see_the_same_distances_tie(rng):
    """All patterns of 8 bits among 16: 9 kinds of query for each number of bits set elsewhere."""
    X = np.zeros((256, 16), dtype=bool)
    X[:, :8] = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    table = RegionTable.build(PackedPatterns.pack(X), np.zeros(256))
    Q = rng.random((500, 16)) < 0.5
    (found,) = log_sums(PackedPatterns.pack(Q), table.panels, table.panel_counts, Gaussian(2.0).log_d(16)[None])
    assert len(np.unique(found)) == len(np.unique(Q[:, 8:].sum(axis=1)))


@pytest.mark.jit
def test_tables_longer_than_a_strip(rng):
    n = 80_000
    words = rng.integers(0, 2**64, (n, 1), dtype=np.uint64)
    table = RegionTable.build(PackedPatterns(words, 64), np.zeros(n))
    values = rng.random(n)
    queries = PackedPatterns(rng.integers(0, 2**64, (9, 1), dtype=np.uint64), 64)
    log_table = Gaussian(4.0).log_d(64)
    for weights, of in ((table.panel_counts, table.counts), (fill_panels(values[:, None]), values)):
        (found,) = log_sums(queries, table.panels, weights, log_table[None])
        np.testing.assert_allclose(found, exact(queries, table, of, log_table), rtol=1e-13)


def in_processes(function, slices):
    """A mapper that shares no memory: each slice in a process of its own."""
    context = multiprocessing.get_context("fork")
    results = []
    for rows in slices:
        queue = context.SimpleQueue()
        process = context.Process(target=lambda rows=rows, queue=queue: queue.put(function(rows)))
        process.start()
        results.append(queue.get())
        process.join()
    return results


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_chunks_threads_and_mappers_never_change_a_bit(rng, table, queries, monkeypatch):
    tables = np.array([Gaussian(rho).log_d(M) for rho in (2.0, 5.0, 40.0)])
    values = fill_panels(rng.random((len(table), 3)))

    def all_sums(mapper):
        return [
            log_sums(queries, table.panels, table.panel_counts, tables, mapper=mapper),
            log_sums(queries, table.panels, values, tables, mapper=mapper),
            occupied_distances(queries, table.panels, table.panel_counts, mapper=mapper),
        ]

    expected = all_sums(serial)
    assert len(expected[2]) > 100
    for size, work, workers in ((1, 0, "3"), (60_000, 0, "2"), (60_000, 1 << 40, "1"), (1 << 30, 0, "5")):
        monkeypatch.setattr(sums, "CHUNK_BYTES", size)
        monkeypatch.setattr(sums, "SMALL_WORK", work)
        monkeypatch.setenv("TERRAFIRMA_THREADS", workers)
        for mapper in (serial, threads, *([in_processes] if hasattr(multiprocessing, "get_context") else [])):
            for found, right in zip(all_sums(mapper), expected, strict=True):
                np.testing.assert_array_equal(found, right)
