from fractions import Fraction
from math import comb

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrafirma.core.normalizers import log_u, log_w, log_z, normalize
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.core.weighting import Exponential, Gaussian, Tabulated
from terrafirma.errors import InvalidInput
from terrafirma.scores.subfunction import SubfunctionBound
from tests import naive

weightings = st.one_of(
    st.floats(0.2, 20).map(Gaussian),
    st.floats(0.2, 20).map(Exponential),
)


def values(weighting, M):
    """The weighting's values as exact rationals (of their float64 logs, exponentiated to 60 digits)."""
    with mpmath.workdps(60):
        return [Fraction(str(mpmath.exp(mpmath.mpf(float(x))))) for x in weighting.log_d(M)]


def log(fraction):
    with mpmath.workdps(60):
        return float(mpmath.log(mpmath.mpf(fraction.numerator) / fraction.denominator))


def tabulated(weighting, M):
    return Tabulated(weighting.log_d(M))


@given(weightings, st.integers(1, 7), st.integers(1, 6))
def test_u_is_the_sum_over_all_patterns(weighting, M, N):
    samples = naive.all_patterns(M)[:N]
    expected = log(naive.u(values(weighting, M), samples, M))
    assert log_u(weighting, M, len(samples)) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert log_u(tabulated(weighting, M), M, len(samples)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(weightings, st.integers(1, 8))
def test_z_is_the_sum_over_all_patterns(weighting, M):
    d = values(weighting, M)
    expected = [log(naive.z(d, M, a)) for a in range(M + 1)]
    assert expected == pytest.approx([log(naive.z_as_printed(d, M, a)) for a in range(M + 1)], abs=1e-14)
    np.testing.assert_allclose(log_z(weighting, M), expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(log_z(tabulated(weighting, M), M), expected, rtol=1e-11, atol=1e-12)


@settings(max_examples=10)
@given(weightings, st.integers(8, 12), st.randoms(use_true_random=False))
def test_w_among_thousands_of_patterns(weighting, M, random):
    """As above, with 2^8 to 2^12 patterns."""
    X = np.random.default_rng(random.getrandbits(32)).random((5, M)) < 0.5
    d, samples = values(weighting, M), [tuple(x) for x in X.astype(int).tolist()]
    P = naive.density(d, samples, M)
    table = RegionTable.build(PackedPatterns.pack(X), np.ones(5))
    expected = [log(naive.w(d, P, tuple(p))) for p in table.patterns.to_bool().astype(int).tolist()]
    np.testing.assert_allclose(log_w(table, [weighting])[0], expected, rtol=1e-11, atol=1e-11)
    assert log_u(weighting, M, 5) == pytest.approx(log(naive.u(d, samples, M)), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("weighting", [Gaussian(0.5), Gaussian(3.0), Exponential(1.5)])
def test_z_at_twelve_units(weighting):
    d = values(weighting, 12)
    expected = [log(naive.z(d, 12, a)) for a in range(13)]
    np.testing.assert_allclose(log_z(weighting, 12), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("M", [1, 12, 100, 512, 2048, 4096])
@pytest.mark.parametrize("weighting", [Gaussian(0.3), Gaussian(8.0), Gaussian(300.0), Exponential(5.0)])
def test_z_adds_up_to_u_squared(weighting, M):
    """sum_a C(M, a) z(a) = (sum_b d(b) C(M, b))^2, which needs no enumeration."""
    with mpmath.workprec(300):
        logs = [mpmath.mpf(float(x)) for x in log_z(weighting, M)]
        total = mpmath.log(sum(comb(M, a) * mpmath.exp(x) for a, x in enumerate(logs)))
    assert float(total) == pytest.approx(2 * log_u(weighting, M, 1), abs=2e-10)


def exact_gaussian_sum(n, shift, rho, scale):
    """log sum_c C(n, c) exp(-scale ((c + shift) / rho)^2) in 300 bits, every term."""
    with mpmath.workprec(300):
        rho = mpmath.mpf(rho)
        binomial, total = mpmath.mpf(1), mpmath.mpf(0)
        for c in range(n + 1):
            total += binomial * mpmath.exp(-scale * ((c + mpmath.mpf(shift)) / rho) ** 2)
            binomial = binomial * (n - c) / (c + 1)
        return mpmath.log(total)


@pytest.mark.parametrize(("M", "tolerance"), [(4096, 1e-10), (65_536, 1e-9)])
@pytest.mark.parametrize("rho", [0.7, 16.0, 512.0])
@pytest.mark.jit
def test_large_sizes_against_300_bits(M, tolerance, rho):
    exact = exact_gaussian_sum(M, 0, rho, mpmath.mpf(1) / 2)
    assert abs(exact + mpmath.log(42_500) - log_u(Gaussian(rho), M, 42_500)) < tolerance
    distances = np.array([0, 1, M // 3, M]) if M < 10_000 else np.array([0, 1001])
    found = log_z(Gaussian(rho), M, distances)
    for a, value in zip(distances.tolist(), found, strict=True):
        half = mpmath.mpf(a) / 2
        exact = exact_gaussian_sum(a, -half, rho, 1) + exact_gaussian_sum(M - a, half, rho, 1)
        assert abs(exact - value) < max(tolerance, 2 * np.spacing(abs(value)))  # a float64 of 10^6 has steps of 10^-10


def test_published_example():
    """At M = 2048, rho = 16, N = 1000 the true log u is 706.9."""
    assert log_u(Gaussian(16.0), 2048, 1000) == pytest.approx(706.9, abs=0.05)


@pytest.mark.jit
def test_a_million_units():
    assert np.isfinite(log_u(Gaussian(100.0), 2**20, 10))
    assert log_u(Exponential(100.0), 2**20, 10) == pytest.approx(
        float(mpmath.log(10) + 2**20 * mpmath.log1p(mpmath.exp(mpmath.mpf(-1) / 100))), rel=1e-14
    )
    assert np.isfinite(log_z(Gaussian(100.0), 2**20, np.array([0, 77_777, 2**20]))).all()


@pytest.mark.parametrize("rho", [1e-200, 1e-5, 1e5, 1e200])
def test_extreme_widths(rho):
    """A width far below a bit leaves the samples' own patterns alone; far above, all patterns weigh the same."""
    M = 20
    few = rho < 1
    assert log_u(Gaussian(rho), M, 7) == pytest.approx(np.log(7) if few else np.log(7) + M * np.log(2))
    z = log_z(Gaussian(rho), M)
    assert not np.isnan(z).any()
    assert z[0] == pytest.approx(0.0 if few else M * np.log(2), abs=1e-7)


@pytest.mark.jit
def test_any_weighting_at_the_sizes_of_real_layers():
    """The double sum against the separated one."""
    distances = np.array([0, 1, 700, 2048])
    gaussian = Gaussian(100.0)
    found = log_z(tabulated(gaussian, 2048), 2048, distances)
    np.testing.assert_allclose(found, log_z(gaussian, 2048, distances), rtol=1e-13)


def test_only_the_distances_asked_for():
    whole = log_z(Gaussian(5.0), 100)
    np.testing.assert_array_equal(log_z(Gaussian(5.0), 100, np.array([7, 0, 100])), whole[[7, 0, 100]])


@given(weightings, st.integers(1, 6), st.integers(1, 12), st.randoms(use_true_random=False))
def test_w_is_the_expected_closeness(weighting, M, N, random):
    draw = np.random.default_rng(random.getrandbits(32))
    X = draw.random((N, M)) < 0.5
    errors = draw.random(N) < 0.5
    table = RegionTable.build(PackedPatterns.pack(X), errors)
    d = values(weighting, M)
    samples = [tuple(x) for x in X.astype(int).tolist()]
    P = naive.density(d, samples, M)
    expected = [log(naive.w(d, P, tuple(p))) for p in table.patterns.to_bool().astype(int).tolist()]
    (found,) = log_w(table, [weighting])
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)

    (norm,) = normalize(table, [weighting])
    np.testing.assert_array_equal(norm.wrong, np.flatnonzero(table.error_sum))
    np.testing.assert_allclose(norm.log_w, found[norm.wrong], rtol=1e-15)


def test_many_weightings_at_once_are_each_alone(rng):
    X, errors = rng.random((100, 90)) < 0.4, rng.random(100) < 0.3
    table = RegionTable.build(PackedPatterns.pack(X), errors)
    grid = [Gaussian(2.0), Exponential(4.0), Gaussian(40.0)]
    for together, weighting in zip(normalize(table, grid), grid, strict=True):
        (alone,) = normalize(table, [weighting])
        assert together.log_u == alone.log_u
        np.testing.assert_array_equal(together.log_w, alone.log_w)


def test_narrow_integers_of_numpy_are_numbers_like_others():
    """Arithmetic on them would wrap around, and loops run past their arrays."""
    for M in (np.uint8(255), np.int16(255)):
        assert log_u(Gaussian(2.0), M, np.uint8(10)) == log_u(Gaussian(2.0), 255, 10)
        np.testing.assert_array_equal(log_z(Exponential(2.0), M), log_z(Exponential(2.0), 255))
    np.testing.assert_array_equal(log_z(Exponential(2.0), 300, np.int8([1])), log_z(Exponential(2.0), 300, [1]))
    np.testing.assert_array_equal(Gaussian(2.0).log_d(np.uint8(255)), Gaussian(2.0).log_d(255))


@pytest.mark.parametrize("weighting", [Gaussian(3.0), Exponential(3.0), tabulated(Gaussian(3.0), 20)])
def test_distances_of_any_shape(weighting):
    table = log_z(weighting, 20)
    assert log_z(weighting, 20, 3) == table[3]
    np.testing.assert_array_equal(log_z(weighting, 20, [[0, 1], [19, 20]]), table[[[0, 1], [19, 20]]])
    assert log_z(weighting, 20, []).shape == (0,)


class Foreign:
    """A weighting of the user's own."""

    def __init__(self, values):
        self.values = values

    def log_d(self, M):
        return self.values


@pytest.mark.parametrize("values", [np.arange(13.0), np.full(13, np.nan), np.zeros(5), np.zeros(()), np.zeros((2, 13))])
def test_weightings_of_ones_own_are_checked(values):
    for function in (lambda: log_u(Foreign(values), 12, 10), lambda: log_z(Foreign(values), 12)):
        with pytest.raises(InvalidInput, match="log_values must"):
            function()
    assert log_u(Foreign(-np.arange(13.0)), 12, 10) == pytest.approx(log_u(Exponential(1.0), 12, 10))


def test_what_is_no_weighting_is_named():
    with pytest.raises(InvalidInput, match=r"weighting must have log_d\(M\), as Gaussian.* Got 'gauss'."):
        log_u("gauss", 12, 10)


@pytest.mark.parametrize("distances", [[-1], [13], [0.5], ["a"]])
def test_distances_must_lie_within_the_patterns(distances):
    with pytest.raises(InvalidInput, match="distances must be integers from 0 to M = 12. Got "):
        log_z(Gaussian(2.0), 12, distances)


def test_strict_floating_point_settings_of_the_user_do_not_stop_us(rng):
    X = rng.random((50, 30)) < 0.3
    with np.errstate(all="raise"):
        for weighting in (Gaussian(0.3), Exponential(1e-310), tabulated(Gaussian(0.5), 30)):
            est = SubfunctionBound(weighting=weighting).fit(X, np.arange(50) < 5)
            assert not np.isnan(est.unreliability(~X)).any()
