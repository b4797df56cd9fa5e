import re

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct
from sklearn.linear_model import LogisticRegression

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput
from terrafirma.scores import gaussian_process


def phi_of(score, features):
    """The random features of a fitted score, by a loop over samples and waves."""
    frequencies, phases, centre = (score.waves_[name] for name in ("frequencies", "phases", "centre"))
    found = np.empty((len(features), len(phases)))
    for i, x in enumerate(features.astype(np.float64)):
        for j in range(len(phases)):
            found[i, j] = (2 / len(phases)) ** 0.5 * np.cos(frequencies[j] @ (x - centre) + phases[j])
    return found


def dense(phi, queries, weights):
    """Standard deviations by the inverse of the whole precision, a sum over samples."""
    precision = np.eye(phi.shape[1])
    for row, weight in zip(phi, weights, strict=True):
        precision += weight * np.outer(row, row)
    covariance = np.linalg.inv(precision)
    return np.array([(q @ covariance @ q) ** 0.5 for q in queries])


@pytest.fixture
def few_waves(monkeypatch):
    monkeypatch.setattr(gaussian_process, "WAVES", 40)


def blobs(rng, n, dtype=np.float64, classes=3, width=5):
    """Features, labels and the outputs of a network that is mostly right."""
    centres = 4 * np.eye(width)[:classes]
    labels = rng.integers(0, classes, size=n)
    features = (centres[labels] + rng.normal(size=(n, width))).astype(dtype)
    return Recorded(features=features, labels=labels, outputs=features @ centres.T)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parameters", [{"scale": 0.7}, {"variant": "published", "scale": 2}])
def test_regression_against_dense_algebra(rng, few_waves, dtype, parameters):
    train, query = blobs(rng, 70, dtype), blobs(rng, 20, dtype)
    score = scores.get("gaussian_process", **parameters).fit(train)
    expected = dense(phi_of(score, train.features), phi_of(score, query.features), np.ones(70))
    np.testing.assert_allclose(score.unreliability(query), expected, rtol=1e-9)


def test_regression_against_scikit_learn(rng):
    """A linear kernel on the random features, and noise of variance 1; with all of 1024 waves."""
    train, query = blobs(rng, 60), blobs(rng, 20)
    score = scores.get("gaussian_process", scale=1.0).fit(train)
    kernel = DotProduct(sigma_0=0, sigma_0_bounds="fixed")
    process = GaussianProcessRegressor(kernel, alpha=1.0, optimizer=None).fit(
        phi_of(score, train.features), train.labels
    )
    expected = process.predict(phi_of(score, query.features), return_std=True)[1]
    np.testing.assert_allclose(score.unreliability(query), expected, rtol=1e-6)


def test_near_the_exact_kernel(rng):
    """What the random features stand for: a squared exponential kernel of the right length."""
    train, query = blobs(rng, 200), blobs(rng, 50)
    score = scores.get("gaussian_process", scale=0.5).fit(train)
    distances = np.linalg.norm(train.features[:, None] - train.features, axis=2)
    length = 0.5 * np.median(distances[np.triu_indices(200, 1)])
    process = GaussianProcessRegressor(RBF(length), alpha=1.0, optimizer=None).fit(train.features, train.labels)
    expected = process.predict(query.features, return_std=True)[1]
    np.testing.assert_allclose(score.unreliability(query), expected, atol=0.1)
    assert np.corrcoef(score.unreliability(query), expected)[0, 1] > 0.95


@pytest.mark.parametrize("classes", [2, 3])
def test_classification_against_dense_algebra(rng, few_waves, classes):
    train, query = blobs(rng, 80, classes=classes), blobs(rng, 30, classes=classes)
    score = scores.get("gaussian_process", scale=0.7, likelihood="classification").fit(train)
    phi, weights = phi_of(score, train.features), np.zeros((40, classes))
    truth = np.eye(classes)[train.labels]
    for _ in range(3000):  # down the slope, slowly: the curvature is at most 1 + 80
        weights -= (weights + phi.T @ (softmax(phi @ weights, axis=1) - truth)) / 81
    p, queries = softmax(phi @ weights, axis=1), phi_of(score, query.features)
    for c in range(classes):
        rows = query.predictions == c
        expected = dense(phi, queries[rows], p[:, c] * (1 - p[:, c]))
        np.testing.assert_allclose(score.unreliability(query)[rows], expected, rtol=1e-6)


def test_the_most_probable_weights_are_those_of_scikit_learn(rng, few_waves):
    phi, classes = rng.normal(size=(100, 40)).astype(np.float32), rng.integers(0, 3, size=100)
    found = gaussian_process._most_probable(phi, classes, 3)
    expected = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(phi.astype(float), classes)
    np.testing.assert_allclose(found.T, expected.coef_, atol=1e-5)


