"""ODIN: tempered outputs, and inputs moved by the gradients that a closed form gives."""

import re

import numpy as np
import pytest

from terrafirma import Recorded, scores
from terrafirma.errors import InvalidInput

torch = pytest.importorskip("torch")


def softmax_rest(logits, temperature):
    """``1 - p_1`` by its definition."""
    p = [np.exp(x / temperature) for x in logits]
    return 1 - max(p) / sum(p)


@pytest.fixture
def linear():
    torch.manual_seed(7)
    return torch.nn.Linear(4, 3).double()


@pytest.fixture
def recorded(rng, linear):
    inputs = rng.normal(size=(60, 4))
    outputs = linear(torch.as_tensor(inputs)).detach().numpy()
    return Recorded(inputs=inputs, outputs=outputs, labels=rng.integers(0, 3, 60))


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_without_a_network_outputs_are_tempered(recorded, temperature):
    score = scores.get("odin", temperature=temperature).fit(recorded)
    expected = [softmax_rest(row, temperature) for row in recorded.outputs]
    np.testing.assert_allclose(score.unreliability(Recorded(outputs=recorded.outputs)), expected, rtol=1e-9)
    assert score.epsilon_ == 0.0


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_inputs_are_moved_towards_the_predicted_class(recorded, linear, temperature):
    score = scores.get("odin", temperature=temperature, epsilon=0.3, model=linear).fit(recorded)
    W, b = (part.detach().numpy() for part in linear.parameters())
    expected = []
    for x, logits in zip(recorded.inputs, recorded.outputs, strict=True):
        p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        slope = (W[logits.argmax()] - sum(p[c] * W[c] for c in range(3))) / temperature  # of log p_1
        expected.append(softmax_rest(W @ (x + 0.3 * np.sign(slope)) + b, temperature))
    found = score.unreliability(recorded)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    plain = scores.get("odin", temperature=temperature).fit(recorded).unreliability(recorded)
    assert (found < plain).all()


def test_what_is_left_open(recorded, linear):
    alone = scores.get("odin").fit(recorded)
    assert alone.settings_ == {"temperature": 1000.0, "epsilon": 0.0}
    assert scores.get("odin", model=linear).fit(recorded).settings_ == {"temperature": 1000.0, "epsilon": 0.0014}
    assert len(alone.open_settings(recorded)) == 4
    assert len(scores.get("odin", model=linear).open_settings(recorded)) == 24
    chosen = scores.get("odin", model=linear).fit(recorded, recorded)
    assert chosen.settings_ in chosen.open_settings(recorded)


def test_saturated_outputs_do_not_tie():
    recorded = Recorded(outputs=np.array([[100.0 + i, 0.0, -3.0] for i in range(300)]))
    for temperature in (1.0, 10.0):
        assert (np.diff(scores.get("odin", temperature=temperature).fit(recorded).unreliability(recorded)) < 0).all()


def test_needs():
    assert scores.get("odin").needs == {"outputs"}
    assert scores.get("odin", model=torch.nn.ReLU()).needs == {"outputs", "inputs", "gradients"}


def test_a_file_holds_all_but_the_network(tmp_path, recorded, linear):
    score = scores.get("odin", epsilon=0.1, model=linear).fit(recorded)
    score.save(tmp_path / "score")
    again = scores.load(tmp_path / "score", model=linear)
    np.testing.assert_array_equal(again.unreliability(recorded), score.unreliability(recorded))
    message = "The score odin must be given the network that it takes gradients of. Load it with model=."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.load(tmp_path / "score")
    with pytest.raises(
        InvalidInput, match=re.escape("for which the score odin needs the torch module. Got epsilon 0.1")
    ):
        scores.get("odin", epsilon=0.1)


@pytest.mark.parametrize("gap", [5.0, 25.0, 60.0, 200.0])
def test_however_sure_a_network_is_inputs_move_to_where_it_is_surer(gap):
    """At T = 1 the probabilities of a sure network have no slope left in single precision; their odds have."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    inputs = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    with torch.no_grad():
        z = net(torch.as_tensor(inputs)).sort(dim=1).values
        net[-1].weight *= gap / float((z[:, -1] - z[:, -2]).median())
        net[-1].bias.zero_()
        outputs = net(torch.as_tensor(inputs)).numpy()
    recorded = Recorded(inputs=inputs, outputs=outputs)
    plain, moved = (
        scores.get("odin", temperature=1.0, epsilon=e, model=net).fit(recorded).unreliability(recorded)
        for e in (0.0, 1e-3)
    )
    assert (moved < plain).mean() > 0.95


def test_chunks_change_nothing(rng, linear):
    inputs = rng.normal(size=(2100, 4))
    recorded = Recorded(inputs=inputs, outputs=linear(torch.as_tensor(inputs)).detach().numpy())
    score = scores.get("odin", temperature=1.0, epsilon=0.1, model=linear).fit(recorded)
    single = [score.unreliability(recorded[i])[0] for i in range(2040, 2060)]
    np.testing.assert_allclose(score.unreliability(recorded)[2040:2060], single, rtol=1e-9)


def test_bad_hyperparameters():
    with pytest.raises(
        InvalidInput, match=re.escape("temperature must be a positive float (logits are divided by it). Got 0.")
    ):
        scores.get("odin", temperature=0)
    message = "epsilon must be a float of at least 0 (how far inputs are moved). Got -1; 0 leaves them."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("odin", epsilon=-1)
    with pytest.raises(InvalidInput, match="model must be a torch.nn.Module, to take gradients of. Got str; "):
        scores.get("odin", model="net")


def test_inputs_that_were_not_recorded(recorded, linear):
    score = scores.get("odin", model=linear).fit(recorded)
    message = "The score odin needs inputs, which were not recorded. Record again with inputs"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        score.unreliability(Recorded(outputs=recorded.outputs))
