"""Networks in ONNX files: which nodes are gates, what their bits are, and what becomes of odd files and inputs."""

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from scipy.special import erf, expit

from terrafirma.capture.network import REDUCTIONS
from terrafirma.capture.onnx import OnnxNetwork
from terrafirma.capture.sklearn import hidden_activations
from terrafirma.errors import BadFile, InvalidInput
from tests.onnx_nets import exported_net, mlp, model, pre_activations, torch_net

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
X = np.random.default_rng(3).normal(size=(9, 6)).astype(np.float32)


def step(network, inputs, layers=None, reduce="none", **more):
    with network.watch(layers, reduce, **more) as run:
        return run(inputs)


def says(sentence, **parts):
    return re.escape(sentence.format(**parts))


@pytest.mark.parametrize("kind", ["cnn", "relu", "gelu"])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_patterns_are_those_of_the_torch_network(kind, reduce):
    """Not one bit differs on these seeds; channels come first after convolutions and last in transformers."""
    _, x, _ = torch_net(kind)
    expected, outputs = pre_activations(kind)
    seen = step(OnnxNetwork(exported_net(kind)), x, ["*"], reduce)
    assert [layer.kind for layer in seen.layers] == [kind if kind == "gelu" else "relu"] * len(expected)
    np.testing.assert_allclose(seen.outputs, outputs, atol=1e-5)
    for layer, source in zip(seen.layers, expected, strict=True):
        assert layer.shape == source.shape[1:]
        maps = source if kind == "cnn" else np.moveaxis(source, -1, 1)
        maps = maps.reshape(len(x), maps.shape[1], -1)
        bits = {"none": source.reshape(len(x), -1) > 0, "any": maps.max(2) > 0, "mean": maps.mean(2) > 0}
        np.testing.assert_array_equal(layer.bits, bits[reduce])


def test_features_of_maps_are_averaged_over_positions():
    _, x, _ = torch_net("cnn")
    network = OnnxNetwork(exported_net("cnn"))
    relu = np.maximum(pre_activations("cnn")[0][1], 0)
    whole, reduced = (step(network, x, ["node_relu_1"], how, features=True).layers[0] for how in ("none", "any"))
    np.testing.assert_allclose(whole.features, relu.reshape(len(x), -1), atol=1e-5)
    np.testing.assert_allclose(reduced.features, relu.mean((2, 3)), atol=1e-5)
    assert whole.features.dtype == np.float32


def test_a_scikit_learn_mlp_has_the_same_patterns(rng):
    from sklearn.neural_network import MLPClassifier

    x = rng.normal(size=(80, 4))
    classifier = MLPClassifier((12, 7), max_iter=30, tol=1.0, random_state=0).fit(x, np.arange(80) % 3)
    nodes = [("Gemm", "x w0 b0", "h0"), ("Relu", "h0", "r0"), ("Gemm", "r0 w1 b1", "h1"), ("Relu", "h1", "r1")]
    nodes += [("Gemm", "r1 w2 b2", "y")]
    weights = {f"w{i}": w for i, w in enumerate(classifier.coefs_)}
    weights |= {f"b{i}": b for i, b in enumerate(classifier.intercepts_)}
    network = OnnxNetwork(model(nodes, {"x": (DOUBLE, ["n", 4])}, {"y": (DOUBLE, ["n", 3])}, weights))
    seen = step(network, x, ["r*"])
    for layer, expected in zip(seen.layers, hidden_activations(classifier, x), strict=True):
        np.testing.assert_array_equal(layer.bits, expected > 0)
    assert seen.outputs.dtype == np.float64
    np.testing.assert_array_equal(seen.outputs.argmax(1), classifier.predict(x))


GATES = [
    ("Relu", {}, "relu"),
    ("LeakyRelu", {"alpha": 0.1}, "leaky_relu"),
    ("ThresholdedRelu", {"alpha": 0.0}, "relu"),
    ("Elu", {}, "elu"),
    ("Selu", {}, "selu"),
    ("Celu", {"alpha": 2.0}, "celu"),
    ("Gelu", {}, "gelu"),
    ("HardSwish", {}, "hardswish"),
    ("Mish", {}, "mish"),
]
OTHERS = [("ThresholdedRelu", {}), ("ThresholdedRelu", {"alpha": 0.5}), ("Sigmoid", {}), ("Tanh", {}), ("Softplus", {})]


