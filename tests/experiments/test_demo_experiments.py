"""The two experiments of the demo, run for real."""

import numpy as np
import pytest

from terrafirma import metrics
from terrafirma.capture.sklearn import hidden_activations
from terrafirma.errors import InvalidInput
from terrafirma.experiments import digits, half_moons

pytestmark = pytest.mark.jit


@pytest.fixture(scope="module")
def moons():
    steps = []
    return half_moons.run(advance=lambda: steps.append(1)), len(steps)


@pytest.fixture(scope="module")
def found():
    steps = []
    return digits.run(advance=lambda: steps.append(1)), len(steps)


def test_half_moons_are_learned_and_far_away_is_unreliable(moons):
    result, steps = moons
    assert steps == half_moons.STEPS
    assert result.accuracy > 0.99
    assert result.selection.best.n_units_ == 64
    near = result.selection.best.regions_.patterns
    assert result.selection.best.unreliability(near).max() < np.median(result.log_bounds)
    centre, edge = result.surface[110:131, 110:131], np.concatenate([result.surface[0], result.surface[-1]])
    assert centre.max() < np.median(edge)


def test_surface_and_polygons_agree(moons):
    """The bound on the grid is that of the polygon around it."""
    result, _ = moons
    assert set(np.round(result.surface.ravel(), 9)) <= set(np.round(result.log_bounds, 9))


def test_digits_rank_mistakes_and_strangers(found):
    result, steps = found
    assert steps == digits.STEPS
    assert result.novel.sum() == 354
    bound = result.rows[0]
    assert bound.score == "subfunction bound"
    assert bound.auroc_wrong.value > 0.8
    assert bound.auroc_novel > 0.8
    for row in result.rows:
        assert row.accuracy[0] == pytest.approx(1 - result.wrong[~result.novel].mean())
        assert row.accuracy[-1] > row.accuracy[0]
    assert bound.auroc_novel == metrics.auroc(result.log_bound, result.novel)


def test_accuracy_when_refusing_is_that_of_the_most_reliable(found):
    result, _ = found
    u, wrong = result.log_bound[~result.novel], result.wrong[~result.novel]
    kept = np.argsort(u, kind="stable")[: round(0.8 * len(u))]
    assert abs(result.rows[0].accuracy[2] - (1 - wrong[kept].mean())) < 0.005  # ties aside


class Frame:
    """As much of a data frame as matters."""

    def __init__(self, values, columns):
        self.values, self.columns = values, columns

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_hidden_activations_are_those_of_the_network(rng):
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    X, y = rng.normal(size=(60, 4)), rng.integers(3, size=60)
    mlp = MLPClassifier((7, 5), solver="lbfgs", max_iter=30, random_state=0)
    with pytest.warns(Warning):
        mlp.fit(X, y)
    layers = hidden_activations(mlp, X)
    assert [h.shape for h in layers] == [(60, 7), (60, 5)]
    logits = layers[-1] @ mlp.coefs_[-1] + mlp.intercepts_[-1]
    np.testing.assert_array_equal(mlp.classes_[logits.argmax(axis=1)], mlp.predict(X))
    with pytest.raises(
        InvalidInput, match="mlp must be a fitted MLPClassifier or MLPRegressor. Got MLPRegressor; fit it"
    ):
        hidden_activations(MLPRegressor(), X)
    with pytest.raises(InvalidInput, match=r"X must be numbers of shape \(n, 4\), as in fitting the MLP. Got float64"):
        hidden_activations(mlp, X[:, :3])
    mlp.feature_names_in_ = np.array(["a", "b", "c", "d"])
    with pytest.raises(
        InvalidInput, match=r"X must have the columns of the training data, in their order. Got \['d', "
    ):
        hidden_activations(mlp, Frame(X, ["d", "c", "b", "a"]))
    np.testing.assert_array_equal(hidden_activations(mlp, Frame(X, ["a", "b", "c", "d"]))[0], layers[0])
    mlp.activation = "tanh"
    with pytest.raises(InvalidInput, match="The MLP must have activation='relu'. Got 'tanh'"):
        hidden_activations(mlp, X)
