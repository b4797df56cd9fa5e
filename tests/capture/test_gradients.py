"""Moved inputs, against finite differences; and nothing of it stays in the module."""

import re
import threading
import time

import numpy as np
import pytest

from terrafirma.capture.gradients import BATCH, check_layers, check_nudge, nudge, nudges
from terrafirma.capture.record import record
from terrafirma.errors import InvalidInput

torch = pytest.importorskip("torch")
nn = torch.nn


@pytest.fixture
def net():
    torch.manual_seed(7)
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3)]
    module = nn.Sequential(*parts).double()
    module[1].running_mean += 0.1
    return module


@pytest.fixture
def images(rng):
    return rng.normal(size=(5, 1, 4, 4))


def spread(outputs, features):
    return outputs.square().sum(1)


def value(module, x):
    """The objective of one image, in evaluation mode."""
    with torch.no_grad():
        return float(spread(module.eval()(torch.as_tensor(x)[None]), {})[0])


def slope(module, x, h=1e-6):
    """Its gradient, by differences."""
    found = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[at] = h
        found[at] = (value(module, x + step) - value(module, x - step)) / (2 * h)
    return found


def inputs_of(net, images, objective, epsilon, *arguments, **more):
    """The moved inputs: what goes into the network when gradients are off."""
    seen = []

    def look(_, args):
        if not torch.is_grad_enabled():
            seen.append(args[0].clone())

    with net.register_forward_pre_hook(look):
        nudge(net, images, objective, epsilon, *arguments, **more)
    return torch.cat(seen).numpy()