@pytest.mark.parametrize(("op", "attributes", "kind"), GATES)
def test_gates_of_one_node(op, attributes, kind):
    network = OnnxNetwork(model([(op, "x", "y", attributes)], opset=20))
    (layer,) = step(network, X, features=True).layers
    assert (layer.name, layer.kind, layer.shape) == ("y", kind, (6,))
    np.testing.assert_array_equal(layer.bits, X > 0)
    np.testing.assert_array_equal(layer.features, step(network, X).outputs)


@pytest.mark.parametrize(("op", "attributes"), OTHERS)
def test_what_does_not_gate_at_zero_is_no_gate(op, attributes):
    assert OnnxNetwork(model([(op, "x", "y", attributes)])).candidates(X) == []


CLAMPS = [
    ("Clip", "x zero", True),
    ("Clip", "x zero one", True),
    ("Clip", "x one", False),
    ("Clip", "x", False),
    ("Max", "x zero", True),
    ("Max", "zero x", True),
    ("Max", "x one", False),
    ("Max", "x x", False),
    ("Max", "x zero one", False),
]


@pytest.mark.parametrize(("op", "inputs", "gates"), CLAMPS)
def test_clamps_gate_if_they_do_so_at_zero(op, inputs, gates):
    constants = [
        ("Constant", "", "z", {"value": helper.make_tensor("z", DOUBLE, [], [0.0])}),
        ("Cast", "z", "zero", {"to": FLOAT}),
        ("Constant", "", "one", {"value_float": 1.0}),
    ]
    network = OnnxNetwork(model([*constants, (op, inputs, "y")]))
    assert [layer.kind for layer in network.candidates(X)] == ["clamp"] * gates
    if gates:
        np.testing.assert_array_equal(step(network, X).layers[0].bits, X > 0)


def test_clip_of_old_opsets_has_its_limits_as_attributes():
    assert [
        len(OnnxNetwork(model([("Clip", "x", "y", {"min": least})], opset=9)).candidates(X)) for least in (0.0, -1.0)
    ] == [1, 0]


def test_prelu_has_a_slope_beside_its_input():
    network = OnnxNetwork(model([("PRelu", "x slope", "y")], weights={"slope": np.full(6, 0.2, np.float32)}))
    assert network.candidates(X)[0].kind == "prelu"
    np.testing.assert_array_equal(step(network, X).layers[0].bits, X > 0)


