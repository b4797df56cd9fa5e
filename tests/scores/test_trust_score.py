import re

import numpy as np
import pytest
from scipy.spatial import cKDTree

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput


def naive(train, labels, query, predicted, alpha=0.0, k=10):
    """A tree for each class, a loop over samples and classes."""
    trees = {}
    for c in set(labels.tolist()):
        own = train[labels == c].astype(np.float64)
        radii = np.reshape(cKDTree(own).query(own, [min(k, len(own))])[0], -1)
        trees[c] = cKDTree(own[radii <= np.quantile(radii, 1 - alpha)])
    found = []
    for x, c in zip(query.astype(np.float64), predicted, strict=True):
        distances = {other: tree.query(x)[0] for other, tree in trees.items()}
        rest = [distance for other, distance in distances.items() if other != c]
        if c not in distances or not rest:
            found.append(1.0)
        else:
            inverse_trust = np.divide(distances[c], min(rest))
            found.append(inverse_trust / (1 + inverse_trust))
    return np.array(found)


def outputs_of(predicted, classes):
    return np.eye(classes)[predicted]


def recorded(features, classes, labels=None, predicted=None):
    predicted = np.zeros(len(features), dtype=int) if predicted is None else predicted
    return Recorded(features=features, labels=labels, outputs=outputs_of(predicted, classes))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
@pytest.mark.parametrize("shift", [0, 1e3])
def test_against_trees(rng, dtype, alpha, shift):
    train = (shift + rng.normal(size=(200, 6))).astype(dtype)
    query = (shift + 2 * rng.normal(size=(80, 6))).astype(dtype)
    labels, predicted = rng.integers(0, 5, size=200), rng.integers(0, 6, size=80)
    labels[labels == 3] = 1  # absent, as is 5
    labels[7] = 4
    score = scores.get("trust_score", alpha=alpha).fit(recorded(train, 6, labels))
    found = score.unreliability(recorded(query, 6, predicted=predicted))
    np.testing.assert_allclose(found, naive(train, labels, query, predicted, alpha), rtol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 1000])
def test_any_k_and_a_class_with_one_sample(rng, k):
    train, query, labels = rng.normal(size=(30, 3)), rng.normal(size=(20, 3)), np.repeat([0, 1, 2], [14, 15, 1])
    predicted = rng.integers(0, 3, size=20)
    score = scores.get("trust_score", alpha=0.3, k=k).fit(recorded(train, 3, labels))
    found = score.unreliability(recorded(query, 3, predicted=predicted))
    np.testing.assert_allclose(found, naive(train, labels, query, predicted, 0.3, k), rtol=1e-9)


def test_outliers_are_left_out(rng):
    train = rng.normal(size=(200, 2)) + np.repeat([[0.0, 0.0], [20.0, 0.0]], 100, axis=0)
    labels = np.repeat([0, 1], 100)
    train[0] = 20.0, 0.0  # a stray of class 0, amid class 1
    query = recorded(np.array([[20.0, 0.0]]), 2, predicted=np.array([0]))
    assert scores.get("trust_score").fit(recorded(train, 2, labels)).unreliability(query)[0] == 0
    assert scores.get("trust_score", alpha=0.05).fit(recorded(train, 2, labels)).unreliability(query)[0] > 0.9


def test_where_distances_are_zero_or_missing():
    train = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0], [5.0, 5.0]])
    score = scores.get("trust_score").fit(recorded(train, 3, np.array([0, 1, 0, 1])))
    queries = np.array([[0.0, 0.0], [0.0, 0.0], [5.0, 5.0], [0.5, 0.0], [0.0, 0.0]])
    found = score.unreliability(recorded(queries, 3, predicted=np.array([0, 1, 0, 1, 2])))
    assert found.tolist() == [0.0, 1.0, 0.5, 0.5, 1.0]
    alone = scores.get("trust_score").fit(recorded(train, 2, np.zeros(4, dtype=int)))
    assert alone.unreliability(recorded(queries, 2)).tolist() == [1.0] * 5


def test_far_is_less_reliable_than_amid_its_class(rng):
    train = rng.normal(size=(100, 4)) + 10 * np.repeat(np.eye(4)[:2], 50, axis=0)
    score = scores.get("trust_score").fit(recorded(train, 2, np.repeat([0, 1], 50)))
    amid, far = score.unreliability(recorded(np.array([[10.0, 0, 0, 0], [1e6, 1e6, -1e6, 0]]), 2))
    assert amid < far <= 1


@pytest.mark.jit
def test_order_and_chunks_change_nothing(rng):
    train, labels = rng.normal(size=(300, 4)).astype(np.float32), rng.integers(0, 4, size=300)
    query, predicted = rng.normal(size=(2500, 4)).astype(np.float32), rng.integers(0, 4, size=2500)
    order, mixed = rng.permutation(2500), rng.permutation(300)
    found = (
        scores.get("trust_score").fit(recorded(train, 4, labels)).unreliability(recorded(query, 4, predicted=predicted))
    )
    again = (
        scores.get("trust_score")
        .fit(recorded(train[mixed], 4, labels[mixed]))
        .unreliability(recorded(query[order], 4, predicted=predicted[order]))
    )
    np.testing.assert_array_equal(again, found[order])


def test_saved_and_loaded(rng, tmp_path):
    query = recorded(rng.normal(size=(9, 5)), 3)
    score = scores.get("trust_score").fit(recorded(rng.normal(size=(30, 5)), 3, rng.integers(0, 3, size=30)))
    score.save(tmp_path / "score")
    np.testing.assert_array_equal(scores.load(tmp_path / "score").unreliability(query), score.unreliability(query))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1. Got 0."),
        (
            {"alpha": 1.0},
            "alpha must lie between 0 and 1 (the share of each class left out as outliers; or 0). Got 1.0.",
        ),
        (
            {"alpha": False},
            "alpha must lie between 0 and 1 (the share of each class left out as outliers; or 0). Got False.",
        ),
    ],
)
def test_what_is_refused(parameters, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("trust_score", **parameters)


def test_outputs_of_another_network_are_refused(rng):
    score = scores.get("trust_score").fit(recorded(rng.normal(size=(30, 5)), 3, rng.integers(0, 3, size=30)))
    message = "outputs must have 3 columns, as the training data. Got 4; record both alike."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        score.unreliability(recorded(np.ones((3, 5)), 4))
