import re
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from terrafirma import storage
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.policy import ErrorProbability, GroupPolicy, Policy, certificate
from tests import naive

GRID = np.linspace(0, 1, 100_001)


class Law:
    """A law of (unreliability, error) whose risk at every threshold is known.

    The unreliability is uniform on [0, 1], or rounded up to one of ``levels``; ``mean(u)`` is the mean error, which is
    ``error`` with a probability that fits and else 0.
    """

    def __init__(self, mean, levels=None, error=1.0):
        self.mean, self.error = mean, error
        self.levels = None if levels is None else np.asarray(levels, float)
        means = mean(self.round(GRID))
        self.curve = np.concatenate([means[:1], np.cumsum((means[1:] + means[:-1]) / 2) / np.arange(1, len(GRID))])

    def round(self, u):
        return u if self.levels is None else self.levels[np.searchsorted(self.levels, u)]

    def draw(self, rng, n):
        u = self.round(rng.random(n))
        return u, self.error * (rng.random(n) < self.mean(u) / self.error)

    def risk(self, threshold):
        return 0.0 if threshold < 0 else float(np.interp(threshold, GRID, self.curve))

    def best_coverage(self, risk):
        """What one who knows the law accepts."""
        return float(GRID[self.curve <= risk].max())


def flat(x):
    return lambda u: np.full_like(u, x)


def dip(u):
    """Its risk is above 0.1, below it from u = 0.34 to 0.69, and above again."""
    return np.where(u < 0.25, 0.125, np.where(u < 0.5, 0.03, 0.16))


HARD = {  # for a risk of 0.1
    "just above everywhere": Law(flat(0.1002)),
    "crossing": Law(lambda u: 0.2 * u),
    "dip": Law(dip),
    "worst first": Law(lambda u: np.where(u < 0.08, 1.0, 0.025)),
    "one atom": Law(flat(0.1002), [1.0]),
    "saturated": Law(lambda u: np.where(u < 0.7, 0.1002, 0.3), [0.6, 0.8, 0.9, 1.0]),
    "atom after a good start": Law(lambda u: np.where(u < 0.35, 0.02, 0.15), [*np.arange(1, 30) / 100, 0.8, 0.9, 1.0]),
    "halves": Law(flat(0.1002), error=0.5),
    "tenths, crossing, tied": Law(lambda u: 0.2 * u, np.arange(1, 41) / 40, error=0.7),
}
DRAWS, CONFIDENCE = 1000, 0.8
LIMIT = int(binom.isf(1e-4, DRAWS, 1 - CONFIDENCE))  # a promise that is just kept breaks it once in 10 000 runs


def broken(law, rng, n, threshold, draws=DRAWS):
    """How often the chosen threshold's true risk is above 0.1."""
    return sum(law.risk(threshold(*law.draw(rng, n))) > 0.1 for _ in range(draws))


def calibrated(u, errors):
    return Policy.calibrate(u, errors, risk=0.1, confidence=CONFIDENCE).threshold


def empirical(u, errors):
    """The naive rule: the largest coverage whose risk on the calibration samples is at most the target."""
    order = np.argsort(u)
    kept = np.flatnonzero(np.cumsum(errors[order]) <= 0.1 * np.arange(1, len(u) + 1))
    return u[order][kept[-1]] if len(kept) else -np.inf


def uncorrected(u, errors):
    """Exact tests, but the best of all thresholds."""
    order = np.argsort(u)
    trials = np.arange(1, len(u) + 1)
    kept = np.flatnonzero(certificate.binomial_p(np.cumsum(errors[order]), trials, 0.1) <= 1 - CONFIDENCE)
    return u[order][kept[-1]] if len(kept) else -np.inf


@pytest.mark.parametrize("n", [60, 400])
@pytest.mark.parametrize("law", HARD.values(), ids=HARD)
def test_the_promise_is_kept(law, n, rng):
    assert broken(law, rng, n, calibrated) <= LIMIT