SCALARS = {
    "half": 0.5,
    "one": 1.0,
    "root": 2**0.5,
    "three": 3.0,
    "six": 6.0,
    "zero": 0.0,
    "c": 0.044715,
    "k": 0.7978846,
}
SCALARS = {name: np.array(value, np.float32) for name, value in SCALARS.items()}
TANH = [("Mul", "t k", "u"), ("Tanh", "u", "v"), ("Add", "v one", "w")]
HALVED = [("Mul", "h w", "p"), ("Mul", "half p", "g")]
IN_PIECES = {
    "SiLU": ("silu", [("Sigmoid", "h", "s"), ("Mul", "h s", "g")], lambda h: h * expit(h)),
    "SiLU, factors swapped": ("silu", [("Sigmoid", "h", "s"), ("Mul", "s h", "g")], lambda h: h * expit(h)),
    "QuickGELU": (
        "silu",
        [("Mul", "three h", "q"), ("Sigmoid", "q", "s"), ("Mul", "h s", "g")],
        lambda h: h * expit(3 * h),
    ),
    "GELU": (
        "gelu",
        [("Div", "h root", "q"), ("Erf", "q", "e"), ("Add", "e one", "a"), ("Mul", "h a", "p"), ("Mul", "p half", "g")],
        lambda h: h * (1 + erf(h / 2**0.5)) / 2,
    ),
    "GELU, halved before": (
        "gelu",
        [("Div", "h root", "q"), ("Erf", "q", "e"), ("Add", "e one", "a"), ("Mul", "half h", "b"), ("Mul", "b a", "g")],
        lambda h: h * (1 + erf(h / 2**0.5)) / 2,
    ),
    "GELU with Tanh": (
        "gelu",
        [
            ("Pow", "h three", "h3"),
            ("Mul", "h3 c", "d"),
            ("Add", "h d", "t"),
            *TANH,
            ("Mul", "h half", "b"),
            ("Mul", "b w", "g"),
        ],
        lambda h: h / 2 * (1 + np.tanh(0.7978846 * (h + 0.044715 * h**3))),
    ),
    "GELU with Tanh, factored": (
        "gelu",
        [("Mul", "h h", "h2"), ("Mul", "h2 c", "d"), ("Add", "one d", "f"), ("Mul", "h f", "t"), *TANH, *HALVED],
        lambda h: h / 2 * (1 + np.tanh(0.7978846 * (h + 0.044715 * h**3))),
    ),
    "Mish": (
        "mish",
        [("Softplus", "h", "s"), ("Tanh", "s", "t"), ("Mul", "h t", "g")],
        lambda h: h * np.tanh(np.logaddexp(0, h)),
    ),
    "HardSwish": (
        "hardswish",
        [("Add", "h three", "a"), ("Clip", "a zero six", "b"), ("Mul", "h b", "p"), ("Div", "p six", "g")],
        lambda h: h * np.clip(h + 3, 0, 6) / 6,
    ),
}


@pytest.mark.parametrize("name", IN_PIECES)
def test_gates_in_pieces(name, rng):
    """The product is the gate, what it squashes its source: a sum with a bias, not what stands before that."""
    kind, nodes, formula = IN_PIECES[name]
    weights = SCALARS | {"w1": rng.normal(size=(6, 5)).astype(np.float32), "b1": np.array(1.3, np.float32)}
    network = OnnxNetwork(
        model([("MatMul", "x w1", "m"), ("Add", "m b1", "h"), *nodes, ("Neg", "g", "y")], weights=weights)
    )
    h = X @ weights["w1"] + weights["b1"]
    (layer,) = step(network, X, ["*"], features=True).layers
    assert layer.kind == kind
    np.testing.assert_array_equal(layer.bits, h > 0)
    np.testing.assert_allclose(layer.features, formula(h), atol=1e-5)


def test_glu_is_gated_by_its_squashed_half():
    nodes = [("Split", "x", "a b", {"axis": 1}), ("Sigmoid", "b", "s"), ("Mul", "a s", "y")]
    (layer,) = step(OnnxNetwork(model(nodes)), X).layers
    assert (layer.kind, layer.shape) == ("glu", (3,))
    np.testing.assert_array_equal(layer.bits, X[:, 3:] > 0)


NO_GATES = {
    "another gate's factor": [("Exp", "h", "e"), ("Sigmoid", "e", "s"), ("Mul", "h s", "g")],
    "halves of two splits": [
        ("Split", "h", "a b", {"axis": 1}),
        ("Split", "x", "c d", {"axis": 1}),
        ("Sigmoid", "d", "s"),
        ("Mul", "a s", "g"),
    ],
    "a negative multiple": [("Mul", "h minus", "q"), ("Sigmoid", "h", "s"), ("Mul", "q s", "g")],
    "a reciprocal": [("Div", "two h", "q"), ("Sigmoid", "h", "s"), ("Mul", "q s", "g")],
    "a square": [("Mul", "h h", "g")],
}


@pytest.mark.parametrize("name", NO_GATES)
def test_products_that_are_no_gates(name):
    weights = {"w": np.eye(6, dtype=np.float32), "minus": np.array(-1, np.float32), "two": np.array(2, np.float32)}
    network = OnnxNetwork(model([("MatMul", "x w", "h"), *NO_GATES[name], ("Neg", "g", "y")], weights=weights))
    assert network.candidates(X) == []