def test_each_input_goes_down_its_own_slope(net, images):
    signed, raw = (inputs_of(net, images, spread, 0.01, raw=raw) for raw in (False, True))
    for x, by_sign, by_gradient in zip(images, signed, raw, strict=True):
        expected = slope(net, x)
        np.testing.assert_allclose(by_gradient, x - 0.01 * expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(by_sign, x - 0.01 * np.sign(expected), rtol=1e-12)


def test_outputs_and_features_are_those_of_the_moved_inputs(net, images):
    found = nudge(net, images, spread, 0.01, {"0": 4, "2": 16})
    inputs = inputs_of(net, images, spread, 0.01)
    net.eval()
    with torch.no_grad():
        moved = torch.as_tensor(inputs)
        np.testing.assert_allclose(found.outputs, net(moved.clone()).numpy(), rtol=1e-12)
        np.testing.assert_allclose(found.features["0"], net[0](moved).mean((2, 3)).numpy(), rtol=1e-12)  # averaged
        np.testing.assert_allclose(found.features["2"], net[:3](moved).flatten(1).numpy(), rtol=1e-12)  # flattened


def test_an_objective_of_a_layer(net, images):
    found = inputs_of(net, images, lambda _, features: features["0"][:, 1], 1.0, {"0": 4}, raw=True)
    kernel = net[0].weight.detach().numpy()[1, 0]
    expected = np.zeros((4, 4))
    for i, j in np.ndindex(2, 2):
        expected[i : i + 3, j : j + 3] += kernel / 4
    np.testing.assert_allclose(found, images - expected, rtol=1e-12)


def test_channels_may_come_last(rng):
    module = nn.Linear(3, 6).double()  # of each of five tokens
    inputs = rng.normal(size=(4, 5, 3))
    net = nn.Sequential(module, nn.Flatten(), nn.Linear(30, 2).double())
    found = nudge(net, inputs, spread, 0.1, {"0": 6})
    with torch.no_grad():
        expected = module(torch.as_tensor(inputs_of(net, inputs, spread, 0.1))).mean(1).numpy()
    np.testing.assert_allclose(found.features["0"], expected, rtol=1e-12)


def test_batches_change_nothing(net, rng):
    images = rng.normal(size=(BATCH + 2, 1, 4, 4))
    whole, last = nudge(net, images, spread, 0.01, {"2": 16}), nudge(net, images[-1:], spread, 0.01, {"2": 16})
    for found, expected in ((whole.outputs, last.outputs), (whole.features["2"], last.features["2"])):
        assert len(found) == len(images)
        np.testing.assert_allclose(found[-1:], expected, rtol=1e-10)


def fails(outputs, features):
    raise RuntimeError("no objective")


@pytest.mark.parametrize("objective", [spread, fails])
def test_nothing_stays(net, images, objective):
    net.train()
    net[3].eval()
    net[5].weight.grad = torch.ones_like(net[5].weight)
    before = {name: part.clone() for name, part in net.state_dict().items()}
    given = images.copy()
    try:
        nudge(net, images, objective, 0.1, {"0": 4})
    except RuntimeError:
        assert objective is fails
    assert [part.training for part in net] == [True, True, True, False, True, True]
    assert not any(part._forward_hooks for part in net.modules())
    assert [name for name, weight in net.named_parameters() if weight.grad is not None] == ["5.weight"]
    assert (net[5].weight.grad == 1).all()
    assert all(weight.requires_grad for weight in net.parameters())
    assert all(torch.equal(part, before[name]) for name, part in net.state_dict().items())
    np.testing.assert_array_equal(images, given)


def test_where_gradients_are_off(net, images):
    expected = nudge(net, images, spread, 0.01).outputs
    with torch.no_grad():
        np.testing.assert_array_equal(nudge(net, images, spread, 0.01).outputs, expected)
    with torch.inference_mode():
        np.testing.assert_array_equal(nudge(net, images, spread, 0.01).outputs, expected)
    for weight in net.parameters():
        weight.requires_grad_(requires_grad=False)
    np.testing.assert_array_equal(nudge(net, images, spread, 0.01).outputs, expected)


def test_modules_in_single_and_half_precision(net, images):
    expected = nudge(net, images, spread, 0.01).outputs
    single = nudge(net.float(), images, spread, 0.01, {"0": 4})
    assert (single.outputs.dtype, single.features["0"].dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(single.outputs, expected, rtol=1e-3, atol=1e-5)
    half = nudge(net.to(torch.bfloat16), images, spread, 0.01, {"0": 4})
    assert half.outputs.dtype == np.float32
    np.testing.assert_allclose(half.outputs, expected, atol=0.1)


def test_a_module_that_works_in_place_at_once(rng):
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2).double())
    inputs = rng.normal(size=(4, 3))
    found = inputs_of(net, inputs, spread, 0.1)
    np.testing.assert_array_equal(found[inputs < 0], inputs[inputs < 0])


def test_a_layer_before_one_that_works_in_place(rng):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    inputs = rng.normal(size=(9, 3))
    found = nudge(net, inputs, spread, 0.1, {"0": 4})
    with torch.no_grad():
        moved = torch.as_tensor(inputs_of(net, inputs, spread, 0.1))
        np.testing.assert_allclose(found.features["0"], net[0](moved).numpy(), rtol=1e-12)


