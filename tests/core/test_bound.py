"""The bound's parts against the naive twin, and the identities that tie them together."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import terrafirma
from terrafirma.core import sums
from terrafirma.core.bound import Smoother, bound_terms
from terrafirma.core.normalizers import Normalizers, normalize
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.core.weighting import Exponential, Gaussian
from tests import naive
from tests.core.test_normalizers import log, values


def all_patterns(M):
    return np.array(naive.all_patterns(M), dtype=bool)


@given(
    st.floats(0.3, 10),
    st.sampled_from([Gaussian, Exponential]),
    st.integers(1, 6),
    st.integers(1, 10),
    st.floats(0.001, 1.0),
    st.randoms(use_true_random=False),
)
def test_every_part_is_that_of_the_naive_twin(width, family, M, N, delta, random):
    draw = np.random.default_rng(random.getrandbits(32))
    X = draw.random((N, M)) < 0.5
    errors = draw.choice([0.0, 0.0, 0.25, 1.0], size=N)
    weighting = family(width)
    est = terrafirma.SubfunctionBound(delta=delta, weighting=weighting).fit(X, errors)
    Q = all_patterns(M)[:: max(1, 2**M // 8)]
    terms = est.terms(Q)

    d = values(weighting, M)
    samples = [tuple(x) for x in X.astype(int).tolist()]
    P = naive.density(d, samples, M)
    for i, q in enumerate(Q.astype(int).tolist()):
        density = P[tuple(q)]
        risk = naive.risk(d, P, samples, [Fraction(e) for e in errors], tuple(q))
        gap = np.sqrt(np.log(2 / delta) / (2 * N)) / float(density)
        assert terms.log_density[i] == pytest.approx(log(density), rel=1e-10, abs=1e-10)
        if risk:
            assert terms.log_risk[i] == pytest.approx(log(risk), rel=1e-10, abs=1e-10)
        else:
            assert terms.log_risk[i] == -np.inf
        assert terms.log_gap[i] == pytest.approx(np.log(gap), rel=1e-10, abs=1e-10)
        assert terms.log_bound[i] == pytest.approx(np.log(float(risk) + gap), rel=1e-10, abs=1e-10)


@settings(max_examples=6)
@given(st.floats(0.3, 10), st.integers(8, 12), st.randoms(use_true_random=False))
def test_the_bound_among_thousands_of_patterns(rho, M, random):
    """As above, with 2^8 to 2^12 patterns."""
    draw = np.random.default_rng(random.getrandbits(32))
    X, errors = draw.random((6, M)) < 0.5, draw.choice([0.0, 0.5, 1.0], size=6)
    query = draw.random(M) < 0.5
    terms = terrafirma.SubfunctionBound(rho=rho, delta=0.3).fit(X, errors).terms(query[None])
    d, samples = values(Gaussian(rho), M), [tuple(x) for x in X.astype(int).tolist()]
    P, q = naive.density(d, samples, M), tuple(query.astype(int).tolist())
    risk = naive.risk(d, P, samples, [Fraction(e) for e in errors], q)
    gap = np.sqrt(np.log(2 / 0.3) / 12) / P[q]
    assert terms.log_density[0] == pytest.approx(log(P[q]), rel=1e-10, abs=1e-10)
    assert terms.log_bound[0] == pytest.approx(log(risk + Fraction(gap)), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("rho", [0.5, 2.0, 6.0])
def test_densities_add_up_and_the_mean_risk_is_the_training_error(rng, rho):
    """sum_h P(h) = 1 and sum_h P(h) R*(h) = training error, over all 2^12 patterns."""
    X, errors = rng.random((300, 12)) < 0.3, rng.random(300) * (rng.random(300) < 0.2)
    terms = terrafirma.SubfunctionBound(rho=rho).fit(X, errors).terms(all_patterns(12))
    P = np.exp(terms.log_density)
    assert P.sum() == pytest.approx(1.0, rel=1e-12)
    assert (P * np.exp(terms.log_risk)).sum() == pytest.approx(errors.mean(), rel=1e-11)


def test_the_bound_scales_with_u(rng):
    """log_bound - log_u does not depend on u, so an error in u moves all scores alike."""
    X, errors = rng.random((200, 30)) < 0.3, rng.random(200) < 0.2
    table = RegionTable.build(PackedPatterns.pack(X), errors)
    (norm,) = normalize(table, [Gaussian(3.0)])
    other = Normalizers(norm.log_u + 5.0, norm.wrong, norm.log_w - 5.0)  # w is a sum over u
    queries = PackedPatterns.pack(rng.random((20, 30)) < 0.4)
    log_bounds = []
    for n in (norm, other):
        (found,) = Smoother.prepare(table, [Gaussian(3.0)], [n]).sums(queries)
        log_bounds.append(bound_terms(found, 0.1, 200).log_bound)
    np.testing.assert_allclose(log_bounds[1] - log_bounds[0], 5.0, rtol=1e-12)


def test_the_risk_is_exact_where_it_is_nothing_beside_the_gap(rng):
    """One wrong sample far away: R* is less than e^-800 of the gap and still right."""
    M = 400
    X = np.zeros((50, M), dtype=bool)
    X[0] = True  # the wrong one, M bits from all others
    errors = np.zeros(50)
    errors[0] = 1.0
    terms = terrafirma.SubfunctionBound(rho=10.0, delta=0.5).fit(X, errors).terms(X[1:2])
    log_k = -(M**2) / (2 * 10.0**2)
    (log_w,) = terrafirma.SubfunctionBound(rho=10.0).fit(X, errors)._fitted.smoother.normalizers[0].log_w
    assert terms.log_risk[0] == pytest.approx(log_k - log_w - np.log(50), rel=1e-13)
    assert -1000 < terms.log_risk[0] - terms.log_gap[0] < -800
    assert terms.log_bound[0] == terms.log_gap[0]


@pytest.mark.parametrize(("rho", "M"), [(1.0, 4096), (4.0, 2048), (0.01, 64)])
def test_far_samples_stay_finite(rng, rho, M):
    """Single precision ties all samples further than 14 rho bits at infinity; logs do not."""
    X = rng.random((30, M)) < 0.5
    scores = terrafirma.SubfunctionBound(rho=rho).fit(X, np.arange(30) < 3).unreliability(~X)
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) > 1


@pytest.fixture
def fitted(rng):
    X, errors = rng.random((300, 100)) < 0.3, rng.random(300) * (rng.random(300) < 0.3)
    Q = rng.random((41, 100)) < 0.35
    return X, errors, Q, terrafirma.SubfunctionBound(rho=7.0, delta=0.2).fit(X, errors).unreliability(Q)


def score(X, errors, Q):
    return terrafirma.SubfunctionBound(rho=7.0, delta=0.2).fit(X, errors).unreliability(Q)


def test_chunks_and_threads_do_not_matter(fitted, monkeypatch):
    X, errors, Q, expected = fitted
    for size, work, workers in ((1, 0, "3"), (20_000, 0, "2"), (1 << 30, 1 << 40, "1")):
        monkeypatch.setattr(sums, "CHUNK_BYTES", size)
        monkeypatch.setattr(sums, "SMALL_WORK", work)
        monkeypatch.setenv("TERRAFIRMA_THREADS", workers)
        np.testing.assert_array_equal(score(X, errors, Q), expected)


def test_row_order_does_not_matter(fitted, rng):
    X, errors, Q, expected = fitted
    train, test = rng.permutation(300), rng.permutation(41)
    np.testing.assert_allclose(score(X[train], errors[train], Q[test]), expected[test], rtol=1e-12)


def test_queries_alone_or_together(fitted):
    X, errors, Q, expected = fitted
    est = terrafirma.SubfunctionBound(rho=7.0, delta=0.2).fit(X, errors)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 20)):
        np.testing.assert_array_equal(est.unreliability(Q[rows]), expected[rows])


def test_packed_or_not(fitted):
    X, errors, Q, expected = fitted
    np.testing.assert_array_equal(score(PackedPatterns.pack(X), errors, PackedPatterns.pack(Q)), expected)
    np.testing.assert_array_equal(score(np.where(X, 0.3, -1), errors, Q.astype(np.int8)), expected)


def test_duplicated_rows_are_counts(fitted):
    """Twice every row doubles N and the counts: density and risk stay, the gap shrinks by sqrt(2)."""
    X, errors, Q, _ = fitted
    once = terrafirma.SubfunctionBound(rho=7.0).fit(X, errors).terms(Q)
    twice = terrafirma.SubfunctionBound(rho=7.0).fit(np.tile(X, (2, 1)), np.tile(errors, 2)).terms(Q)
    np.testing.assert_allclose(twice.log_density, once.log_density, rtol=1e-12)
    np.testing.assert_allclose(twice.log_risk, once.log_risk, rtol=1e-12)
    np.testing.assert_allclose(twice.log_gap, once.log_gap - 0.5 * np.log(2), rtol=1e-12)


def test_merged_tables_score_alike(fitted):
    X, errors, Q, expected = fitted
    parts = [RegionTable.build(PackedPatterns.pack(X[s]), errors[s]) for s in (slice(0, 90), slice(90, None))]
    for table in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        (norm,) = normalize(table, [Gaussian(7.0)])
        est = terrafirma.SubfunctionBound.from_parts(7.0, 0.2, table, norm)
        np.testing.assert_allclose(est.unreliability(Q), expected, rtol=1e-12)


def test_a_region_with_billions_of_samples(rng):
    """Counts past 2^31: the density is that of the shares."""
    X = rng.random((40, 20)) < 0.3
    table = RegionTable.build(PackedPatterns.pack(X), np.zeros(40))
    big = RegionTable(table.panels, 20, table.counts * 10**9, table.error_sum)
    Q = PackedPatterns.pack(rng.random((9, 20)) < 0.3)
    densities = []
    for t in (table, big):
        (norm,) = normalize(t, [Gaussian(2.0)])
        (found,) = Smoother.prepare(t, [Gaussian(2.0)], [norm]).sums(Q)
        densities.append(found.log_density)
    np.testing.assert_allclose(densities[0], densities[1], rtol=1e-12)


@pytest.mark.parametrize("M", [1, 63, 64, 65])
def test_smallest_cases(M):
    """One unit, one sample, all rows equal."""
    X = np.ones((5, M), dtype=bool)
    for n in (1, 5):
        est = terrafirma.SubfunctionBound(rho=1.0).fit(X[:n], np.ones(n))
        terms = est.terms(np.vstack([X[:1], ~X[:1]]))
        assert np.isfinite(terms.log_bound).all()
        assert terms.log_bound[0] < terms.log_bound[1]
    assert est.unreliability(X[:0]).shape == (0,)


@pytest.mark.jit
def test_more_units_than_16_bits_count(rng):
    M = 70_001
    X = rng.random((40, M)) < 0.5
    terms = terrafirma.SubfunctionBound(rho=300.0).fit(X, np.arange(40) < 4).terms(np.vstack([X[:2], ~X[:2]]))
    assert np.isfinite(terms.log_bound).all()
    assert (terms.log_bound[:2] < terms.log_bound[2:]).all()
