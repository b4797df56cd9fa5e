"""Mahalanobis distance and its relative form, through the protocol of scores, against scikit-learn."""

import numpy as np
import pytest
from sklearn.covariance import EmpiricalCovariance

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput
from tests.scores.test_gaussian import blobs

BOTH = ["mahalanobis", "relative_mahalanobis"]


@pytest.fixture
def train(rng):
    features, labels = blobs(rng, 300, 6)
    return Recorded(features=features, labels=np.where(labels == 2, 7, labels))  # classes 2, 4, 5 and 6 are absent


def nearest(features, labels, queries):
    means = {c: features[labels == c].mean(axis=0) for c in np.unique(labels)}
    centred = np.concatenate([features[labels == c] - mean for c, mean in means.items()])
    peer = EmpiricalCovariance(assume_centered=True).fit(centred)
    return np.min([peer.mahalanobis(queries - mean) for mean in means.values()], axis=0)


def test_mahalanobis_is_that_of_scikit_learn(rng, train):
    queries = rng.normal(size=(40, 6))
    found = scores.get("mahalanobis").fit(train).unreliability(Recorded(features=queries))
    np.testing.assert_allclose(found, nearest(train.features, train.labels, queries), rtol=1e-6)


def test_relative_mahalanobis_takes_off_the_distance_to_everything(rng, train):
    queries = rng.normal(size=(40, 6))
    found = scores.get("relative_mahalanobis").fit(train).unreliability(Recorded(features=queries))
    expected = nearest(train.features, train.labels, queries) - nearest(train.features, 0 * train.labels, queries)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_is_less_reliable(rng, train, name, dtype):
    train = Recorded(features=train.features.astype(dtype), labels=train.labels)
    score = scores.get(name).fit(train)
    usual = score.unreliability(train)
    far = score.unreliability(Recorded(features=(1000 * rng.normal(size=(30, 6))).astype(dtype)))
    assert far.min() > usual.max()


@pytest.mark.parametrize("name", BOTH)
def test_a_file_holds_all(tmp_path, train, name):
    score = scores.get(name).fit(train)
    score.save(tmp_path / "score")
    np.testing.assert_array_equal(scores.load(tmp_path / "score").unreliability(train), score.unreliability(train))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_few_samples_of_many_features(rng, name, n):
    train = Recorded(features=rng.normal(size=(n, 40)), labels=np.arange(n) % 3)
    found = scores.get(name).fit(train).unreliability(Recorded(features=rng.normal(size=(5, 40))))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", BOTH)
def test_other_features_are_named(train, name):
    score = scores.get(name).fit(train)
    with pytest.raises(
        InvalidInput, match="^features must have 6 columns, as the training data. Got 5; record both alike.$"
    ):
        score.unreliability(Recorded(features=np.zeros((2, 5))))


def test_several_chunks_are_one(rng, train):
    queries = rng.normal(size=(5000, 6))
    score = scores.get("mahalanobis").fit(train)
    whole = score.unreliability(Recorded(features=queries))
    single = np.concatenate([score.unreliability(Recorded(features=queries[i : i + 1])) for i in range(2040, 2060)])
    np.testing.assert_allclose(whole[2040:2060], single, rtol=1e-10)
