"""Virtual logits, step by step as the paper has them, and data on which a step has nothing to hold on to."""

import re

import numpy as np
import pytest
from sklearn.covariance import EmpiricalCovariance

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput


def network(rng, n=400, d=12, classes=3, rank=None):
    """Features in the main along a few directions, and a head."""
    rank = rank or d
    W, b = rng.normal(size=(classes, d)), rng.normal(size=classes)
    axes = np.linalg.qr(rng.normal(size=(d, d)))[0][:, :rank]

    def draw(n, extra=0.0):
        features = (rng.normal(size=(n, rank)) * 0.8 ** np.arange(rank)) @ axes.T + 1.0 + extra
        return Recorded(features=features, outputs=features @ W.T + b, head=(W, b))

    return draw(n), draw


def slowly(train, queries, dim):
    W, b = train.head
    origin = -np.linalg.lstsq(W, b, rcond=None)[0]
    peer = EmpiricalCovariance(assume_centered=True).fit(train.features - origin)
    values, vectors = np.linalg.eig(peer.covariance_)
    outside = vectors[:, np.argsort(values)[::-1][dim:]]
    residuals = [np.linalg.norm([np.dot(x - origin, v) for v in outside.T]) for x in train.features]
    alpha = sum(max(row) for row in train.outputs) / sum(residuals)
    return [
        alpha * np.linalg.norm([np.dot(x - origin, v) for v in outside.T]) - np.log(sum(np.exp(logits)))
        for x, logits in zip(queries.features, queries.outputs, strict=True)
    ]


@pytest.mark.parametrize("dim", [None, 1, 4, 11])
@pytest.mark.parametrize("has_head", [True, False])
def test_against_the_steps_of_the_paper(rng, dim, has_head):
    train, draw = network(rng)
    queries = draw(20)
    known = train if has_head else Recorded(features=train.features, outputs=train.outputs)
    found = scores.get("vim", dim=dim).fit(known).unreliability(queries)
    np.testing.assert_allclose(found, slowly(train, queries, dim or 6), rtol=1e-6)


@pytest.mark.parametrize("units", [1, 2, 3, 767, 768, 2047, 2048])
def test_the_dimension_by_default(units):
    expected = {1: 0, 2: 1, 3: 1, 767: 383, 768: 512, 2047: 512, 2048: 1000}
    assert scores.get("vim")._dim(units) == expected[units]


def test_float32_is_as_good(rng):
    train, draw = network(rng)
    queries = draw(20)
    narrow = Recorded(features=train.features.astype(np.float32), outputs=train.outputs.astype(np.float32))
    exact = scores.get("vim").fit(train).unreliability(queries)
    np.testing.assert_allclose(scores.get("vim").fit(narrow).unreliability(queries), exact, rtol=1e-3, atol=1e-3)


def test_outside_the_subspace_is_less_reliable(rng):
    train, draw = network(rng, rank=5)
    score = scores.get("vim").fit(train)
    usual = score.unreliability(draw(50))
    features = train.features[:50] + 3 * rng.normal(size=(50, 12))
    W, b = train.head
    assert score.unreliability(Recorded(features=features, outputs=features @ W.T + b)).min() > usual.max()


def test_what_never_varied_is_outside_whatever_the_order(rng):
    train, draw = network(rng, n=5, d=12)  # 5 samples, of a subspace of 6
    queries = draw(20)
    order = rng.permutation(5)
    one, other = (scores.get("vim").fit(data).unreliability(queries) for data in (train, train[order]))
    np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e6])
def test_constant_features(rng, n, value):
    W, b = rng.normal(size=(3, 4)), np.zeros(3)
    features = np.full((n, 4), value)
    train = Recorded(features=features, outputs=features @ W.T + b, head=(W, b))
    found = scores.get("vim").fit(train).unreliability(Recorded(features=features + 1, outputs=(features + 1) @ W.T))
    assert np.isfinite(found).all()


def test_log_probabilities_are_logits_as_well(rng):
    train, _ = network(rng, rank=5)

    def shifted(recorded):
        return Recorded(
            features=recorded.features, outputs=recorded.outputs - 100, head=(train.head[0], train.head[1] - 100)
        )

    score = scores.get("vim").fit(shifted(train))
    assert score.alpha_ > 0


def test_a_file_holds_all_and_chunks_change_nothing(rng, tmp_path):
    train, draw = network(rng)
    queries = draw(2100)
    score = scores.get("vim", dim=3).fit(train)
    score.save(tmp_path / "score")
    found = score.unreliability(queries)
    np.testing.assert_array_equal(scores.load(tmp_path / "score").unreliability(queries), found)
    single = [score.unreliability(queries[i])[0] for i in range(2040, 2060)]
    np.testing.assert_allclose(found[2040:2060], single, rtol=1e-9)


@pytest.mark.parametrize("dim", [0, 1.5, True])
def test_a_bad_dimension_is_named(dim):
    with pytest.raises(InvalidInput, match=re.escape(f"dim must be an integer of at least 1. Got {dim}.")):
        scores.get("vim", dim=dim)


def test_a_dimension_that_leaves_nothing_is_named(rng):
    message = "dim must be less than the 12 units of the features. Got 12; a residual needs some left."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("vim", dim=12).fit(network(rng)[0])
