"""Scores of logits: against loops in plain Python, where the softmax saturates, and with ReAct."""

import math
import re

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.metrics import log_loss

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput


def probabilities(row):
    largest = max(row)
    exponentials = [math.exp(value - largest) for value in row]
    return sorted((value / sum(exponentials) for value in exponentials), reverse=True)


NAIVE = {
    "max_response": lambda row: 1 - probabilities(row)[0],
    "entropy": lambda row: -sum(p * math.log(p) for p in probabilities(row)),
    "margin": lambda row: 1 - (probabilities(row)[0] - probabilities(row)[1]),
    "energy": lambda row: -math.log(sum(math.exp(value) for value in row)),
    "max_logit": lambda row: -max(row),
    "gen": lambda row: sum((p * (1 - p)) ** 0.1 for p in probabilities(row)[:100]),
}


@pytest.fixture
def recorded(rng):
    """A linear head over features, 120 classes, so that GEN has some to leave out."""
    features = np.abs(rng.normal(size=(200, 30))) * (rng.random((200, 30)) < 0.6)
    W, b = rng.normal(size=(120, 30)), rng.normal(size=120)
    outputs = features @ W.T + b
    labels = (outputs + 4 * rng.normal(size=outputs.shape)).argmax(axis=1)
    return Recorded(outputs=outputs, features=features, labels=labels, head=(W, b))


@pytest.mark.parametrize("name", NAIVE)
def test_values_are_those_of_plain_loops(recorded, name):
    found = scores.get(name).fit(recorded).unreliability(recorded)
    assert found == pytest.approx([NAIVE[name](row) for row in recorded.outputs], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["max_response", "entropy", "margin", "gen"])
def test_saturated_softmaxes_do_not_tie(name):
    gaps = np.arange(1, 700, 7.0)
    u = scores.get(name).fit(logits(gaps)).unreliability(logits(gaps))
    assert (np.diff(u) < 0).all()


@pytest.mark.parametrize("name", ["max_response", "entropy", "margin"])
def test_as_published_they_do(name):
    gaps = np.arange(110, 700, 7.0)
    u = scores.get(name, variant="published").fit(logits(gaps)).unreliability(logits(gaps))
    assert len(np.unique(u)) == 1


@pytest.mark.parametrize("name", ["max_response", "entropy", "margin"])
def test_published_values_differ_by_single_precision_alone(recorded, name):
    shift = {"margin": 1.0}.get(name, 0.0)  # published: p2 - p1
    right, published = (scores.get(name, variant=v).fit(recorded).unreliability(recorded) for v in (None, "published"))
    assert published + shift == pytest.approx(right, abs=1e-5)
    assert published.dtype == np.float64


def logits(gaps):
    return Recorded(outputs=np.stack([gaps, np.zeros(len(gaps)), -gaps / 2], axis=1))


@pytest.mark.parametrize("name", ["max_response", "entropy", "margin", "energy", "max_logit", "gen", "temperature"])
def test_react_clips_the_features_before_the_head(recorded, name):
    W, b = recorded.head
    clip = np.quantile(recorded.features, 0.9)
    clipped = Recorded(outputs=np.minimum(recorded.features, clip) @ W.T + b, labels=recorded.labels)
    found = scores.get(name, react=0.9).fit(recorded, recorded).unreliability(recorded)
    assert found == pytest.approx(scores.get(name).fit(clipped, clipped).unreliability(clipped), rel=1e-9)


