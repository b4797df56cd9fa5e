from fractions import Fraction

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from terrafirma import metrics
from terrafirma.errors import InvalidInput, UndefinedMetric
from tests import naive
from tests.conftest import DATA

few_levels = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, float("inf")]), min_size=2, max_size=6)


def flags(draw, n):
    wrong = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    if all(wrong) or not any(wrong):
        wrong[0] = not wrong[0]
    return wrong


@given(few_levels, st.data())
def test_auroc_counts_pairs(scores, data):
    wrong = flags(data.draw, len(scores))
    assert metrics.auroc(scores, wrong) == pytest.approx(float(naive.auroc(scores, wrong)), rel=1e-14)


@given(few_levels, st.data())
def test_curves_average_over_all_orders_of_ties(scores, data):
    errors = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(scores), max_size=len(scores)))
    expected = naive.risk_coverage(scores, errors)
    curve = metrics.risk_coverage(scores, errors)
    np.testing.assert_allclose(curve.risk, [float(r) for r in expected], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(curve.coverage, np.arange(1, len(scores) + 1) / len(scores))
    np.testing.assert_array_equal(curve.thresholds, np.sort(scores))
    area = float(naive.aucea(scores, errors))
    assert metrics.aucea(scores, errors) == pytest.approx(area, rel=1e-14)
    assert metrics.aurc(scores, errors) == pytest.approx(1 - area, abs=1e-14)
    assert metrics.augrc(scores, errors) == pytest.approx(float(naive.augrc(scores, errors)), abs=1e-14)
    best = 1 - float(naive.aucea(errors, errors))
    assert metrics.e_aurc(scores, errors) == pytest.approx(1 - area - best, abs=1e-14)


@given(few_levels.filter(lambda s: s[0] != float("inf")), st.data(), st.integers(1, 7))
def test_the_published_protocol_by_counting(scores, data, thresholds):
    wrong = flags(data.draw, len(scores))
    points = naive.published(scores, wrong, thresholds)
    n, n_wrong = len(scores), sum(wrong)
    coverage = [Fraction(k, n) for k, _ in points]
    precision = [(k - e) / k if k else Fraction(0) for k, e in points]
    false_rate = [e / n_wrong for _, e in points]
    true_rate = [(k - e) / (n - n_wrong) for k, e in points]
    assert metrics.aucea(scores, wrong, thresholds=thresholds) == pytest.approx(float(area(coverage, precision)))
    assert metrics.auroc(scores, wrong, thresholds=thresholds) == pytest.approx(float(area(false_rate, true_rate)))


def area(x, y):
    return sum((b - a) * (p + q) / 2 for a, b, p, q in zip(x, x[1:], y, y[1:], strict=False))


@pytest.mark.parametrize("vector", ["smooth", "ties_at_min", "with_inf", "heavy"])
def test_published_reference_values(vector):
    with np.load(DATA / "metrics_ref.npz") as file:
        scores, wrong = file[f"vec_{vector}_unrel"], ~file[f"vec_{vector}_correct"]
        auroc, aucea = file[f"vec_{vector}_AUROC"], file[f"vec_{vector}_AUCEA"]
    assert metrics.auroc(scores, wrong, thresholds=1000) == pytest.approx(auroc, abs=1e-9)
    assert metrics.aucea(scores, wrong, thresholds=1000) == pytest.approx(aucea, abs=1e-9)
    assert abs(metrics.auroc(scores, wrong) - auroc) > 1e-9
    assert abs(metrics.aucea(scores, wrong) - aucea) > 1e-9


@pytest.fixture(params=["continuous", "tied"])
def sample(request, rng):
    wrong = rng.random(2000) < 0.15
    scores = rng.normal(size=2000) + 1.2 * wrong
    return (scores if request.param == "continuous" else np.round(scores, 1)), wrong


def test_agreement_with_scikit_learn(sample):
    scores, wrong = sample
    assert metrics.auroc(scores, wrong) == pytest.approx(sklearn.metrics.roc_auc_score(wrong, scores), rel=1e-12)
    assert metrics.aupr(scores, wrong) == pytest.approx(
        sklearn.metrics.average_precision_score(wrong, scores), rel=1e-12
    )
    fpr, tpr, thresholds = sklearn.metrics.roc_curve(wrong, scores, drop_intermediate=False)
    curve = metrics.roc(scores, wrong)
    np.testing.assert_allclose(curve.false_alarms, fpr, atol=1e-15)
    np.testing.assert_allclose(curve.hits, tpr, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    assert metrics.fpr_at_tpr(scores, wrong) == fpr[np.argmax(tpr >= 0.95)]


def test_augrc_is_the_published_combination_of_auroc_and_accuracy(sample):
    scores, wrong = sample
    a = 1 - wrong.mean()
    expected = (1 - metrics.auroc(scores, wrong)) * a * (1 - a) + (1 - a) ** 2 / 2
    assert metrics.augrc(scores, wrong) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "metric",
    [metrics.auroc, metrics.aucea, metrics.aurc, metrics.e_aurc, metrics.augrc, metrics.aupr, metrics.fpr_at_tpr],
)
def test_the_order_of_rows_never_matters(metric, sample, rng):
    scores, wrong = sample
    rows = rng.permutation(len(scores))
    assert metric(scores[rows], wrong[rows]) == metric(scores, wrong)


@pytest.mark.parametrize("metric", [metrics.aucea, metrics.augrc])
def test_the_order_of_rows_never_matters_for_fractional_errors(metric, rng):
    scores, errors, rows = rng.integers(5, size=500), rng.random(500), rng.permutation(500)
    assert metric(scores[rows], errors[rows]) == metric(scores, errors)


def test_sums_within_a_tie_do_not_depend_on_the_order_of_rows(rng):
    errors = rng.random(1000)
    expected = metrics.risk_coverage(np.zeros(1000), errors).risk
    published = metrics.aucea(np.r_[np.zeros(1000), 1.0], np.r_[errors, 0.0], thresholds=7)
    for _ in range(20):
        shuffled = rng.permutation(errors)
        np.testing.assert_array_equal(metrics.risk_coverage(np.zeros(1000), shuffled).risk, expected)
        assert metrics.aucea(np.r_[np.zeros(1000), 1.0], np.r_[shuffled, 0.0], thresholds=7) == published


def test_the_published_protocol_spans_all_floats():
    assert metrics.auroc([-1.7e308, 0.0, 1.7e308], [0, 1, 1], thresholds=1000) == 1.0


def test_extremes():
    wrong = np.array([False, False, True])
    assert metrics.auroc([0, 1, 2], wrong) == 1.0
    assert metrics.auroc([2, 1, 0], wrong) == 0.0
    assert metrics.auroc([1, 1, 1], wrong) == 0.5
    assert metrics.aupr([0, 1, 2], wrong) == 1.0
    assert metrics.fpr_at_tpr([0, 1, 2], wrong) == 0.0
    assert metrics.fpr_at_tpr([2, 1, 0], wrong) == 1.0
    assert metrics.e_aurc([0, 1, 2], wrong) == 0.0
    assert metrics.aucea([0, 1, 2], [0, 0, 0]) == 1.0
    assert metrics.aucea([5], [1]) == 0.0


def test_curves_show_themselves_in_a_line():
    assert repr(metrics.roc([0, 1, 2], [0, 0, 1])) == "Roc(4 points)"
    curve = metrics.risk_coverage([0, 1, 2, 3], [0, 0, 1, 0])
    assert repr(curve) == "RiskCoverage(4 points, risk 0.25 where all are accepted)"


def test_infinite_scores_rank_last():
    assert metrics.auroc([0.0, np.inf, -np.inf], [False, True, False]) == 1.0


def test_bootstrap_is_seeded_and_covers(rng):
    wrong = rng.random(400) < 0.3
    scores = rng.normal(size=400) + wrong
    interval = metrics.bootstrap(metrics.auroc, scores, wrong, samples=300, confidence=0.9)
    assert interval.value == metrics.auroc(scores, wrong)
    assert interval.low < interval.value < interval.high
    assert interval == metrics.bootstrap(metrics.auroc, scores, wrong, samples=300, confidence=0.9)
    assert interval != metrics.bootstrap(metrics.auroc, scores, wrong, samples=300, confidence=0.9, seed=1)
    wider = metrics.bootstrap(metrics.auroc, scores, wrong, samples=300, confidence=0.99)
    assert wider.low < interval.low < interval.high < wider.high
    assert str(metrics.Interval(0.5, 0.25, 0.75, 0.95)) == "0.500 [0.250, 0.750]"


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    """AUROC of unit normals 1 apart is Phi(1/sqrt 2) = 0.7602."""
    rng = np.random.default_rng(7)
    hits = 0
    for seed in range(100):
        wrong = np.arange(200) % 4 == 0
        interval = metrics.bootstrap(metrics.auroc, rng.normal(size=200) + wrong, wrong, samples=200, seed=seed)
        hits += interval.low <= 0.7602 <= interval.high
    assert 88 <= hits <= 99


def test_bootstrap_redraws_what_has_no_wrong_row():
    interval = metrics.bootstrap(metrics.auroc, [0.0, 1.0, 2.0], [False, False, True], samples=50)
    assert 0 <= interval.low <= interval.high <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: metrics.auroc([[1.0]], [True]),
            r"one-dimensional array of numbers, not empty. Got float64 of shape \(1, 1\)",
        ),
        (lambda: metrics.auroc([], []), r"not empty. Got float64 of shape \(0,\)"),
        (lambda: metrics.auroc(["a"], [True]), r"Got <U1 of shape"),
        (lambda: metrics.auroc([1.0, np.nan], [True, False]), r"unreliability must not be NaN. Got NaN in row 1."),
        (
            lambda: metrics.auroc([1.0, 2.0], [True]),
            "wrong must have one entry for each of the 2 rows. Got 1",
        ),
        (
            lambda: metrics.auroc([1.0, 2.0], [0.5, 1]),
            r"wrong must be bool \(or 0 and 1\). Got 0.5 in row 0; compare errors to a level first, or take a metric",
        ),
        (lambda: metrics.auroc([1.0, 2.0], [True, True]), r"both wrong and right rows .* Got 2 wrong of 2."),
        (lambda: metrics.aupr([1.0, 2.0], [False, False]), r"Got 0 wrong of 2."),
        (
            lambda: metrics.aucea([1.0, 2.0], [0, 2]),
            r"errors must lie in \[0, 1\]. Got 2.0 in row 1; the unreliability comes first; for a classifier's errors",
        ),
        (lambda: metrics.aucea([1.0, 2.0], [0, np.nan]), r"errors must lie in \[0, 1\]"),
        (
            lambda: metrics.aucea([1.0, 2.0], [0, 1], thresholds=0),
            r"thresholds must be an integer of at least 1. Got",
        ),
        (lambda: metrics.aucea([np.inf], [0], thresholds=5), r"at least one finite unreliability"),
        (
            lambda: metrics.fpr_at_tpr([1.0, 2.0], [True, False], tpr=0),
            r"tpr must lie between 0 and 1 \(the share of wrong rows to refuse, which may also be 1\). Got 0.",
        ),
        (
            lambda: metrics.bootstrap(metrics.aucea, [1.0], [0], samples=0),
            r"samples must be an integer of at least 1. Got 0.",
        ),
        (
            lambda: metrics.bootstrap(metrics.aucea, [1.0], [0], confidence=1),
            r"confidence must lie between 0 and 1 \(the share of such intervals that hold the true value\). Got 1.",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


@pytest.mark.parametrize("metric", [metrics.roc, lambda u, e: np.nan, lambda u, e: "a"])
def test_a_bootstrap_needs_a_number(metric):
    with pytest.raises(InvalidInput, match="metric must return one finite number. Got (Roc|nan|'a')"):
        metrics.bootstrap(metric, [1.0, 2.0], [0, 1])


def test_the_share_to_refuse_is_one_number():
    with pytest.raises(InvalidInput, match=r"tpr must lie between 0 and 1 .* Got array\(\[0.5, 1. \]\)."):
        metrics.fpr_at_tpr([1.0, 2.0], [0, 1], tpr=np.array([0.5, 1.0]))


def test_narrow_integers_are_numbers_of_thresholds():
    scores, errors = [0.1, 0.2, 0.3], [0, 1, 0]
    assert metrics.aucea(scores, errors, thresholds=np.uint8(255)) == metrics.aucea(scores, errors, thresholds=255)


def test_a_bootstrap_that_is_never_defined_ends():
    with pytest.raises(UndefinedMetric, match=r"metric must be defined on most draws of 2 rows. Got 0 of 300; give it"):
        metrics.bootstrap(undefined_on_repeated_rows, [1.0, 2.0], [0, 1], samples=3)


def undefined_on_repeated_rows(scores, wrong):
    undefined_on_repeated_rows.calls = getattr(undefined_on_repeated_rows, "calls", 0) + 1
    if undefined_on_repeated_rows.calls == 1:
        return 0.5
    raise UndefinedMetric("as a draw may be")