def test_what_tells_the_likelihoods_apart(rng):
    """Between two classes there is data, so regression is sure; in the middle of a class the softmax learns least."""
    labels = np.repeat([0, 1], 1000)
    features = rng.normal(size=(2000, 2)) + np.array([[-2.0, 0.0], [2.0, 0.0]])[labels]
    train = Recorded(features=features, labels=labels, outputs=features[:, :1] * [-1.0, 1.0])
    query = np.array([[2.0, 0.0], [0.01, 0.0], [12.0, 12.0]])
    query = Recorded(features=query, outputs=query[:, :1] * [-1.0, 1.0])
    middle, between, far = scores.get("gaussian_process", scale=1.0).fit(train).unreliability(query)
    assert middle < between < far
    assert far > 0.9
    laplace = scores.get("gaussian_process", scale=1.0, likelihood="classification").fit(train)
    middle, between, far = laplace.unreliability(query)
    assert between < middle < far


def test_published_is_chosen_by_its_own_accuracy(rng, few_waves):
    train, validation = blobs(rng, 150), blobs(rng, 120)
    score = scores.get("gaussian_process", variant="published").fit(train, validation)
    accuracies = []
    for scale in (1.0, 2.0, 4.0, 8.0):
        trial = scores.get("gaussian_process", variant="published", scale=scale).fit(train)
        phi = phi_of(trial, train.features)
        weights = np.linalg.solve(np.eye(40) + phi.T @ phi, phi.T @ np.eye(3)[train.labels])
        predicted = (phi_of(trial, validation.features) @ weights).argmax(axis=1)
        accuracies.append((predicted == validation.labels).mean())
    assert len(set(accuracies)) > 1
    assert score.settings_ == {"scale": (1.0, 2.0, 4.0, 8.0)[int(np.argmax(accuracies))]}
    assert scores.get("gaussian_process", variant="published").fit(train).settings_ == {"scale": 1.0}


def test_units_of_the_scale(rng):
    """Published: those of the features; else their median distance."""
    train = Recorded(features=np.array([[0.0], [10.0], [30.0]]), labels=np.array([0, 1, 0]))
    own = scores.get("gaussian_process", scale=2).fit(train).waves_["frequencies"]
    published = scores.get("gaussian_process", variant="published", scale=2).fit(train).waves_["frequencies"]
    np.testing.assert_allclose(published, 20 * own)
    assert published.std() == pytest.approx(1 / 2, rel=0.1)


def test_grid_and_seed(rng, few_waves):
    train, validation = blobs(rng, 60), blobs(rng, 60)
    tried = [trial.scale_ for trial, _ in scores.get("gaussian_process").trials(train, validation)]
    assert tried == [1.0, 0.25, 0.5, 2.0, 4.0]
    one, same, other = (
        scores.get("gaussian_process", seed=seed).fit(train).unreliability(validation) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3


def test_units_and_places_do_not_matter(rng, few_waves):
    train, query = blobs(rng, 60), blobs(rng, 30)

    def found(factor, shift):
        moved = [Recorded(features=factor * part.features + shift, outputs=part.outputs) for part in (train, query)]
        return scores.get("gaussian_process").fit(moved[0]).unreliability(moved[1])

    np.testing.assert_allclose(found(1e-20, 0), found(1, 0), rtol=1e-9)
    np.testing.assert_allclose(found(1, 1e6), found(1, 0), rtol=1e-6)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_edges_are_finite(rng, few_waves, likelihood):
    def fitted(features, labels):
        outputs = np.tile([[1.0, 0.0, 0.0]], (len(features), 1))
        train = Recorded(features=features, labels=labels, outputs=outputs)
        query = rng.normal(size=(6, features.shape[1]))
        query[5] = 1e8
        query = Recorded(features=query, outputs=np.eye(3)[[0, 1, 2, 0, 1, 2]])
        return scores.get("gaussian_process", likelihood=likelihood).fit(train).unreliability(query)

    for features in (np.ones((9, 2)), np.zeros((1, 2), np.float32), rng.normal(size=(9, 50)), 1e6 + np.zeros((9, 2))):
        assert np.isfinite(fitted(features, np.zeros(len(features), dtype=int))).all()


def test_order_and_chunks_change_nothing(rng, few_waves, monkeypatch):
    train, query = blobs(rng, 900), blobs(rng, 2100)
    found = scores.get("gaussian_process", scale=1.0).fit(train).unreliability(query)
    order = rng.permutation(2100)
    monkeypatch.setattr(gaussian_process, "ROWS", 7)
    again = scores.get("gaussian_process", scale=1.0).fit(train).unreliability(query[order])
    np.testing.assert_allclose(again, found[order], rtol=1e-9)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_saved_and_loaded(rng, few_waves, tmp_path, likelihood):
    train, query = blobs(rng, 60), blobs(rng, 30)
    score = scores.get("gaussian_process", likelihood=likelihood).fit(train)
    score.save(tmp_path / "score")
    np.testing.assert_array_equal(scores.load(tmp_path / "score").unreliability(query), score.unreliability(query))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"scale": 0},
            "scale must be a positive float (the kernel's length in median distances of training samples). Got 0.",
        ),
        ({"seed": -1}, "seed must be an integer of at least 0. Got -1."),
        (
            {"likelihood": "poisson"},
            "likelihood must be 'regression' or 'classification'. Got 'poisson'; the first is quick.",
        ),
        (
            {"likelihood": "classification", "variant": "published"},
            "likelihood must be 'regression' in the variant 'published'. Got 'classification'; leave it out.",
        ),
    ],
)
def test_what_is_refused(parameters, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("gaussian_process", **parameters)
