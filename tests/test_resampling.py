import numpy as np
import pytest

from terrafirma import metrics
from terrafirma.resampling import figures

TWINS = {
    "auroc": lambda u, e: metrics.auroc(u, e == 1),
    "aucea": metrics.aucea,
    "fpr95": lambda u, e: metrics.fpr_at_tpr(u, e == 1),
    "aurc": metrics.aurc,
}


@pytest.mark.parametrize("ties", [1, 1000])
@pytest.mark.parametrize("name", TWINS)
def test_figures_and_intervals_are_those_of_metrics(rng, name, ties):
    """Weights of ranked rows give what sorting every draw anew gives."""
    errors = (rng.random(300) < 0.3).astype(float)
    u = np.round(rng.normal(size=300) + errors, 1 if ties > 1 else 9)
    mine = figures(u, errors, draws=40, confidence=0.9, seed=3)[name]
    twin = metrics.bootstrap(TWINS[name], u, errors, samples=40, confidence=0.9, seed=3)
    assert [mine.value, mine.low, mine.high] == pytest.approx([twin.value, twin.low, twin.high], abs=1e-12)


def test_fractional_errors_have_no_roc(rng):
    errors = rng.random(100)
    found = figures(rng.normal(size=100), errors, draws=10, confidence=0.9, seed=0)
    assert found["auroc"] is None
    assert found["fpr95"] is None
    assert 0 < found["aurc"].low < found["aurc"].high < 1
    assert found["aucea"].value == pytest.approx(1 - found["aurc"].value)


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_all_right_or_all_wrong(rng, error):
    found = figures(rng.normal(size=20), np.full(20, error), draws=10, confidence=0.9, seed=0)
    assert found["auroc"] is None
    assert found["aurc"].value == error


def test_draws_without_a_wrong_row_are_drawn_again(rng):
    errors = np.zeros(50)
    errors[7] = 1
    u = rng.normal(size=50)
    mine = figures(u, errors, draws=100, confidence=0.9, seed=1)["auroc"]
    twin = metrics.bootstrap(TWINS["auroc"], u, errors, samples=100, confidence=0.9, seed=1)
    assert (mine.low, mine.high) == pytest.approx((twin.low, twin.high))


def test_order_of_rows_changes_no_value(rng):
    errors = (rng.random(200) < 0.2).astype(float)
    u = np.round(rng.normal(size=200), 1)
    rows = rng.permutation(200)
    one, other = (figures(a, b, 5, 0.9, 0) for a, b in ((u, errors), (u[rows], errors[rows])))
    assert {name: x.value for name, x in one.items()} == pytest.approx({name: x.value for name, x in other.items()})