@pytest.mark.parametrize("rule", [empirical, uncorrected])
def test_the_harness_sees_a_broken_promise(rule, rng):
    assert broken(HARD["just above everywhere"], rng, 400, rule) > 1.5 * LIMIT


def test_the_laws_cross_where_they_should():
    assert HARD["crossing"].best_coverage(0.1) == pytest.approx(1, abs=1e-3)
    assert HARD["dip"].best_coverage(0.1) == pytest.approx(0.6875, abs=1e-3)
    assert min(HARD["worst first"].risk(t) for t in (0.08, 0.5, 0.9, 0.99)) > 0.1
    assert HARD["saturated"].risk(0.6) > 0.1
    assert HARD["atom after a good start"].risk(0.29) < 0.1 < HARD["atom after a good start"].risk(0.8)


@pytest.mark.parametrize(
    ("mean", "risk"),
    [
        (lambda u: 0.3 * u**4, 0.02),
        (lambda u: np.where(u < 0.8, 0.008, 0.15), 0.02),
        (lambda u: np.where(u < 0.95, 0.006, 0.6), 0.02),
        (lambda u: 0.4 * u**2, 0.05),
        (lambda u: np.where(u < 0.05, 0.4, 0.5 * u**3), 0.1),
    ],
)
def test_coverage_is_within_8_points_of_the_best_there_is(mean, risk, rng):
    law = Law(mean)
    reached = [Policy.calibrate(*law.draw(rng, 5000), risk=risk).threshold for _ in range(60)]
    assert law.best_coverage(risk) - 0.08 < np.mean(reached) < law.best_coverage(risk)


small_levels = st.integers(0, 3).map(lambda i: [0.0, 0.5, 1.0, np.inf][i])


@given(st.data(), st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.4]), st.sampled_from([0.05, 0.2, 0.5]))
def test_certify_by_its_words(data, n, risk, budget):
    errors = data.draw(st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=n, max_size=n))
    scores = sorted(data.draw(st.lists(st.integers(0, 30) | st.just(np.inf), min_size=n, max_size=n)))
    whole = np.array(scores) < np.append(scores[1:], np.inf)
    starts, levels = certificate.place_starts(n, risk, budget)
    shares = {int(s): Fraction(float(level)) for s, level in zip(starts, levels, strict=True)}
    accepted, level = certificate.certify(np.array(errors, float), whole, risk, budget)
    assert accepted == naive.certify(scores, errors, Fraction(risk), shares)
    assert level <= budget * (1 + 1e-12)
    assert not accepted or certificate.binomial_p(sum(errors[:accepted]), accepted, risk) <= level


def test_a_run_hands_its_level_on_and_a_failed_one_does_not():
    n, risk, budget = 400, 0.1, 0.05
    whole = np.ones(n, bool)
    (first, second, third, last), levels = certificate.place_starts(n, risk, budget)
    assert certificate.certify(np.zeros(n), whole, risk, budget) == (n, pytest.approx(budget))
    errors = np.zeros(n)
    errors[first : first + 10] = 1  # the first run ends, the second never starts
    passes = [certificate.binomial_p(errors[:s].sum(), s, risk) for s in (first, second, third, last)] <= levels
    assert passes.tolist() == [True, False, True, True]
    assert certificate.certify(errors, whole, risk, budget) == (n, pytest.approx(levels[2:].sum()))
    errors = np.zeros(n)
    errors[second : second + 40] = 1  # all runs before the last end here
    accepted, level = certificate.certify(errors, whole, risk, budget)
    assert second <= accepted < third
    assert level == pytest.approx(levels[:2].sum())


def test_no_run_no_pass_even_where_p_underflows():
    n, risk, budget = 100_000, 0.9, 0.05
    first, second, *_ = certificate.place_starts(n, risk, budget)[0]
    errors = (np.arange(n) < first).astype(float)
    rank = second - 1
    assert certificate.binomial_p(first, rank, risk) == 0
    assert certificate.certify(errors, np.arange(n) == rank - 1, risk, budget) == (0, 0.0)


