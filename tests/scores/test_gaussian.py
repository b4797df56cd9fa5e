"""Gaussians with one covariance, against sums over samples, scikit-learn, and data on which numbers go wrong."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import EmpiricalCovariance

from terrafirma.errors import InvalidInput
from terrafirma.scores.gaussian import fit_tied


def slowly(features, labels, queries, least=1e-6):
    """Distances by the definition: sums over samples, one inverse, one class after the other."""
    features = features.astype(float)
    d = features.shape[1]
    means = {c: sum(features[labels == c]) / (labels == c).sum() for c in set(labels.tolist())}
    covariance = np.zeros((d, d))
    for x, c in zip(features, labels.tolist(), strict=True):
        covariance += np.outer(x - means[c], x - means[c]) / len(features)
    if not covariance.any():
        precision = np.eye(d)
    else:
        values, vectors = np.linalg.eigh(covariance)
        floor = least * np.trace(covariance) / d
        precision = sum(np.outer(v, v) / max(x, floor) for x, v in zip(values, vectors.T, strict=True))
    return np.array([min((q - m) @ precision @ (q - m) for m in means.values()) for q in queries.astype(float)])


def blobs(rng, n=200, d=6, classes=4, apart=3.0):
    labels = rng.integers(0, classes, n)
    mixing = rng.normal(size=(d, d)) + 2 * np.eye(d)
    return apart * rng.normal(size=(classes, d))[labels] + rng.normal(size=(n, d)) @ mixing, labels


@pytest.mark.parametrize("n", [200, 13, 10, 7, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_sums_over_samples(rng, n, dtype):
    features, labels = blobs(rng, n, d=20)
    features, queries = features.astype(dtype), rng.normal(size=(30, 20)).astype(dtype)
    found = fit_tied(features, labels).nearest(queries)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, slowly(features, labels, queries), rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_against_scikit_learn(rng, offset):
    features, labels = blobs(rng, 500, 8)
    means = np.array([features[labels == c].mean(axis=0) for c in range(4)])
    peer = EmpiricalCovariance(assume_centered=True).fit(features - means[labels])
    queries = rng.normal(size=(50, 8)) * 5
    expected = np.min([peer.mahalanobis(queries - mean) for mean in means], axis=0)
    found = fit_tied(features + offset, labels).nearest(queries + offset)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("n", [400, 20])
def test_the_distance_to_a_mean_is_none_however_far_classes_are_apart(rng, n):
    features, labels = blobs(rng, n, 50, apart=1e6)
    gaussian = fit_tied(features, labels)
    means = np.array([features[labels == c].mean(axis=0) for c in set(labels.tolist())])
    step = rng.normal(size=(len(means), 50))
    np.testing.assert_allclose(gaussian.nearest(means), 0.0, atol=1e-9)
    np.testing.assert_allclose(gaussian.nearest(means + step), slowly(features, labels, means + step), rtol=1e-6)


def test_what_never_varied_is_far_and_finite(rng):
    features, labels = blobs(rng, 300, 5)
    features[:, 2] = 7.0
    gaussian = fit_tied(features, labels)
    usual, off = features.copy(), features.copy()
    off[:, 2] += 1.0
    assert gaussian.nearest(off).min() > 1000 * gaussian.nearest(usual).max()
    assert np.isfinite(gaussian.nearest(off)).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (4, 3), (4, 30)])
def test_no_variance_at_all_gives_the_plain_distance(shape):
    gaussian = fit_tied(np.full(shape, 0.1, dtype=np.float32), np.arange(shape[0]) % 2)
    query = np.full((1, shape[1]), 0.1, dtype=np.float32) + 2.0
    np.testing.assert_allclose(gaussian.nearest(query), 4.0 * shape[1], rtol=1e-6)


@pytest.mark.parametrize("n", [6, 60])
def test_classes_of_equal_samples_give_the_plain_distance_to_them(rng, n):
    centres = rng.normal(size=(3, 12)) / 3
    labels = np.arange(n) % 3
    queries = centres[[0, 1, 2]] + [[0.0], [1e-3], [1.0]]
    found = fit_tied(centres[labels], labels).nearest(queries)
    expected = [min(((q - c) ** 2).sum() for c in centres) for q in queries]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-25)


def test_variance_that_is_small_beside_that_of_classes_counts():
    labels = np.arange(4000) % 2
    features = (2.0**37 * labels + 2.0 * (-1.0) ** (np.arange(4000) // 2))[:, None]  # exact, as are its means
    np.testing.assert_allclose(fit_tied(features, labels).nearest(features), 1.0, rtol=1e-9)


@pytest.mark.parametrize("d", [6, 500])
def test_order_and_chunks_change_nothing(rng, d):
    features, labels = blobs(rng, 100, d)
    features = np.concatenate([features, features[:20]])  # some twice
    labels = np.concatenate([labels, labels[:20]])
    order = rng.permutation(len(features))
    queries = rng.normal(size=(40, d))
    one, other = fit_tied(features, labels), fit_tied(features[order], labels[order])
    expected = one.nearest(queries)
    np.testing.assert_allclose(other.nearest(queries), expected, rtol=1e-8)
    np.testing.assert_allclose(np.concatenate([one.nearest(q[None]) for q in queries]), expected, rtol=1e-10)


def test_more_samples_than_a_block_holds(rng):
    features, labels = blobs(rng, 5000, 4)
    queries = rng.normal(size=(20, 4))
    np.testing.assert_allclose(
        fit_tied(features, labels).nearest(queries), slowly(features, labels, queries), rtol=1e-9
    )


def test_names_of_classes_are_free(rng):
    features, labels = blobs(rng)
    queries = rng.normal(size=(20, 6))
    expected = fit_tied(features, labels).nearest(queries)
    np.testing.assert_array_equal(fit_tied(features, 10 * labels + 3).nearest(queries), expected)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 5), st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]))
def test_scale_changes_nothing_and_all_is_finite(n, d, classes, scale):
    rng = np.random.default_rng(n * d)
    features, labels = rng.integers(-2, 3, size=(n, d)).astype(float), rng.integers(0, classes, n)
    queries = 10 * rng.normal(size=(5, d))
    found = fit_tied(features * scale, labels).nearest(queries * scale)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    flat = all(len(np.unique(features[labels == c], axis=0)) == 1 for c in set(labels.tolist()))
    expected = slowly(features, labels, queries)
    np.testing.assert_allclose(found, expected * scale**2 if flat else expected, rtol=1e-6)


def test_squares_beyond_the_largest_float_are_named(rng):
    message = "features must have squares that are finite. Got some beyond 1e150; scale them."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        fit_tied(1e200 * rng.normal(size=(20, 3)), np.zeros(20, dtype=int))
