"""The guarded graph answers as the estimator does, whatever the network, the weighting and the opset."""

import logging
import math
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from terrafirma import SubfunctionBound
from terrafirma.capture.network import REDUCTIONS
from terrafirma.capture.onnx import OnnxNetwork
from terrafirma.capture.torch import TorchNetwork
from terrafirma.core.weighting import Exponential, Tabulated
from terrafirma.errors import BadFile, InvalidInput, NotFitted
from terrafirma.guard.onnx_export import guarded_model, save_model
from terrafirma.guard.torch_export import exported, matching_gates
from tests.onnx_nets import loaded, mlp, model, torch_net

KINDS = ["cnn", "relu", "gelu"]


def run(proto_or_path, inputs):
    """Output, unreliability and accepted."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = str(proto_or_path) if not isinstance(proto_or_path, onnx.ModelProto) else proto_or_path.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["output", "unreliability", "accepted"]
    feed = inputs if isinstance(inputs, dict) else {session.get_inputs()[0].name: inputs}
    return session.run(None, feed)


def watched(network, inputs, layers=None, reduce="none"):
    with network.watch(layers, reduce) as step:
        return step(inputs)


def check(proto, gates, est, x, reduce="none"):
    """Equal to the estimator on what the plain network does; at a threshold between two scores, and at the ends."""
    seen = watched(OnnxNetwork(proto), x, gates, reduce)
    expected = est.unreliability(np.hstack([layer.bits for layer in seen.layers]))
    low, high = np.unique(expected.round(3))[:2] if np.ptp(expected) > 0.01 else (expected.min(), expected.min() + 1)
    guarded = guarded_model(proto, gates, est, (low + high) / 2, reduce)
    onnx.checker.check_model(guarded)
    output, unreliability, accepted = run(guarded, x)
    np.testing.assert_allclose(unreliability, expected, rtol=0, atol=1e-9)
    assert unreliability.dtype == np.float64
    np.testing.assert_array_equal(accepted, expected <= (low + high) / 2)
    assert accepted.any()
    np.testing.assert_allclose(output, seen.outputs, atol=1e-6)
    assert run(guarded_model(proto, gates, est, math.inf, reduce), x)[2].all()
    assert not run(guarded_model(proto, gates, est, -math.inf, reduce), x)[2].any()


@pytest.mark.jit
@pytest.mark.parametrize("width", [1, 64, 700, 4096])
@pytest.mark.parametrize("opset", [11, 13, 17, 18, 20])
def test_unreliability_is_the_estimator_s(rng, width, opset):
    if width > 64 and opset not in (13, 18):
        pytest.skip("the width does not depend on the opset")
    proto, x = mlp(rng, (4, width, 3), opset), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x[:40]).layers[0].bits
    check(
        proto, ["r1"], SubfunctionBound(rho=max(width / 20, 1.0)).fit(bits, rng.random(40) * (rng.random(40) < 0.3)), x
    )


@pytest.mark.jit
@pytest.mark.parametrize("delta", [0.001, 1.0])
@pytest.mark.parametrize("weighting", [Exponential(2.0), Tabulated(-np.sqrt(np.arange(33.0))), None])
def test_any_weighting_and_delta(rng, weighting, delta):
    proto, x = mlp(rng), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x[:40]).layers[0].bits
    check(proto, ["r1"], SubfunctionBound(2.0, delta, weighting).fit(bits, rng.random(40) < 0.3), x)


@pytest.mark.jit
@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_no_wrong_region_and_nothing_but_wrong_regions(rng, wrong):
    proto, x = mlp(rng), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x[:40]).layers[0].bits
    check(proto, ["r1"], SubfunctionBound(3.0).fit(bits, np.full(40, wrong)), x)


@pytest.mark.jit
def test_a_weighting_so_narrow_that_closeness_vanishes(rng):
    """Far from all training regions the density is zero, and the bound infinite."""
    proto, x = mlp(rng), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x).layers[0].bits
    est = SubfunctionBound(1e-200).fit(bits[:20], np.zeros(20))
    expected = est.unreliability(bits)
    assert np.isinf(expected).any()
    assert np.isfinite(expected).any()
    seen = run(guarded_model(proto, ["r1"], est, 0.0), x)[1]
    np.testing.assert_allclose(seen, expected, atol=1e-9)


@pytest.mark.jit
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_torch_networks_from_capture_to_the_guarded_graph(rng, kind, reduce):
    """All layers: recorded in torch, found again by their bits, scored in one graph."""
    net, x, _ = torch_net(kind)
    proto, step = loaded(kind), watched(TorchNetwork(net), x, ["*"], reduce)
    gates = matching_gates(OnnxNetwork(proto), x, [layer.bits for layer in step.layers], reduce)
    assert gates == [layer.name for layer in OnnxNetwork(proto).candidates(x)]
    bits = np.hstack([layer.bits for layer in step.layers])
    est = SubfunctionBound(rho=bits.shape[1] / 20).fit(bits[:25], rng.random(25) < 0.3)
    check(proto, gates, est, x, reduce)
    np.testing.assert_allclose(
        run(guarded_model(proto, gates, est, 0.0, reduce), x)[1], est.unreliability(bits), atol=1e-4
    )


@pytest.mark.jit
def test_many_regions_are_taken_in_parts(rng, monkeypatch):
    monkeypatch.setattr("terrafirma.guard.onnx_export.MOST_UNPACKED", 7 * 32)
    proto, x = mlp(rng), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x).layers[0].bits
    est = SubfunctionBound(3.0).fit(bits, rng.random(60) < 0.3)
    assert len(est.regions_) % 7
    assert [node.op_type for node in guarded_model(proto, ["r1"], est, 0.0).graph.node].count("MatMulInteger") > 5
    check(proto, ["r1"], est, x)


@pytest.mark.jit
def test_layers_stand_in_the_order_that_is_asked_for(rng):
    """As recorded, which need not be the order of nodes in the graph; channels without any contraction come last."""
    x = rng.normal(size=(50, 3, 4)).astype(np.float32)
    nodes = [
        ("Relu", "x", "first"),
        ("Neg", "first", "n"),
        ("Add", "n one", "m"),
        ("Relu", "m", "second"),
        ("Flatten", "second", "y"),
    ]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["n", 3, 4])}, weights={"one": np.array(1, np.float32)})
    first, second = watched(OnnxNetwork(proto), x, ["first", "second"], "any").layers
    bits = np.hstack([second.bits, first.bits])
    est = SubfunctionBound(1.0).fit(bits[:40], rng.random(40) < 0.4)
    seen = run(guarded_model(proto, ["second", "first"], est, 0.0, "any"), x)[1]
    np.testing.assert_allclose(seen, est.unreliability(bits), atol=1e-9)


@pytest.mark.jit
def test_names_of_the_network_do_not_clash_with_those_of_the_guard(rng):
    nodes = [
        ("Relu", "x", "unreliability", {}, "guard/node_0"),
        ("Neg", "unreliability", "accepted"),
        ("Exp", "accepted", "output"),
    ]
    proto = model(nodes, {"x": (TensorProto.FLOAT, ["n", 6])}, {"output": (TensorProto.FLOAT, ["n", 6])})
    x = rng.normal(size=(20, 6)).astype(np.float32)
    est = SubfunctionBound(1.0).fit(x, rng.random(20) < 0.3)
    before = proto.SerializeToString()
    check(proto, ["guard/node_0"], est, x)
    check(proto, ["accepted"], SubfunctionBound(1.0).fit(-np.maximum(x, 0), np.zeros(20)), x)
    assert proto.SerializeToString() == before
    proto = model([("Relu", "output", "y")], {"output": (TensorProto.FLOAT, ["n", 6])})
    sentence = "Inputs of the model must not be called as outputs of the guard. Got output; rename them."
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        guarded_model(proto, ["y"], est, 0.0)


@pytest.mark.jit
def test_weights_listed_among_the_inputs_and_double_precision(rng):
    """As files of old versions have them."""
    double = TensorProto.DOUBLE
    inputs = {"x": (double, ["n", 6]), "w": (double, [6, 8])}
    weights = {"w": rng.normal(size=(6, 8))}
    proto = model(
        [("MatMul", "x w", "h"), ("Relu", "h", "r"), ("Neg", "r", "y")], inputs, {"y": (double, ["n", 8])}, weights
    )
    x = rng.normal(size=(20, 6))
    check(proto, ["r"], SubfunctionBound(1.0).fit(x @ weights["w"], rng.random(20) < 0.3), x)


@pytest.mark.jit
def test_a_score_at_the_threshold_is_accepted(rng):
    proto, x = mlp(rng, (4, 300, 3)), rng.normal(size=(60, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x).layers[0].bits
    est = SubfunctionBound(12.0).fit(bits[:40], rng.random(40) < 0.3)
    for row, threshold in enumerate(est.unreliability(bits)):
        assert run(guarded_model(proto, ["r1"], est, threshold), x)[2][row]


@pytest.mark.jit
def test_what_cannot_be_guarded(rng):
    proto = mlp(rng)
    with pytest.raises(NotFitted, match=r"Call fit\(X, errors\) before reading n_samples_\."):
        guarded_model(proto, ["r1"], SubfunctionBound(), 0.0)
    est = SubfunctionBound(2.0).fit(rng.random((9, 32)) < 0.5, np.zeros(9))
    sentence = "threshold must be a number, or -inf to accept nothing. Got nan; calibrate the policy first."
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        guarded_model(proto, ["r1"], est, math.nan)
    with pytest.raises(
        InvalidInput, match=r"layers must name gated layers that run. Got 'network/r2'; near it are network/r1"
    ):
        guarded_model(proto, ["r2"], est, 0.0)
    old = model([("Upsample", "x s", "u"), ("Relu", "u", "y")], weights={"s": np.ones(2, np.float32)}, opset=9)
    sentence = r"The model must have opset 13 or later\. Got 9, which onnx cannot convert \(.*\); export it anew\."
    old.graph.node[0].op_type = "Unheard"
    with pytest.raises(InvalidInput, match=f"(?s){sentence}"):
        guarded_model(old, ["y"], est, 0.0)


@pytest.mark.jit
@pytest.mark.parametrize("largest_file", [2**31, 10_000])
def test_a_saved_model_replaces_the_one_before_whole_or_not_at_all(rng, tmp_path, largest_file):
    proto, x = mlp(rng, (4, 128, 3)), rng.normal(size=(150, 4)).astype(np.float32)
    bits = watched(OnnxNetwork(proto), x).layers[0].bits
    est = SubfunctionBound(5.0).fit(bits, rng.random(150) < 0.3)
    path = tmp_path / "guarded.onnx"
    for threshold in (0.0, math.inf):
        save_model(guarded_model(proto, ["r1"], est, threshold), path, largest_file=largest_file)
        assert len(list(tmp_path.iterdir())) == (1 if largest_file > 10_000 else 2)
    _, unreliability, accepted = run(path, x)
    np.testing.assert_allclose(unreliability, est.unreliability(bits), atol=1e-9)
    assert accepted.all()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    path.chmod(0o444)
    with pytest.raises(BadFile, match=r"guarded\.onnx cannot be written: it is read-only\."):
        save_model(guarded_model(proto, ["r1"], est, 0.0), path, largest_file=largest_file)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_exporting_leaves_the_module_as_it_was_and_says_nothing(capfd, recwarn):
    import torch
    from torch import nn

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).eval()
            self.dropout = nn.Dropout(0.5)

        def forward(self, a, b):
            return self.dropout(torch.relu(self.frozen(a) + b))

    net, log, lines = Two(), logging.getLogger("torch.onnx"), []
    handler = logging.Handler()
    handler.emit = lines.append
    log.addHandler(handler)
    level = log.level
    a, b = (np.ones((1, 4), np.float32), np.zeros((1, 8), np.float32))
    five = {"a": np.repeat(a, 5, 0), "b": np.repeat(b, 5, 0)}
    with torch.no_grad():
        expected = torch.relu(net.frozen[0](torch.ones(5, 4))).numpy()
    for inputs in ({"a": a, "b": b}, (a, b)):
        proto = exported(net, inputs)
        assert [value.name for value in proto.graph.input] == ["a", "b"]
        assert all(value.type.tensor_type.shape.dim[0].dim_param for value in proto.graph.input)
        np.testing.assert_allclose(watched(OnnxNetwork(proto), five).outputs, expected, rtol=1e-5)
    log.removeHandler(handler)
    assert (net.training, net.frozen.training, net.frozen[1].training, net.dropout.training) == (
        True,
        False,
        False,
        True,
    )
    assert log.level == level
    assert capfd.readouterr() == ("", "")
    assert not lines
    assert not recwarn


def test_a_module_that_cannot_be_exported_is_named():
    from torch import nn

    class Odd(nn.Module):
        def forward(self, x):
            return x.relu() if x.sum().item() > 0 else x

    sentence = (
        r"The module must be one that torch\.onnx\.export can take for batches of any size\. Got Odd, on which it failed "
        r"\(.*\); make the guard of an ONNX file that you export yourself\."
    )
    with pytest.raises(InvalidInput, match=f"(?s){sentence}"):
        exported(Odd(), np.ones((3, 4), np.float32))


def test_recorded_layers_are_found_by_their_bits_up_to_rounding(rng):
    network, x = OnnxNetwork(mlp(rng, (4, 32, 32, 32, 3))), rng.normal(size=(400, 4)).astype(np.float32)
    first, second, third = (layer.bits for layer in watched(network, x, ["*"]).layers)
    assert matching_gates(network, x, [third, first]) == ["r3", "r1"]
    second = second.copy()
    second[7, 3] ^= True  # of 12 800 bits
    assert matching_gates(network, x, [second]) == ["r2"]
    second[:, 5] ^= True
    sentence = (
        "The ONNX graph must have a gate with the bits of each recorded layer of 32 units. Nearest is {near}; "
        "record a layer that is a gate in the exported graph, too."
    )
    with pytest.raises(InvalidInput, match=re.escape(sentence.format(near="r2, of which 3.13% differ"))):
        matching_gates(network, x, [second])
    with pytest.raises(
        InvalidInput, match=re.escape(sentence.format(near="none of as many units").replace("32", "31"))
    ):
        matching_gates(network, x, [first[:, :31]])


def test_equal_layers_are_told_apart_by_their_order():
    """Two dead layers have the same bits; each node is found once."""
    network = OnnxNetwork(model([("Relu", "x", "a"), ("Relu", "a", "y")], {"x": (TensorProto.FLOAT, ["n", 2])}))
    bits = np.ones((5, 2), bool)
    assert matching_gates(network, np.ones((5, 2), np.float32), [bits, bits]) == ["a", "y"]