@pytest.mark.parametrize("risk", [0.001, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("budget", [0.001, 0.05, 0.5])
def test_starts_are_useful_and_share_the_budget(risk, budget):
    for n in np.unique(np.geomspace(1, 1e5, 60).astype(int)):
        starts, levels = certificate.place_starts(int(n), risk, budget)
        if n < certificate.least_samples(risk, budget):
            assert len(starts) == 0
            continue
        assert levels.sum() == pytest.approx(budget)
        assert (np.diff(starts) > 0).all()
        assert 1 <= starts[0] <= starts[-1] <= n
        assert (certificate.binomial_p(0, starts, risk) <= levels * (1 + 1e-9)).all()


def test_the_fewest_samples_that_certify(rng):
    """ln 0.05 / ln 0.98 = 148.3: 149 right answers certify 2 % at 95 %, 148 do not."""
    assert certificate.least_samples(0.02, 0.05) == 149
    assert Policy.calibrate(rng.random(148), np.zeros(148)).n_accepted == 0
    policy = Policy.calibrate(rng.random(149), np.zeros(149))
    assert policy.coverage == 1
    assert policy.risk_bound == pytest.approx(1 - 0.05 ** (1 / 149))


@given(st.integers(1, 30), st.data(), st.sampled_from([0.05, 0.3, 0.7]))
def test_binomial_p_is_exact(trials, data, risk):
    errors = data.draw(st.integers(0, trials))
    exact = naive.binomial_cdf(errors, trials, Fraction(risk))
    assert certificate.binomial_p(errors, trials, risk) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("errors", "trials"), [(0, 50), (3, 50), (49, 50), (50, 50)])
def test_upper_limits_invert_their_tests(errors, trials):
    for upper, p_value in (
        (certificate.clopper_pearson_upper, certificate.binomial_p),
        (certificate.hoeffding_bentkus_upper, certificate.hoeffding_bentkus_p),
    ):
        limit = upper(errors, trials, 0.05)
        if errors == trials:
            assert limit == 1
        else:
            assert p_value(errors, trials, limit) == pytest.approx(0.05, rel=1e-9)
            assert upper is certificate.clopper_pearson_upper or p_value(errors, trials, limit) <= 0.05


def test_hoeffding_bentkus_is_valid_for_errors_between_and_less_sharp_than_the_exact_test(rng):
    trials, draws = 100, 4000
    for error in (0.3, 0.9):
        sums = error * rng.binomial(trials, 0.1 / error, size=draws)
        p = certificate.hoeffding_bentkus_p(sums, trials, 0.1)
        for level in (0.05, 0.2):
            assert (p <= level).sum() <= binom.isf(1e-4, draws, level)
    errors = np.arange(101)
    assert (certificate.hoeffding_bentkus_p(errors, 100, 0.3) >= certificate.binomial_p(errors, 100, 0.3)).all()


@given(st.integers(1, 30), st.floats(0, 1), st.sampled_from([0.05, 0.3, 0.7]))
def test_hoeffding_bentkus_by_its_formula(trials, mean, risk):
    expected = naive.hoeffding_bentkus(mean * trials, trials, risk)
    assert certificate.hoeffding_bentkus_p(mean * trials, trials, risk) == pytest.approx(expected, rel=1e-9)


def test_hoeffding_bentkus_survives_rounding():
    """Ten times 0.1 may sum to a little more than the trials allow."""
    assert certificate.hoeffding_bentkus_p(np.array([3 + 1e-15 * 4]), np.array([3]), 0.5)[0] == 1


def test_tied_rows_are_accepted_together_or_not_at_all(rng):
    u = np.repeat([1.0, 2.0, 3.0], 1000)
    errors = np.concatenate([np.zeros(1000), rng.random(1000) < 0.03, np.ones(1000)])
    policy = Policy.calibrate(u, errors, risk=0.05)
    assert (policy.threshold, policy.n_accepted) == (2.0, 2000)
    assert policy.errors_accepted == errors[:2000].sum()
    strict = Policy.calibrate(u, errors, risk=0.0125)
    assert (strict.threshold, strict.n_accepted) == (1.0, 1000)


def test_the_order_of_tied_rows_does_not_matter():
    u = np.repeat([0.0, 1.0], [6000, 2000])
    errors = (np.arange(8000) < 75) | (u > 0)  # the wrong ones come first: too many for a start at any half
    assert Policy.calibrate(u, errors).n_accepted == 6000
    assert Policy.calibrate(u[::-1], errors[::-1]).n_accepted == 6000


def test_infinite_unreliability():
    u = np.concatenate([np.full(300, -np.inf), np.full(300, np.inf)])
    policy = Policy.calibrate(u, np.zeros(600))
    assert policy.n_accepted == 300
    assert policy.accept([-np.inf, -1e300, 0.0, np.inf]).tolist() == [True, False, False, False]
    assert Policy.calibrate(np.arange(300.0), np.zeros(300)).accept([299, np.inf]).tolist() == [True, False]


def test_accept_is_at_or_below_the_threshold(rng):
    u = rng.random(2000)
    policy = Policy.calibrate(u, rng.random(2000) < 0.2 * u**4)
    assert 0 < policy.accept(u).sum() == policy.n_accepted < 2000
    assert policy.accept([policy.threshold, np.nextafter(policy.threshold, 2)]).tolist() == [True, False]
    assert policy.accept([]).tolist() == []
    assert policy.risk_bound <= policy.risk == 0.02
    assert policy.coverage == policy.n_accepted / 2000


def test_more_is_asked_less_is_accepted(rng):
    u = rng.random(5000)
    errors = rng.random(5000) < 0.2 * u**2
    covered = [Policy.calibrate(u, errors, risk=r).coverage for r in (0.01, 0.02, 0.05)]
    assert covered[0] < covered[1] < covered[2]
    assert Policy.calibrate(u, errors, confidence=0.999).coverage < covered[1]


@pytest.mark.parametrize(
    ("n", "errors", "reason"),
    [
        (
            100,
            0,
            (
                "95 % confidence in a risk of at most 2 % takes 149 calibration samples below +inf even if all are right, "
                "and there are 100."
            ),
        ),
        (
            200,
            5,
            (
                "95 % confidence in a risk of at most 2 % is out of reach: the 200 most reliable of 200 calibration samples "
                "have a mean error of 2.5 %. More samples will not help; a better score or a higher risk will."
            ),
        ),
        (
            200,
            2,
            (
                "95 % confidence in a risk of at most 2 % takes more samples: the 200 most reliable of 200 calibration "
                "samples have a mean error of 1 %. If that stays so, about 1400 are enough."
            ),
        ),
    ],
)
def test_nothing_qualifies(n, errors, reason):
    policy = Policy.calibrate(np.zeros(n), np.arange(n) < errors)
    assert (policy.threshold, policy.coverage, policy.risk_bound) == (-np.inf, 0, 0)
    assert not policy.accept([-np.inf, -1.0, 0.0, np.inf]).any()
    assert policy.reason == reason
    assert str(policy) == f"accepts nothing: {reason}"


def test_the_samples_that_are_asked_for_are_enough():
    wrong = np.arange(5000) % 100 == 50
    asked = int(re.search(r"about (\d+)", Policy.calibrate(np.arange(200), wrong[:200]).reason)[1])
    assert 200 < asked < 5000
    assert Policy.calibrate(np.arange(asked), wrong[:asked]).coverage > 0.9


def test_it_says_what_it_does(rng):
    u = np.arange(1000.0)
    policy = Policy.calibrate(u, u > 900)
    assert str(policy) == (
        f"accepts unreliability <= {policy.threshold:g}, {policy.n_accepted} of 1000 calibration samples "
        f"({100 * policy.coverage:.1f} %); with 95 % confidence, at most 2 % of accepted predictions are wrong"
    )
    assert repr(policy) == f"<Policy {policy}>"
    bounded = Policy.calibrate(u, (u > 900) / 2, risk=0.03)
    assert bounded.promise == "with 95 % confidence, the mean error of accepted predictions is at most 0.03"


def test_calibrate_is_quick(rng):
    u = rng.random(10_000)
    errors = rng.random(10_000) < 0.2 * u**4
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        Policy.calibrate(u, errors)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("n", [19, 99, 250])
def test_false_alarms_stay_below_their_rate(n, rng):
    """Over draws of calibration and new sample the rate is floor((n + 1) rate) / (n + 1), by symmetry."""
    rate, draws = 0.07, 20_000
    u = rng.normal(size=(draws, n + 1))
    kept = [Policy.at_false_alarm(row[:-1], rate).threshold for row in u[:2000]] if n == 99 else None
    refused = (n + 1) * rate + 1e-9 if n == 99 else np.floor((n + 1) * rate)
    threshold = np.sort(u[:, :-1], axis=1)[:, n - int(refused)]
    if kept is not None:
        np.testing.assert_array_equal(kept, threshold[:2000])
    alarms = (u[:, -1] > threshold).sum()
    assert abs(alarms - draws * int(refused) / (n + 1)) < 4 * np.sqrt(draws * rate)
    assert alarms <= draws * rate + 4 * np.sqrt(draws * rate)


def test_at_coverage_is_the_conformal_quantile():
    policy = Policy.at_coverage(np.arange(99), 0.9)  # 90 of 100: the 90th of 99
    assert (policy.threshold, policy.n_accepted, policy.risk_bound) == (89, 90, 1)
    assert policy.promise == "a new sample is accepted with probability at least 90 %"
    assert Policy.at_false_alarm(np.arange(99), 0.1).threshold == 89
    assert Policy.at_coverage(np.repeat([0.0, 1.0], [50, 49]), 0.4).n_accepted == 50
    assert Policy.at_coverage([-np.inf] * 99, 0.9).accept([-np.inf]).all()


def test_quantiles_that_cannot_be():
    with pytest.raises(
        InvalidInput, match=re.escape("A share of 0.05 refused at most needs at least 19 samples. Got 18")
    ):
        Policy.at_false_alarm(np.arange(18), 0.05)
    assert Policy.at_false_alarm(np.arange(19), 0.05).threshold == 18
    with pytest.raises(
        InvalidInput,
        match=re.escape(
            "unreliability must be below +inf for more rows to accept that many. Got 10 of 19 at +inf, which is never "
            "accepted; ask for less."
        ),
    ):
        Policy.at_coverage([0.0] * 9 + [np.inf] * 10, 0.9)


def cost_by_counting(threshold, u, errors, u_ood, wrong, abstain, ood, share):
    inside = sum(wrong * e if x <= threshold else abstain for x, e in zip(u, errors, strict=True)) / len(u)
    outside = sum(ood if x <= threshold else abstain for x in u_ood) / len(u_ood)
    return (1 - share) * inside + share * outside


@given(st.data(), st.integers(1, 8), st.integers(1, 5))
def test_least_cost_by_counting(data, n, m):
    u = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    errors = data.draw(st.lists(st.sampled_from([0, 0.5, 1]), min_size=n, max_size=n))
    u_ood = data.draw(st.lists(st.integers(0, 5), min_size=m, max_size=m))
    wrong, abstain, ood, share = 8.0, 1.0, 4.0, 0.25
    policy = Policy.min_cost(u, errors, wrong=wrong, abstain=abstain, unreliability_ood=u_ood, ood=ood, ood_share=share)
    costs = {t: cost_by_counting(t, u, errors, u_ood, wrong, abstain, ood, share) for t in [-np.inf, *u]}
    assert costs[policy.threshold] == pytest.approx(min(costs.values()), abs=1e-12)
    alone = Policy.min_cost(u, errors, wrong=wrong, abstain=abstain)
    costs = {t: cost_by_counting(t, u, errors, [0], wrong, abstain, ood, 0) for t in [-np.inf, *u]}
    assert costs[alone.threshold] == pytest.approx(min(costs.values()), abs=1e-12)
    assert alone.promise == (
        f"the least mean cost on the calibration samples is {min(costs.values()):.4g}; nothing is promised on others"
    )


def test_equal_costs_go_to_the_greater_coverage():
    assert Policy.min_cost([0.0, 1.0], [0, 1], wrong=1, abstain=1).n_accepted == 2


def test_least_cost_may_be_to_abstain():
    policy = Policy.min_cost([0.0, 1.0], [1, 1], wrong=5, abstain=1)
    assert str(policy) == "accepts nothing: To abstain always costs 1, and every threshold costs more."


def test_abstaining_costs_the_same_on_everything():
    policy = Policy.min_cost([0.0], [1], wrong=9, abstain=1, unreliability_ood=[-np.inf], ood=9, ood_share=0.5)
    assert policy.promise == "the least mean cost on the calibration samples is 1; nothing is promised on others"


def test_groups_have_a_promise_each(rng):
    u, groups = rng.random(6000), rng.integers(0, 3, 6000)
    errors = rng.random(6000) < np.array([0.1, 0.4, 1.0])[groups] * u**3
    policy = Policy.calibrate(u, errors, risk=0.05, groups=groups)
    assert policy.labels == (0, 1, 2)
    for label in range(3):
        rows = groups == label
        alone = Policy.calibrate(u[rows], errors[rows], risk=0.05)
        assert policy[label] == alone
        np.testing.assert_array_equal(policy.accept(u, groups)[rows], alone.accept(u[rows]))
    assert policy[0].coverage > policy[1].coverage > policy[2].coverage > 0
    assert policy.coverage == policy.accept(u, groups).mean()
    assert policy.accept([0.0, 0.0], [0, 7]).tolist() == [True, False]
    assert str(policy).splitlines()[1] == f"group 1: {policy[1]}"
    assert repr(policy) == f"<GroupPolicy of 3 groups, accepts {100 * policy.coverage:.1f} % of calibration samples>"


def test_groups_may_have_names():
    policy = Policy.calibrate(np.zeros(400), np.arange(400) < 200, groups=["cat"] * 200 + ["dog"] * 200)
    assert policy.labels == ("cat", "dog")
    assert policy.accept([0.0] * 3, ["cat", "dog", "cow"]).tolist() == [False, True, False]


@given(st.data(), st.integers(1, 12))
def test_isotonic_by_the_max_min_formula(data, n):
    u = data.draw(st.lists(st.sampled_from([-np.inf, 0.0, 0.5, 1.0, 2.0, np.inf]), min_size=n, max_size=n))
    errors = data.draw(st.lists(st.sampled_from([0, 0.25, 1]), min_size=n, max_size=n))
    fitted = ErrorProbability.fit(u, errors)
    expected = naive.isotonic(u, errors)
    np.testing.assert_allclose(fitted.probability(u), [float(expected[x]) for x in u], rtol=1e-12)
    assert (fitted.probability([-np.inf, *u, np.inf]) > 0).all()
    assert (fitted.probability([-np.inf, *u, np.inf]) < 1).all()


def test_probabilities_are_calibrated(rng):
    u = rng.random(40_000)
    errors = rng.random(40_000) < 0.5 * u**2
    fitted = ErrorProbability.fit(u[:20_000], errors[:20_000])
    at = np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(fitted.probability(at), 0.5 * at**2, atol=0.04)
    curve = fitted.reliability(u[20_000:], errors[20_000:])
    assert len(curve.count) == 10
    assert curve.count.sum() == 20_000
    assert curve.count.min() > 1000
    assert curve.calibration_error < 0.015
    shifted = fitted.reliability(u[20_000:], rng.random(20_000) < 0.5 * u[20_000:] ** 2 + 0.1)
    assert shifted.calibration_error == pytest.approx(0.1, abs=0.02)
    assert repr(curve) == f"<Reliability of 20000 samples in 10 bins: {curve.calibration_error:.4f} off>"


def test_a_reliability_curve_keeps_equal_probabilities_together():
    fitted = ErrorProbability(np.array([1.0, 2.0]), np.array([0.1, 0.4]))
    curve = fitted.reliability([1, 1, 1, 2], [0, 0, 1, 1], bins=3)
    np.testing.assert_allclose(curve.predicted, [0.1, 0.4])
    np.testing.assert_allclose(curve.observed, [1 / 3, 1])
    assert curve.count.tolist() == [3, 1]
    assert curve.calibration_error == pytest.approx((3 * (1 / 3 - 0.1) + 0.6) / 4)


@pytest.fixture
def built(rng):
    u = rng.random(2000)
    errors = rng.random(2000) < 0.2 * u**4
    return {
        "risk": Policy.calibrate(u, errors),
        "nothing": Policy.calibrate(u[:50], errors[:50]),
        "coverage": Policy.at_coverage(u, 0.9),
        "cost": Policy.min_cost(u, errors, wrong=10, abstain=1),
        "groups": Policy.calibrate(u, errors, groups=np.where(u < 0.5, "low", "high")),
        "probability": ErrorProbability.fit(u, errors),
    }


@pytest.mark.parametrize("name", ["risk", "nothing", "coverage", "cost", "groups", "probability"])
def test_files_give_back_what_was_saved(name, built, tmp_path):
    one = built[name]
    one.save(tmp_path / "file")
    loaded = type(one).load(tmp_path / "file")
    assert type(loaded) is type(one)
    if name == "probability":
        np.testing.assert_array_equal(loaded.probability(GRID), one.probability(GRID))
    else:
        assert loaded == one


@pytest.mark.parametrize(
    ("name", "arrays", "settings"),
    [
        ("risk", {}, {}),
        ("risk", {"threshold": np.array([np.nan])}, None),
        ("risk", {"threshold": np.array([1.0, 2.0])}, None),
        ("risk", None, {"n_accepted": 5000}),
        ("risk", None, {"n_samples": "many"}),
        ("risk", None, {"risk": 2.0}),
        ("risk", None, {"promise": 7}),
        ("risk", None, {"surprise": 1}),
        ("groups", {"thresholds": np.zeros(1)}, None),
        ("groups", None, {"labels": ["one", "one"]}),
        ("groups", None, {"labels": None}),
        ("probability", {"thresholds": np.zeros(2), "values": np.array([0.5, 0.2])}, None),
        ("probability", {"thresholds": np.zeros(1), "values": np.array([1.0])}, None),
    ],
)
def test_files_that_do_not_hold_one(name, arrays, settings, built, tmp_path):
    one = built[name]
    good_arrays, good_settings = one.to_arrays()
    arrays = good_arrays if arrays is None else arrays
    settings = {**good_settings, **settings} if settings is not None else good_settings
    storage.write_arrays(tmp_path / "file", type(one).__name__, arrays, settings)
    with pytest.raises(BadFile, match=f"does not hold a whole {type(one).__name__} .*Save it again."):
        type(one).load(tmp_path / "file")


def calibrate(**changed):
    return lambda: Policy.calibrate(**{"unreliability": [1.0, 2.0], "errors": [0, 1], **changed})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            calibrate(unreliability=[1.0, np.nan]),
            "unreliability must not be NaN. Got NaN in row 1; look for its cause.",
        ),
        (
            calibrate(unreliability=[[1.0, 2.0]]),
            "unreliability must be a one-dimensional array of numbers, not empty. Got float64 of shape (1, 2).",
        ),
        (
            calibrate(unreliability=[]),
            "unreliability must be a one-dimensional array of numbers, not empty. Got float64 of shape (0,).",
        ),
        (
            calibrate(errors=[0, 2]),
            (
                "errors must lie in [0, 1]. Got 2.0 in row 1; the unreliability comes first; for a classifier's errors use "
                "prediction != label."
            ),
        ),
        (
            calibrate(risk=0),
            "risk must lie between 0 and 1 (the largest mean error of accepted predictions to allow). Got 0.",
        ),
        (
            calibrate(confidence=95),
            "confidence must lie between 0 and 1 (the probability with which the promise holds). Got 95.",
        ),
        (
            calibrate(groups=[0.5, 1.5]),
            (
                "groups must be integers or strings of shape (2,), one for each row. Got float64 of shape (2,); for "
                "predicted classes use argmax."
            ),
        ),
        (
            calibrate(groups=[1]),
            (
                "groups must be integers or strings of shape (2,), one for each row. Got int64 of shape (1,); for "
                "predicted classes use argmax."
            ),
        ),
        (
            lambda: Policy.at_coverage([1.0], 1),
            "coverage must lie between 0 and 1 (the share of in-distribution samples to accept). Got 1.",
        ),
        (
            lambda: Policy.at_false_alarm([1.0], 0),
            "rate must lie between 0 and 1 (the share of in-distribution samples to refuse at most). Got 0.",
        ),
        (
            lambda: Policy.at_coverage(np.arange(99), 0.9).accept([np.nan]),
            "unreliability must not be NaN. Got NaN in row 0; look for its cause.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=-1, abstain=1),
            "wrong must be a positive float (the cost of a wrong answer). Got -1.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=1, abstain=0),
            "abstain must be a positive float (the cost of no answer). Got 0.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=1, abstain=1, ood=3),
            "unreliability_ood, ood and ood_share must be given together. Got 1 of 3; add the others.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=1, abstain=1, unreliability_ood=[1.0], ood=0, ood_share=0.1),
            "ood must be a positive float (the cost of accepting an out-of-distribution sample). Got 0.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=1, abstain=1, unreliability_ood=[1.0], ood=1, ood_share=1),
            "ood_share must lie between 0 and 1 (the assumed share of out-of-distribution samples). Got 1.",
        ),
        (
            lambda: Policy.min_cost([1.0], [0], wrong=1, abstain=1, unreliability_ood=[np.nan], ood=1, ood_share=0.1),
            "unreliability_ood must not be NaN. Got NaN in row 0; look for its cause.",
        ),
        (
            lambda: Policy(-np.inf, 10, 3, "none"),
            "threshold must be -inf just where nothing is accepted. Got -inf with 3 accepted; let calibrate choose it.",
        ),
        (
            lambda: Policy(1.0, 10, 11, "none"),
            "n_accepted must be a number from 0 to 10. Got 11; let calibrate find it.",
        ),
        (lambda: Policy(1.0, 10, 3, None), "promise and reason must be text. Got None and ''."),
        (
            lambda: GroupPolicy((1, 1), ()),
            "labels must differ and go with one Policy each. Got 2 labels and 0 policies; calibrate with groups=.",
        ),
        (
            lambda: ErrorProbability([1, 2], [0.5, 0.5]),
            (
                "thresholds and values must be as many, both rising, the values between 0 and 1. Got [1. 2.] and [0.5 0.5]; "
                "let fit find them."
            ),
        ),
        (
            lambda: ErrorProbability.fit([1.0], [0]).reliability([1.0], [0], bins=0),
            "bins must be an integer of at least 1. Got 0.",
        ),
    ],
)
def test_what_is_refused(call, sentence):
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        call()