def test_squeeze_and_excitation_is_no_gate_and_does_not_move_the_channels(rng):
    """A factor squashed from other numbers is none; the channels after it are those of the map that it scales."""
    x = rng.normal(size=(4, 2, 5, 6)).astype(np.float32)
    nodes = [("Conv", "x k", "m"), ("GlobalAveragePool", "m", "p"), ("Flatten", "p", "f"), ("MatMul", "f w", "e")]
    nodes += [
        ("Sigmoid", "e", "s"),
        ("Unsqueeze", "s axes", "u"),
        ("Mul", "m u", "v"),
        ("Relu", "v", "r"),
        ("Flatten", "r", "y"),
    ]
    weights = {
        "k": rng.normal(size=(3, 2, 3, 3)).astype(np.float32),
        "w": np.eye(3, dtype=np.float32),
        "axes": np.array([2, 3]),
    }
    network = OnnxNetwork(model(nodes, {"x": (FLOAT, ["n", 2, 5, 6])}, weights=weights))
    (layer,) = step(network, x, ["*"], "any").layers
    assert layer.name == "r"
    np.testing.assert_array_equal(layer.bits, step(network, x).layers[0].bits.reshape(4, 3, 12).any(2))


def test_names_are_those_of_nodes_or_else_of_their_outputs():
    network = OnnxNetwork(
        model([("Relu", "x", "a", {}, "/act/Relu"), ("Relu", "a", "b"), ("Relu", "b", "y", {}, "last")])
    )
    assert [layer.name for layer in network.candidates(X)] == ["/act/Relu", "b", "last"]
    for layers, names in (
        (None, ["last"]),
        (["last", "b"], ["b", "last"]),  # in the order in which they run
        (["/act/*"], ["/act/Relu"]),
        (["b", "*"], ["/act/Relu", "b", "last"]),
    ):
        assert [layer.name for layer in step(network, X, layers).layers] == names


def test_any_node_or_tensor_may_be_named(rng):
    network = OnnxNetwork(model([("Neg", "x", "a", {}, "flip"), ("Relu", "a", "b"), ("Sum", "b x", "y", {}, "sum")]))
    by_node, by_tensor, relu = step(network, X, ["flip", "b", "y"]).layers[0], *step(network, X, ["a", "b"]).layers
    assert (by_node.name, by_node.kind, by_tensor.name, relu.kind) == ("flip", "output", "a", "relu")
    np.testing.assert_array_equal(by_node.bits, X < 0)
    np.testing.assert_array_equal(by_tensor.bits, X < 0)


def test_an_unknown_layer_has_its_nearest_named():
    sentence = (
        "layers must name gated layers that run. Got 'relu_z'; near it are relu_y, relu_x "
        "(2 in all: terrafirma.layers lists them)."
    )
    network = OnnxNetwork(model([("Relu", "x", "a", {}, "relu_x"), ("Relu", "a", "y", {}, "relu_y")]))
    with pytest.raises(InvalidInput, match=says(sentence)), network.watch(["relu_z"]):
        pass


def test_a_graph_without_gates_says_what_it_has():
    condition = [helper.make_tensor_value_info("t", FLOAT, None)]
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["t"])], "branch", [], condition)
    nodes = [("Constant", "", "c", {"value": helper.make_tensor("c", TensorProto.BOOL, [], [True])})]
    nodes += [("If", "c", "t", {"then_branch": branch, "else_branch": branch}), ("Tanh", "t", "y")]
    sentence = (
        "The graph must have a gated layer (Relu, Gelu, ...) to record by default. Got none among Constant, If, Tanh, and the "
        "branches and bodies of If, Loop and Scan are not seen; name in layers any node or tensor whose sign to take."
    )
    network = OnnxNetwork(model(nodes))
    with pytest.raises(InvalidInput, match=says(sentence)), network.watch(None):
        pass
    np.testing.assert_array_equal(step(network, X, ["t"]).layers[0].bits, X > 0)


def test_functions_are_looked_into():
    function = helper.make_function(
        "home", "Act", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [helper.make_opsetid("", 13)]
    )
    whole = model([("Neg", "x", "a"), ("Act", "a", "y", {"domain": "home"})], functions=[function])
    whole.opset_import.append(helper.make_opsetid("home", 1))
    (layer,) = step(OnnxNetwork(whole), X).layers
    assert layer.kind == "relu"
    np.testing.assert_array_equal(layer.bits, X < 0)


