import re

import numpy as np
import pytest
from scipy.special import softmax

from terrafirma import Recorded, metrics, scores
from terrafirma.errors import InvalidInput


@pytest.fixture
def recorded(rng):
    outputs = rng.normal(size=(300, 4)) * 2
    labels = (outputs + rng.normal(size=outputs.shape)).argmax(axis=1)
    passes = {p: outputs + rng.normal(size=(10, 300, 4)) * 4 * p for p in (0.25, 0.5, 0.6)}
    return Recorded(outputs=outputs, labels=labels, stochastic=passes)


def naive(passes):
    """Loop over samples and passes."""
    found = []
    for n in range(passes.shape[1]):
        largest = [softmax(passes[i, n]).max() for i in range(len(passes))]
        mean = sum(largest) / len(largest)
        found.append(sum((value - mean) ** 2 for value in largest) / len(largest))
    return found


def test_it_is_the_variance_of_the_largest_probability(recorded):
    found = scores.get("mc_dropout", p=0.25).fit(recorded, recorded).unreliability(recorded)
    assert found == pytest.approx(naive(recorded.stochastic[0.25]), rel=1e-9, abs=1e-15)


def test_p_is_chosen_by_the_errors_of_the_network(recorded):
    score = scores.get("mc_dropout").fit(recorded, recorded)
    quality = {p: metrics.aucea(naive(recorded.stochastic[p]), recorded.errors) for p in recorded.stochastic}
    assert score.p_ == max(quality, key=quality.get)
    assert score.settings_ == {"p": score.p_}


def test_as_published_p_is_chosen_by_the_errors_of_a_pass(rng):
    """Passes at 0.25 are right just where they agree, so that they look best by their own errors."""
    outputs = np.eye(2)[rng.integers(2, size=400)] * 2
    labels = np.where(rng.random(400) < 0.5, outputs.argmax(axis=1), 1 - outputs.argmax(axis=1))
    shaky = (rng.random(400) < 0.5)[None, :, None] * rng.normal(size=(10, 400, 2)) * 5
    own = np.where(np.abs(shaky[0]).sum(axis=1) > 0, 1 - labels, labels)
    shaky = shaky + 3 * np.eye(2)[own] - 2.9 * np.eye(2)[own] * (np.abs(shaky[0]).sum(axis=1) > 0)[:, None]
    good = outputs + rng.normal(size=(10, 400, 2)) * (outputs.argmax(axis=1) != labels)[:, None]
    recorded = Recorded(outputs=outputs, labels=labels, stochastic={0.25: shaky, 0.5: good})
    assert scores.get("mc_dropout").fit(recorded, recorded).p_ == 0.5
    assert scores.get("mc_dropout", variant="published").fit(recorded, recorded).p_ == 0.25


def test_as_published_saturated_passes_tie():
    """In single precision all of them are sure; they are not equally sure."""
    passes = np.stack([np.stack([np.full(5, gap), np.zeros(5)], axis=1) for gap in (150.0, 300.0)])
    recorded = Recorded(stochastic={0.5: passes})
    assert (scores.get("mc_dropout").fit(recorded).unreliability(recorded) > 0).all()
    assert (scores.get("mc_dropout", variant="published").fit(recorded).unreliability(recorded) == 0).all()


def test_training_data_needs_no_passes(recorded):
    train = Recorded(outputs=recorded.outputs, labels=recorded.labels)
    assert scores.get("mc_dropout").fit(train, recorded).p_ in recorded.stochastic
    assert scores.get("mc_dropout").fit(train).p_ == 0.5


def test_a_p_that_was_not_recorded_is_named(recorded):
    message = (
        "p must be a dropout probability that was recorded (0.25, 0.5, 0.6). Got 0.9; record again with dropout=(0.9,)."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("mc_dropout", p=0.9).fit(recorded).unreliability(recorded)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("mc_dropout", p=0.9).fit(recorded, recorded)


def test_one_pass_is_too_few(recorded):
    one = Recorded(stochastic={0.5: recorded.stochastic[0.5][:1]})
    message = "stochastic[0.5] must have shape (passes, n, classes), of at least two passes. Got (1, 300, 4)."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("mc_dropout").fit(recorded).unreliability(one)


def test_without_passes_the_field_is_named(recorded):
    with pytest.raises(InvalidInput, match="The score mc_dropout needs stochastic, which were not recorded"):
        scores.get("mc_dropout").fit(recorded).unreliability(Recorded(outputs=recorded.outputs))
