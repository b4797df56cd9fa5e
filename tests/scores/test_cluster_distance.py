import math
import re

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput


def naive(features, centres):
    """The definition, by loops; what has no length has cosine 0, and among centres is none."""
    found = []
    for x in features.tolist():
        length, largest = math.sqrt(sum(a * a for a in x)), -1.0
        for c in centres.tolist():
            product = sum(a * b for a, b in zip(x, c, strict=True))
            own = math.sqrt(sum(b * b for b in c))
            if own > 0 and length > 0:
                largest = max(largest, product / own / length)
        found.append(-largest * length)
    return np.array(found)


def recorded(features, errors=None):
    return Recorded(features=features, errors=errors)


@pytest.mark.parametrize("N", [1, 40])
def test_all_samples_against_loops(rng, N):
    train, query = rng.normal(size=(N, 6)), rng.normal(size=(15, 6))
    query[3] = 0
    found = scores.get("cluster_distance", clusters="all").fit(recorded(train)).unreliability(recorded(query))
    np.testing.assert_allclose(found, naive(query, train), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_scikit_learn(rng, dtype):
    train, query = rng.gamma(1, size=(200, 30)).astype(dtype), 1e3 * rng.gamma(1, size=(50, 30)).astype(dtype)
    found = scores.get("cluster_distance", variant="published").fit(recorded(train)).unreliability(recorded(query))
    query = query.astype(np.float64)
    expected = -cosine_similarity(query, train.astype(np.float64)).max(axis=1) * np.linalg.norm(query, axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_clusters_are_found(rng):
    """Three bundles of directions, of very different lengths."""
    axes = np.eye(5)[:3]
    train = np.repeat(axes, 50, axis=0) * rng.gamma(1, size=(150, 1)) * 100 + 1e-6 * rng.normal(size=(150, 5))
    score = scores.get("cluster_distance", clusters=3).fit(recorded(train))
    np.testing.assert_allclose(np.abs(score.centres_["rows"] @ axes.T).max(axis=1), 1, atol=1e-4)
    query = rng.normal(size=(20, 5))
    np.testing.assert_allclose(score.unreliability(recorded(query)), naive(query, axes), atol=1e-3)
    again = scores.get("cluster_distance", clusters=3).fit(recorded(train))
    np.testing.assert_allclose(again.unreliability(recorded(query)), score.unreliability(recorded(query)), rtol=1e-9)


def test_longer_is_more_reliable_as_the_paper_has_it(rng):
    train = 1 + 0.1 * rng.normal(size=(50, 4))
    score = scores.get("cluster_distance", clusters="all").fit(recorded(train))
    here, further, aside = score.unreliability(recorded(np.array([[1.0] * 4, [100.0] * 4, [1.0, -1.0, 1.0, -1.0]])))
    assert further < here < aside


@pytest.mark.parametrize("clusters", ["all", 2, 10, 100])
def test_edges_are_finite(rng, clusters):
    def fitted(train):
        query = recorded(np.concatenate([rng.normal(size=(3, train.shape[1])), np.zeros((1, train.shape[1]))]))
        return scores.get("cluster_distance", clusters=clusters).fit(recorded(train)).unreliability(query)

    assert fitted(np.zeros((5, 3))).tolist() == [0.0] * 4
    for train in (np.ones((20, 3)), np.ones((1, 3)), np.array([[1.0, 0], [-1, 0]]), 1e6 + np.zeros((9, 3), np.float32)):
        assert np.isfinite(fitted(train)).all()


def test_opposite_directions_cancel(rng):
    score = scores.get("cluster_distance", clusters=1).fit(recorded(np.array([[1.0, 0.0], [-1.0, 0.0]])))
    assert score.unreliability(recorded(rng.normal(size=(3, 2)))).tolist() == [0.0] * 3


def test_grid_and_variant(rng):
    train, validation = recorded(rng.normal(size=(120, 5))), recorded(rng.normal(size=(40, 5)), rng.random(40))
    tried = [trial.settings_ for trial, _ in scores.get("cluster_distance").trials(train, validation)]
    assert tried == [{"clusters": "all"}, {"clusters": 10}, {"clusters": 100}]
    assert scores.get("cluster_distance").fit(train).settings_ == {"clusters": "all"}
    published = scores.get("cluster_distance", variant="published")
    assert [trial.settings_ for trial, _ in published.trials(train, validation)] == [{"clusters": "all"}]


@pytest.mark.parametrize("clusters", ["all", 4])
def test_saved_and_loaded(rng, tmp_path, clusters):
    query = recorded(rng.normal(size=(9, 5)))
    score = scores.get("cluster_distance", clusters=clusters).fit(recorded(rng.normal(size=(30, 5))))
    score.save(tmp_path / "score")
    np.testing.assert_array_equal(scores.load(tmp_path / "score").unreliability(query), score.unreliability(query))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clusters": 0}, "clusters must be an integer of at least 1. Got 0."),
        ({"clusters": "some"}, "clusters must be 'all' or an integer of at least 1. Got 'some'."),
        (
            {"clusters": 10, "variant": "published"},
            "clusters must be 'all' in the variant 'published'. Got 10; leave it out.",
        ),
    ],
)
def test_what_is_refused(parameters, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("cluster_distance", **parameters)
