import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Source
from terrafirma.scores.ensembles import joint
from terrafirma.scores.subfunction_search import Subfunction

NAMES = ("ensemble_variance", "ensemble_max_response", "ensemble_subfunction")


@pytest.fixture
def networks(rng):
    """Three networks on the same 200 samples."""
    truth, labels = rng.normal(size=(200, 4)) * 2, rng.integers(4, size=200)
    return [
        Recorded(outputs=truth + rng.normal(size=truth.shape), labels=labels, patterns=rng.random((200, 24)) < 0.3)
        for _ in range(3)
    ]


def test_variance_by_loops(networks):
    found = scores.get("ensemble_variance").fit(networks).unreliability(networks)
    for n in range(200):
        rows = [softmax(one.outputs[n]) for one in networks]
        variance = sum(np.var([row[c] for row in rows]) for c in range(4))
        assert found[n] == pytest.approx(variance, rel=1e-9)


def test_max_response_by_loops(networks):
    found = scores.get("ensemble_max_response").fit(networks).unreliability(networks)
    expected = [1 - np.mean([softmax(one.outputs[n]) for one in networks], axis=0).max() for n in range(200)]
    assert found == pytest.approx(expected, rel=1e-9)


def test_mean_of_the_log_bounds(networks):
    found = scores.get("ensemble_subfunction").fit(networks, networks).unreliability(networks)
    bounds = [Subfunction().fit(one, one).unreliability(one) for one in networks]
    assert found == pytest.approx(np.mean(bounds, axis=0), rel=1e-12)


def test_networks_that_contradict_each_other_surely_are_not_trusted():
    agree, contradict = np.array([9.0, 0.0]), np.array([0.0, 9.0])
    first, second = Recorded(outputs=np.stack([agree, agree])), Recorded(outputs=np.stack([agree, contradict]))
    for name in ("ensemble_variance", "ensemble_max_response"):
        u = scores.get(name).fit([first, second]).unreliability([first, second])
        assert u[1] > 0.1 > u[0]


def test_the_joint_network_predicts_by_mean_probability(networks):
    mean = np.mean([softmax(one.outputs, axis=1) for one in networks], axis=0)
    assert np.array_equal(joint(networks).errors, mean.argmax(axis=1) != networks[0].labels)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(networks, name, tmp_path):
    score = scores.get(name).fit(networks, networks)
    score.save(tmp_path / "score")
    assert np.array_equal(scores.load(tmp_path / "score").unreliability(networks), score.unreliability(networks))


def test_networks_of_other_classes_are_no_ensemble(networks):
    other = [networks[0], replace(networks[1], outputs=networks[1].outputs[:, :3])]
    message = "outputs of the networks must have one shape. Got (200, 3), (200, 4); an ensemble shares its classes."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("ensemble_max_response").fit(other).unreliability(other)


def test_rho_and_delta_are_kept_where_they_are_given(networks):
    score = scores.get("ensemble_subfunction", rho=3.0, delta=0.1).fit(networks)
    assert [(one.bound_.rho, one.bound_.delta) for one in score.scores_] == [(3.0, 0.1)] * 3


@pytest.mark.parametrize("name", NAMES)
def test_one_network_is_no_ensemble(networks, name):
    for given, got in ((networks[0], "Recorded"), (networks[:1], "1 of them")):
        message = (
            f"train must be a list of recordings, one for each of several networks. Got {got}; "
            "for one network choose another score."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            scores.get(name).fit(given)


def test_networks_must_be_those_of_fit_on_the_same_samples(networks):
    score = scores.get("ensemble_variance").fit(networks)
    with pytest.raises(InvalidInput, match=re.escape("recorded must be of the 3 networks of fit. Got 2.")):
        score.unreliability(networks[:2])
    message = (
        "recorded must be recordings of the same samples, in the same order. Got 200, 200, 199 samples of different data; "
        "record each network on the same."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        score.unreliability([*networks[:2], networks[2][1:]])
    elsewhere = [replace(one, source=Source("net", "a", str(i))) for i, one in enumerate(networks)]
    with pytest.raises(InvalidInput, match="recorded must be recordings of the same samples, in the same order"):
        score.unreliability(elsewhere)
    message = "validation must have a recording for each of the 3 networks. Got 2."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("ensemble_subfunction").fit(networks, networks[:2])
