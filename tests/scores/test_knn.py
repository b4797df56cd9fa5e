import math
import re

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput
from terrafirma.scores import knn


def naive(features, train, k):
    def unit(row):
        length = math.sqrt(sum(x * x for x in row))
        return [x / length for x in row] if length else row

    directions = [unit(t) for t in train.tolist()]
    found = []
    for q in features.tolist():
        distances = sorted(math.dist(unit(q), t) for t in directions)
        found.append(distances[min(k, len(distances)) - 1])
    return np.array(found)


def recorded(features, errors=None):
    return Recorded(features=features, errors=errors)


@pytest.mark.parametrize(("k", "N"), [(1, 30), (7, 30), (50, 30), (3, 1)])
def test_against_loops(rng, k, N):
    train, query = rng.normal(size=(N, 6)), rng.normal(size=(12, 6))
    query[4] = 0
    found = scores.get("knn", k=k).fit(recorded(train)).unreliability(recorded(query))
    np.testing.assert_allclose(found, naive(query, train, k), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_scikit_learn(rng, dtype):
    train, query = rng.gamma(1, size=(300, 40)).astype(dtype), rng.gamma(1, size=(50, 40)).astype(dtype)
    found = scores.get("knn", k=10).fit(recorded(train)).unreliability(recorded(query))
    units = [x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (train, query)]
    expected = NearestNeighbors(n_neighbors=10).fit(units[0]).kneighbors(units[1])[0][:, -1]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_search_for_k_is_one_search(rng, monkeypatch):
    train, validation = recorded(rng.normal(size=(60, 5))), recorded(rng.normal(size=(40, 5)), rng.random(40))
    asked = []
    own = knn.nearest
    monkeypatch.setattr(knn, "nearest", lambda q, p, k: asked.append(k) or own(q, p, k))
    score = scores.get("knn")
    trials = list(score.trials(train, validation))
    assert asked == [60]
    assert [trial.k_ for trial, _ in trials] == [50, 1, 5, 10, 20, 100, 200]
    for trial, unreliability in trials:
        np.testing.assert_array_equal(unreliability, trial.unreliability(validation))


def test_chosen_by_validation_errors(rng):
    """Errors that the nearest neighbour alone tells: a twin in the training data means right."""
    train = rng.normal(size=(300, 20))
    validation = np.concatenate([train[:50], rng.normal(size=(50, 20))])
    score = scores.get("knn").fit(recorded(train), recorded(validation, np.repeat([0.0, 1.0], 50)))
    assert score.settings_ == {"k": 1}
    assert scores.get("knn").fit(recorded(train)).settings_ == {"k": 50}
    assert scores.get("knn", k=3).fit(recorded(train), recorded(validation)).settings_ == {"k": 3}


def test_far_directions_and_zeros(rng):
    train = 1 + 0.1 * rng.normal(size=(200, 8))
    score = scores.get("knn", k=5).fit(recorded(train))
    near, far, zero = (
        score.unreliability(recorded(x))[0] for x in (np.ones((1, 8)), -np.ones((1, 8)), np.zeros((1, 8)))
    )
    assert near < zero < far
    assert zero == pytest.approx(1, rel=1e-12)
    dead = scores.get("knn", k=5).fit(recorded(np.zeros((10, 8))))
    assert dead.unreliability(recorded(np.stack([np.zeros(8), np.ones(8)]))) == pytest.approx([0, 1])


@pytest.mark.jit
def test_twins_are_at_zero_whatever_the_chunk(rng):
    train = rng.normal(size=(3000, 4)).astype(np.float32)
    score = scores.get("knn", k=1).fit(recorded(train))
    assert (score.unreliability(recorded(train)) == 0).all()
    queries = rng.normal(size=(2100, 4)).astype(np.float32)
    one_by_one = [score.unreliability(recorded(queries[i : i + 1]))[0] for i in (0, 2047, 2048, 2099)]
    assert score.unreliability(recorded(queries))[[0, 2047, 2048, 2099]].tolist() == one_by_one


def test_saved_and_loaded(rng, tmp_path):
    query = recorded(rng.normal(size=(9, 5)))
    score = scores.get("knn").fit(recorded(rng.normal(size=(30, 5)).astype(np.float32)))
    score.save(tmp_path / "knn")
    np.testing.assert_array_equal(scores.load(tmp_path / "knn").unreliability(query), score.unreliability(query))


def test_what_is_refused(rng):
    with pytest.raises(InvalidInput, match=re.escape("k must be an integer of at least 1. Got 0.")):
        scores.get("knn", k=0)
    score = scores.get("knn").fit(recorded(rng.normal(size=(30, 5))))
    message = "features must have 5 columns, as the training data. Got 4; record both alike."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        score.unreliability(recorded(np.ones((3, 4))))