def test_react_finds_a_head_that_was_not_recorded(recorded):
    alone = Recorded(outputs=recorded.outputs, features=recorded.features, labels=recorded.labels)
    found = [scores.get("energy", react=0.9).fit(one).unreliability(one) for one in (recorded, alone)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_react_needs_the_features_of_the_last_layer(recorded, rng):
    other = Recorded(outputs=recorded.outputs, features=rng.normal(size=(200, 30)))
    message = (
        "The score energy needs the features that the last linear layer maps to the outputs. Got others, or too few samples to "
        "find that layer; record with features=True the last layer before the outputs."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("energy", react=0.9).fit(other)
    with pytest.raises(InvalidInput, match=re.escape("The score energy needs features, which were not recorded.")):
        scores.get("energy", react=0.9).fit(Recorded(outputs=recorded.outputs))


def test_too_few_samples_do_not_tell_a_head(recorded, rng):
    """With as many features as samples anything fits; others must fit, too."""
    few = Recorded(outputs=recorded.outputs[:40], features=recorded.features[:40])
    with pytest.raises(InvalidInput, match="or too few samples to find that layer"):
        scores.get("energy", react=0.9).fit(few)
    known = Recorded(outputs=few.outputs, features=few.features, head=recorded.head)
    assert np.isfinite(scores.get("energy", react=0.9).fit(known).unreliability(known)).all()


def test_units_that_never_vary_get_no_weight(recorded):
    dead = np.hstack([recorded.features, np.zeros((200, 3))])
    found = scores.get("energy", react=0.9).fit(Recorded(outputs=recorded.outputs, features=dead))
    assert found.head_weights_[:, :-3] == pytest.approx(recorded.head[0], rel=1e-5, abs=1e-6)
    assert np.abs(found.head_weights_[:, -3:]).max() < 1e-12


def test_a_recorded_head_that_does_not_fit_is_refused(recorded):
    W, b = recorded.head
    wrong = Recorded(outputs=recorded.outputs, features=recorded.features, head=(W[:, :-1], b))
    with pytest.raises(InvalidInput, match="needs the features that the last linear layer maps to the outputs"):
        scores.get("energy", react=0.9).fit(wrong)


def test_the_temperature_is_the_most_likely_one(recorded):
    """Against a general optimiser on scikit-learn's log loss."""
    score = scores.get("temperature").fit(recorded, recorded)

    def loss(log_t):
        return log_loss(recorded.labels, softmax(recorded.outputs / np.exp(log_t), axis=1), labels=np.arange(120))

    assert score.temperature_ == pytest.approx(np.exp(minimize(loss, [0.0]).x[0]), rel=1e-3)
    assert score.temperature_ > 1.5
    expected = 1 - softmax(recorded.outputs / score.temperature_, axis=1).max(axis=1)
    assert score.unreliability(recorded) == pytest.approx(expected, abs=1e-12)


def test_without_validation_the_temperature_is_one(recorded):
    assert scores.get("temperature").fit(recorded).temperature_ == 1.0


def test_where_all_are_right_no_temperature_is_low_enough(recorded):
    right = Recorded(outputs=recorded.outputs, labels=recorded.predictions)
    assert scores.get("temperature").fit(recorded, right).temperature_ == 1.0


def test_labels_that_the_network_has_no_output_for_do_not_count(recorded):
    strange = np.where(np.arange(200) < 20, 500, recorded.labels)
    known = recorded[np.arange(20, 200)]
    more = Recorded(outputs=recorded.outputs, labels=strange, errors=np.zeros(200))
    found = [scores.get("temperature").fit(recorded, one).temperature_ for one in (known, more)]
    assert found[0] == found[1]


def test_energy_at_a_temperature(recorded):
    found = scores.get("energy", temperature=5.0).fit(recorded).unreliability(recorded)
    assert found == pytest.approx([-5 * math.log(sum(math.exp(v / 5) for v in row)) for row in recorded.outputs])


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("energy", {"temperature": 0.0}, "temperature must be a positive float (logits are divided by it). Got 0.0."),
        ("gen", {"gamma": 1.5}, "gamma must lie between 0 and 1 (the power; 0.1 in its paper). Got 1.5."),
        ("gen", {"top": 0}, "top must be an integer of at least 1. Got 0."),
        (
            "max_logit",
            {"react": 90},
            (
                "react must lie between 0 and 1 (the share of activations that ReAct leaves as they are; 0.9 in its paper). "
                "Got 90."
            ),
        ),
        (
            "margin",
            {"variant": "best"},
            "variant must be None (done right) or 'published' (as in the paper's numbers). Got 'best'.",
        ),
    ],
)
def test_hyperparameters_are_checked_at_once(name, parameters, message):
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get(name, **parameters)


def test_probabilities_are_not_taken_for_logits_without_a_word(recorded):
    probabilities = Recorded(outputs=softmax(recorded.outputs, axis=1))
    message = (
        "Outputs look like probabilities, and the score energy takes logits. Record the network without its softmax, or hand "
        "in np.log(outputs)."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        scores.get("energy").fit(probabilities)
    logs = Recorded(outputs=np.log(probabilities.outputs))
    assert scores.get("energy").fit(logs).unreliability(logs) == pytest.approx(np.zeros(200), abs=1e-12)


def test_outputs_that_are_no_numbers_are_refused():
    outputs = np.array([[0.0, 1.0], [np.inf, 0.0]])
    message = "logits must be finite. Got NaN or infinity in row 1; look for an overflow in the network."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("entropy").fit(Recorded(outputs=outputs)).unreliability(Recorded(outputs=outputs))


def test_outputs_of_one_column_are_refused():
    with pytest.raises(
        InvalidInput, match=re.escape("logits must be numbers of shape (n, classes), at least two classes.")
    ):
        scores.get("entropy").fit(Recorded(outputs=np.ones((3, 1)))).unreliability(Recorded(outputs=np.ones((3, 1))))