@pytest.mark.parametrize("n", [1, 3, 7, 0])
def test_a_fixed_batch_size_is_met_in_pieces(rng, n):
    free = mlp(rng)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(free)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    x = rng.normal(size=(n, 4)).astype(np.float32)
    if n == 0:
        assert step(OnnxNetwork(free), x).layers[0].bits.shape == (0, 32)
        return
    expected, seen = (step(OnnxNetwork(proto), x) for proto in (free, fixed))
    assert seen.layers[0].bits.shape == (n, 32)
    np.testing.assert_array_equal(seen.layers[0].bits, expected.layers[0].bits)
    np.testing.assert_allclose(seen.outputs, expected.outputs, rtol=1e-6)


def test_a_layer_without_a_row_for_each_sample_is_refused():
    nodes = [("Transpose", "x", "t", {"perm": [1, 0]}), ("Relu", "t", "r"), ("Transpose", "r", "y", {"perm": [1, 0]})]
    sentence = (
        "r must have one row for each of the 9 samples. Got shape (6, 9); "
        "export the model with the batch as first axis, or name another layer."
    )
    with pytest.raises(InvalidInput, match=says(sentence)):
        step(OnnxNetwork(model(nodes)), X)


def test_several_inputs_come_by_name_or_in_order():
    network = OnnxNetwork(
        model([("Cast", "ids", "f", {"to": FLOAT}), ("Add", "f x", "a"), ("Relu", "a", "y")],
              {"ids": (INT64, ["n", 6]), "x": (FLOAT, ["n", 6])})
    )  # fmt: skip
    ids = np.arange(54).reshape(9, 6) % 3 - 1
    for inputs in ({"x": X.astype(np.float64), "ids": ids.astype(np.int32)}, (ids, X), [ids, X]):
        np.testing.assert_array_equal(step(network, inputs).layers[0].bits, ids + X > 0)
    rule = "inputs must be arrays for ids, x: in a dict by name, or in that order in a tuple. Got {got}."
    for inputs, got in (
        (X, "one ndarray"),
        ((X,), "1 arrays"),
        ({"x": X}, "x"),
        ({"x": X, "ids": ids, "mask": ids}, "x, ids, mask"),
    ):
        with pytest.raises(InvalidInput, match=says(rule, got=got)):
            step(network, inputs)
    sentence = "All inputs must have as many rows. Got {{'ids': 9, 'x': 8}}; pair them anew."
    with pytest.raises(InvalidInput, match=says(sentence)):
        step(network, (ids, X[:8]))


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (X[:, :5], "float32 of shape (9, 5)"),
        (X[0], "float32 of shape (6,)"),
        (X[0, 0], "float32 of shape ()"),
        (X.astype(complex), "complex128 of shape (9, 6)"),
    ],
)
def test_inputs_of_another_shape_or_type_are_refused(wrong, got):
    network = OnnxNetwork(model([("Relu", "x", "y")], {"x": (FLOAT, ["n", 6])}))
    sentence = "x must be an array of float32 of shape (n, 6). Got {got}; reshape or convert it."
    with pytest.raises(InvalidInput, match=says(sentence, got=got)):
        step(network, wrong)


def test_token_ids_must_be_integers():
    network = OnnxNetwork(model([("Cast", "x", "f", {"to": FLOAT}), ("Relu", "f", "y")], {"x": (INT64, ["n", "m"])}))
    sentence = "x must be an array of int64 of shape (n, any). Got float32 of shape (9, 6); reshape or convert it."
    with pytest.raises(InvalidInput, match=says(sentence)):
        step(network, X)


def test_inputs_that_fail_in_the_middle_are_named():
    network = OnnxNetwork(model([("Reshape", "x s", "r"), ("Relu", "r", "y")], weights={"s": np.array([-1, 4])}))
    sentence = r"onnxruntime could not run the model on x \(9, 6\) \(.*\)\. Give inputs as in training\."
    with pytest.raises(InvalidInput, match=f"(?s){sentence}"):
        step(network, X[:, :6])