class Calls(nn.Module):
    """A module that runs a function of itself and x."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def test_calls_of_a_module_have_numbers():
    net = Calls(lambda self, x: self.act(self.act(x) - 1), act=nn.ReLU())
    found = nudge(net, np.full((1, 3), 2.0), spread, 0.5, {"act": 3, "act#2": 3, "act#1": 3})
    assert list(found.features) == ["act", "act#2", "act#1"]
    for name, expected in (("act", 1.5), ("act#1", 1.5), ("act#2", 0.5)):
        np.testing.assert_array_equal(found.features[name], [[expected] * 3])
    check_layers(net, ["act#1", "act#2", ""])
    message = "layers must name modules that run. Got 'act#3', which did not; record other layers."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, np.ones((1, 3)), spread, 0.5, {"act#3": 3})


def nets():
    """Of several kinds, with inputs and layers: maps whose positions are as many as their channels among them."""
    encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    patches = Calls(lambda self, x: self.f(x).flatten(2).mT, f=nn.Conv2d(1, 8, 2, 2))
    yield nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), (8, 3), ["0", "1"]
    yield nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), (3, 8), ["0", "1"]
    squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.Sigmoid())
    squeezed = Calls(lambda self, x: self.c(x) * self.s(self.c(x)), c=nn.Conv2d(1, 4, 3), s=squeeze)
    yield nn.Sequential(squeezed, nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)), (1, 6, 6), ["0", "0.c#2", "1"]
    vit = nn.Sequential(patches, encoder, nn.Flatten(), nn.Linear(64, 2))
    yield vit, (1, 4, 8), ["0", "0.f", "1", "1.linear1", "1.norm2"]
    inner = torch.compile(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), backend="eager")
    yield nn.Sequential(inner, nn.Flatten(), nn.Linear(64, 2)), (8, 3), ["0.0", "0.1", "0"]


@pytest.mark.parametrize("which", range(5), ids=["tokens", "series", "squeeze", "vit", "compiled"])
def test_features_are_those_of_a_recording(rng, which):
    """At inputs that are moved by nothing."""
    net, shape, layers = list(nets())[which]
    inputs = rng.normal(size=(6, *shape)).astype(np.float32)
    recorded = record(net, inputs, features=[name.replace("#2", "") for name in layers]).layers
    widths = {name: recorded[name].shape[1] for name in layers}
    found = nudge(net, inputs, lambda y, _: y.sum(1), 0.0, widths).features
    for name in layers:
        np.testing.assert_allclose(found[name], recorded[name], atol=1e-6)


def test_several_sizes_share_one_gradient(net, rng):
    images = rng.normal(size=(BATCH + 2, 1, 4, 4))
    asked = []

    def objective(outputs, features):
        asked.append(len(outputs))
        return features["2"].sum(1)

    sizes = (0.01, 0.0, 0.2)
    several = nudges(net, images, objective, sizes, {"2": 16}, raw=True)
    assert asked == [BATCH, 2]
    for epsilon, found in zip(sizes, several, strict=True):
        expected = nudge(net, images, objective, epsilon, {"2": 16}, raw=True)
        np.testing.assert_array_equal(found.outputs, expected.outputs)
        np.testing.assert_array_equal(found.features["2"], expected.features["2"])
    assert nudges(net, images, objective, [], {"2": 16}) == []


def test_one_thread_at_a_time(net, images):
    """Hooks of the one would else hear the other."""
    inside, most = [], []

    def slow(outputs, _):
        inside.append(0)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        return outputs.sum(1)

    runs = [threading.Thread(target=nudge, args=(net, images, slow, 0.1)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert most == [1, 1, 1]


def test_calls_in_other_threads_are_not_heard(rng):
    def forward(self, x):
        other = threading.Thread(target=lambda: self.act(x.detach() + 100))
        other.start()
        other.join()
        return self.act(x)

    inputs = rng.random((4, 3)) + 1
    found = nudge(Calls(forward, act=nn.ReLU()), inputs, spread, 0.0, {"act": 3})
    np.testing.assert_array_equal(found.features["act"], inputs)


def test_a_copied_module(net, images):
    expected = nudge(net, images, spread, 0.01, {"0": 4})
    found = nudge(nn.DataParallel(net), images, spread, 0.01, {"0": 4})
    np.testing.assert_array_equal(found.features["0"], expected.features["0"])


@pytest.mark.parametrize("name", ["act#2", "relu", "0#", "0#x"])
def test_functions_cannot_be_listened_to(net, images, name):
    message = (
        f"layers must name modules, for gradients to be taken there. Got '{name}', which is none: a function, as F.relu, "
        "cannot be listened to; name modules when recording, features=[...]."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        check_layers(net, ["0", name])
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, images, spread, 0.1, {"0": 4, name: 3})
    assert not any(part._forward_hooks for part in net.modules())


def test_a_module_that_never_runs(net, images):
    net[4].spare = nn.ReLU()
    with pytest.raises(
        InvalidInput, match=re.escape("layers must name modules that run. Got '4.spare', which did not;")
    ):
        nudge(net, images, spread, 0.1, {"4.spare": 3})


def test_a_layer_of_another_size(net, images):
    message = (
        "layers must give as many units as were recorded. Got Tensor (5, 4, 2, 2) of '2', recorded with 5; hand in the network "
        "that was recorded."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, images, spread, 0.1, {"2": 5})


@pytest.mark.parametrize("off", [lambda x: x[:, :2], lambda x: x + 1, lambda x: x * np.nan])
def test_another_network_than_was_recorded(net, images, off):
    with torch.no_grad():
        outputs = net.eval()(torch.as_tensor(images)).numpy()
    nudge(net, images, spread, 0.1, expected=outputs.astype(np.float32))
    message = "model must give the outputs that were recorded. Got others; hand in the network and the inputs of the recording."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, images, spread, 0.1, expected=off(outputs))


def test_inputs_that_are_no_floats(net):
    message = "inputs must be floats to be moved along a gradient. Got int64; use epsilon=0, which leaves them."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, np.zeros((5, 1, 4, 4), dtype=np.int64), spread, 0.1)


class Cut(nn.Module):
    def forward(self, x):
        return x.detach()


def test_a_network_without_gradients(rng):
    with pytest.raises(
        InvalidInput, match=re.escape("The network must let gradients through to its inputs. Got none; use")
    ):
        nudge(Cut(), rng.normal(size=(2, 3)), spread, 0.1)


def test_a_network_that_gives_no_tensor(images):
    class Mute(nn.Module):
        def forward(self, x):
            return "nothing"

    message = "The network must give a tensor with one row for each of the 5 samples. Got none."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(Mute(), images, spread, 0.1)


def test_networks_made_in_inference_mode(rng):
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    message = (
        "The network must let gradients through to its inputs. Got Inference tensors cannot be saved for backward. Please do "
        "not use Tensors created in inference mode in computation tracked by autograd."
    )
    advice = "; use epsilon=0, or a network without detach() and no_grad(), made outside inference_mode()."
    with pytest.raises(InvalidInput, match=re.escape(message) + ".*" + re.escape(advice)):
        nudge(net, rng.normal(size=(2, 3)), spread, 0.1)


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


def test_networks_that_have_no_way_back(rng):
    message = "Got cudnn RNN backward can only be called in training mode; use epsilon=0, or a network without"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(Calls(lambda self, x: NoWayBack.apply(x)), rng.normal(size=(2, 3)), spread, 0.1)


def test_steps_that_are_lost_to_rounding(rng):
    net = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2)).to(torch.bfloat16)
    inputs = 1 + rng.random((20, 9))  # of which the next number in half precision is 1/128 away
    message = (
        "epsilon must be large enough to move inputs in the network's precision. Got 0.0014, which leaves 100% of their "
        "entries as they are in bfloat16; use a larger one, 0, or a network in single precision."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(net, inputs, spread, 0.0014)
    for epsilon, raw in ((0.0, False), (0.0014, True), (0.01, False)):
        assert nudge(net, inputs, spread, epsilon, raw=raw).outputs.shape == (20, 2)
    nudge(net.float(), inputs, spread, 0.0014)


@pytest.mark.parametrize("model", [None, "net.onnx"])
def test_no_network(images, model):
    message = (
        f"model must be a torch.nn.Module, to take gradients of. Got {type(model).__name__}; hand in the network as model=, or "
        "leave inputs as they are with epsilon=0."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nudge(model, images, spread, 0.1)


@pytest.mark.parametrize("epsilon", [-0.1, np.nan, np.inf, True, "much"])
def test_bad_sizes(epsilon):
    message = f"epsilon must be a float of at least 0 (how far inputs are moved). Got {epsilon!r}; 0 leaves them."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        check_nudge(epsilon, None)
    check_nudge(0, None)