OUTPUTS = [
    ({"y": (FLOAT, ["n"]), "wide": (FLOAT, ["n", 6]), "logits": (FLOAT, ["n", 6])}, "logits"),
    ({"label": (INT64, ["n"]), "y": (FLOAT, ["n"]), "wide": (FLOAT, ["n", 6])}, "wide"),
    ({"label": (INT64, ["n"]), "y": (FLOAT, ["n"])}, "y"),
]


@pytest.mark.parametrize(("outputs", "expected"), OUTPUTS)
def test_of_several_outputs_one_is_the_network_s(outputs, expected):
    nodes = [("Relu", "x", "wide"), ("ReduceSum", "x axes", "y", {"keepdims": 0}), ("Neg", "x", "logits")]
    nodes += [("ArgMax", "x", "label", {"axis": 1, "keepdims": 0})]
    seen = step(OnnxNetwork(model(nodes, {"x": (FLOAT, ["n", 6])}, outputs, {"axes": np.array([1])})), X).outputs
    np.testing.assert_allclose(seen, {"logits": -X, "wide": np.maximum(X, 0), "y": X.sum(1)}[expected], rtol=1e-5)


def test_half_precision_outputs_are_widened():
    half = TensorProto.FLOAT16
    seen = step(OnnxNetwork(model([("Relu", "x", "y")], {"x": (half, ["n", 6])}, {"y": (half, None)})), X)
    assert seen.outputs.dtype == np.float32
    np.testing.assert_array_equal(seen.layers[0].bits, X > 0)


def test_a_model_without_an_output_of_floats_says_how_to_export_it():
    rule = "The model must have an output that is a tensor of floats. Got {got}; {step}."
    only_labels = model([("ArgMax", "x", "label", {"axis": 1})], outputs={"label": (INT64, None)})
    step_on = "export it with its logits or probabilities"
    with pytest.raises(InvalidInput, match=says(rule, got="label", step=step_on)):
        OnnxNetwork(only_labels)
    value = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
    only_labels.graph.output.append(helper.make_value_info("probability", helper.make_sequence_type_proto(value)))
    step_on = "export it with options={{'zipmap': False}}".format()
    with pytest.raises(InvalidInput, match=says(rule, got="label, probability", step=step_on)):
        OnnxNetwork(only_labels)


def test_files_that_are_none(tmp_path, rng):
    whole = mlp(rng).SerializeToString()
    path = tmp_path / "net.onnx"
    with pytest.raises(FileNotFoundError, match=r"net\.onnx"):
        OnnxNetwork(path)
    rule = r"net is not a whole ONNX file \(.*\)\. It is truncated or of another kind; export it again\."
    for content in (whole[:-100], b"", b"text of another kind"):
        path.write_bytes(content)
        with pytest.raises(BadFile, match=f"(?s){rule}"):
            OnnxNetwork(path)
    path.write_bytes(model([("Unheard", "x", "h"), ("Relu", "h", "y")]).SerializeToString())
    with pytest.raises(
        BadFile, match=r"(?s)net is not a model that onnxruntime can run \(.*Unheard.*\)\. Export it again\."
    ):
        step(OnnxNetwork(path), X)
    with pytest.raises(
        InvalidInput, match=says("model must be the path of an ONNX file, its bytes or an onnx.ModelProto. Got int.")
    ):
        OnnxNetwork(3)


def test_a_path_bytes_and_a_proto_are_the_same_network(tmp_path, rng):
    proto = mlp(rng)
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    x = rng.normal(size=(5, 4)).astype(np.float32)
    networks = [OnnxNetwork(path), OnnxNetwork(str(path)), OnnxNetwork(path.read_bytes()), OnnxNetwork(proto)]
    assert [network.name for network in networks] == ["net", "net", "onnx", "onnx"]
    assert len({network.fingerprint() for network in networks}) == 1
    for network in networks:
        np.testing.assert_array_equal(step(network, x).layers[0].bits, step(networks[0], x).layers[0].bits)


def test_weights_in_other_files_count_like_those_within(tmp_path, rng):
    """Also single numbers, from which a Clip is known to be a gate."""
    nodes = [("MatMul", "x w", "h"), ("Clip", "h zero", "y")]
    weights = {"w": rng.normal(size=(6, 50)).astype(np.float32), "zero": np.array(0, np.float32)}
    proto, path = model(nodes, weights=weights), tmp_path / "net.onnx"
    within = OnnxNetwork(proto)
    outside = onnx.ModelProto()
    outside.CopyFrom(proto)
    onnx.save(outside, path, save_as_external_data=True, location="net.data", size_threshold=0)
    network = OnnxNetwork(path)
    assert network.fingerprint() == within.fingerprint() == OnnxNetwork(network.file_bytes()).fingerprint()
    np.testing.assert_array_equal(step(network, X).layers[0].bits, X @ weights["w"] > 0)
    (tmp_path / "net.data").unlink()
    with pytest.raises(BadFile, match=r"(?s)net is not a model that onnxruntime can run \(.*\)\. Export it again\."):
        step(OnnxNetwork(model_without_scalars(path)), X)


def model_without_scalars(path):
    """The same model with its single number inside, so that only the large weights are missing."""
    proto = onnx.load(path, load_external_data=False)
    zero = next(tensor for tensor in proto.graph.initializer if tensor.name == "zero")
    zero.CopyFrom(onnx.numpy_helper.from_array(np.array(0, np.float32), "zero"))
    path.write_bytes(proto.SerializeToString())
    return path


def test_the_fingerprint_follows_weights_and_graph(rng):
    protos = [mlp(rng), mlp(rng), mlp(np.random.default_rng(20221118)), mlp(rng, (4, 32, 4, 3))]
    prints = [OnnxNetwork(proto).fingerprint() for proto in protos]
    assert prints[0] == prints[2]
    assert len(set(prints)) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in prints)


def test_watching_again_makes_no_new_session_and_leaves_the_model_as_it_was(rng, monkeypatch):
    import onnxruntime

    made = []

    class Counted(onnxruntime.InferenceSession):
        def __init__(self, *args, **named):
            made.append(self)
            super().__init__(*args, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    network, x = OnnxNetwork(mlp(rng)), np.zeros((2, 4), np.float32)
    before = network.file_bytes()
    for _ in range(3):
        step(network, x)
    assert len(made) == 1
    step(network, x, ["h1"], features=True)  # the same tensors
    assert len(made) == 1
    step(network, x, ["r1"], features=True)
    assert len(made) == 2
    assert network.file_bytes() == before


def test_what_is_gated_without_samples_is_no_layer(rng):
    """A clamped weight, and a size that is clamped: neither has a row for each sample."""
    weights = {"w": rng.normal(size=(4, 4)).astype(np.float32), "zero": np.int64(0), "v": np.ones((4, 4), np.float32)}
    nodes = [
        ("Relu", "w", "wrelu"),
        ("MatMul", "x wrelu", "h"),
        ("Relu", "h", "r"),
        ("Shape", "r", "s"),
        ("Clip", "s zero", "size"),
        ("Cast", "size", "floats", {"to": 1}),
        ("ReduceSum", "floats", "sum", {"keepdims": 0}),
        ("MatMul", "r v", "t"),
        ("Mul", "t sum", "y"),
    ]
    network = OnnxNetwork(model(nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, None, weights))
    assert [layer.name for layer in network.candidates(rng.normal(size=(5, 4)).astype(np.float32))] == ["r"]


def test_samples_that_come_second_are_noticed_whatever_their_number(rng):
    nodes = [
        ("Transpose", "x", "t", {"perm": [1, 0, 2]}),
        ("Relu", "t", "r"),
        ("Transpose", "r", "y", {"perm": [1, 0, 2]}),
    ]
    network = OnnxNetwork(model(nodes, {"x": (TensorProto.FLOAT, ["n", 6, 3])}))
    for n in (4, 6):
        with pytest.raises(InvalidInput, match=r"r must have one row for each"), network.watch(None) as run:
            run(rng.normal(size=(n, 6, 3)).astype(np.float32))
