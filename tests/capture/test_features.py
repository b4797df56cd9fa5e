"""What a recording holds beside patterns: features of layers by name, the last linear layer, and inputs."""

import re
from collections import OrderedDict

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from terrafirma.capture import parts as parts_module
from terrafirma.capture.heads import find_head
from terrafirma.capture.record import record
from terrafirma.capture.sklearn import hidden_activations
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from tests.onnx_nets import exported_net, model, torch_net
from tests.onnx_nets import mlp as onnx_mlp

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


class Calls(nn.Module):
    """A module that runs a function of itself and x."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def cnn():
    parts = OrderedDict(
        conv=nn.Conv2d(3, 4, 3, padding=1),
        act=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(2),
        conv2=nn.Conv2d(4, 6, 3),
        act2=nn.ReLU(inplace=True),
        flat=nn.Flatten(),
        fc=nn.Linear(24, 10),
        act3=nn.ReLU(inplace=True),
        head=nn.Linear(10, 3),
    )
    return nn.Sequential(parts)


def outputs_by_hand(net, x):
    """What each part of a Sequential gives; in-place parts cannot change it."""
    found = {}
    net.eval()
    with torch.no_grad():
        for name, part in net.named_children():
            x = found[name] = part(x.clone())
    return {name: value.numpy().copy() for name, value in found.items()}


class TestFeaturesByName:
    @pytest.mark.parametrize("reduce", ["none", "any", "mean"])
    @pytest.mark.parametrize("layers", [None, "act2", ["*"]])
    def test_they_are_pooled_and_patterns_are_as_without_them(self, layers, reduce):
        net, x = cnn(), torch.randn(9, 3, 8, 8)
        bare = record(net, x, layers, reduce)
        rec = record(net, x, layers, reduce, features=["fc", "act", "conv", "act2", "pool"], batch_size=4)
        assert list(rec.layers) == ["conv", "act", "pool", "act2", "fc"]
        expected = outputs_by_hand(net, x)
        for name, got in rec.layers.items():
            means = expected[name].reshape(9, expected[name].shape[1], -1).mean(axis=2)
            np.testing.assert_allclose(got, means, atol=1e-6)
            assert got.dtype == np.float32
        assert rec.features is rec.layers["fc"]
        assert (rec.layer_names, rec.widths) == (bare.layer_names, bare.widths)
        np.testing.assert_array_equal(rec.patterns.words, bare.patterns.words)
        np.testing.assert_allclose(rec.outputs, bare.outputs, atol=1e-6)
        assert repr(rec).endswith("features; features of 5 layers>")

    def test_globs_are_for_gates_and_several_calls_have_numbers(self):
        def forward(self, x):
            return self.b(self.relu(self.a(self.relu(x))))

        net, x = Calls(forward, relu=nn.ReLU(), a=nn.Linear(6, 5), b=nn.Linear(5, 4)), torch.randn(7, 6)
        assert list(record(net, x, features="*").layers) == ["relu#1", "relu#2"]
        rec = record(net, x, "relu#1", features=["relu#2", "b"])
        assert (rec.layer_names, list(rec.layers)) == (("relu#1",), ["relu#2", "b"])
        np.testing.assert_allclose(rec.features, rec.outputs, atol=1e-6)

    def test_tokens_have_their_channels_last(self):
        net, x = torch_net("gelu")[:2]
        rec = record(net, x, features=["0", "1.layers.0", "1.layers.1.gelu"])
        with torch.no_grad():
            embedded = net[0](torch.from_numpy(x))
        np.testing.assert_allclose(rec.layers["0"], embedded.mean(1).numpy(), atol=1e-6)
        assert [value.shape for value in rec.layers.values()] == [(40, 12), (40, 12), (40, 20)]

    def test_what_is_no_map_is_looked_for_in_the_named_parts_alone(self):
        depths = []

        def forward(self, x):
            depths.append(_len_torch_dispatch_stack())
            return self.last(self.act(self.first(x)))

        net = Calls(forward, first=nn.Linear(4, 6), act=nn.ReLU(), last=nn.Linear(6, 5))
        for shape, expected in (
            ((4,), [0, 0, 0]),
            ((3, 4), [0, 1, 1, 1, 1]),
        ):  # with maps everywhere, and the first sample alone
            depths.clear()
            x = torch.randn(6, *shape)
            rec = record(net, x, "act", features=["first", "last"], batch_size=2)
            assert depths == expected
            with torch.no_grad():
                given = net.first(x)
            np.testing.assert_allclose(rec.layers["first"], given.reshape(6, -1, 6).mean(1).numpy(), atol=1e-6)
            np.testing.assert_array_equal(rec.patterns.to_bool(), (given > 0).reshape(6, -1).numpy())

    @pytest.mark.parametrize("features", ["norm", "layer.norm2", True])
    def test_samples_that_come_second_are_noticed(self, features):
        """Though the patterns are of a layer where they come first."""

        def forward(self, x):
            return self.last(self.head(self.norm(self.layer(x.transpose(0, 1))).transpose(0, 1).mean(1)).relu())

        layer = nn.TransformerEncoderLayer(8, 2, 16)
        net = Calls(forward, layer=layer, norm=nn.LayerNorm(8), head=nn.Linear(8, 5), last=nn.Linear(5, 2))
        x = torch.randn(16, 16, 8)
        if features is True:
            assert record(net, x, features=True).features.shape == (16, 5)
            return
        message = (
            "Samples must not depend on each other. The first one of a batch cannot run alone (features must name gates, or "
            f"modules that give a tensor with one row for each of the 1 samples. Got {features!r}, which gives Tensor (16, 1, "
            "8); name another); let samples come first (batch_first=True)."
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
            record(net, x, features=features, batch_size=16)
        assert record(net, x[:1, :1], features=features).features.shape == (1, 8)

    @pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
    def test_samples_that_depend_on_each_other_are_noticed(self, precision):
        def forward(self, x):
            return self.fc(x - self.share * x.mean(0)).mean(1).relu()

        net, x = Calls(forward, fc=nn.Linear(8, 6)).to(precision), torch.randn(9, 5, 8)
        net.share = 0.0
        assert record(net, x, features="fc").features.shape == (9, 6)
        net.share = 1.0
        message = (
            "Samples must not depend on each other. Got layer 'fc', where the first sample of a batch has other features when "
            "it runs alone; let samples come first (batch_first=True)."
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
            record(net, x, features="fc")

    def test_samples_that_come_second_in_an_onnx_file_are_noticed(self, rng):
        shapes = {"x": (TensorProto.FLOAT, ["n", "t", 4])}, {"y": (TensorProto.FLOAT, ["n", 3])}
        w = {"w": rng.normal(size=(4, 3)).astype(np.float32)}
        nodes = [
            ("Transpose", "x", "s", {"perm": [1, 0, 2]}),
            ("MatMul", "s w", "h"),
            ("Transpose", "h", "g", {"perm": [1, 0, 2]}),
            ("ReduceMean", "g", "m", {"axes": [1], "keepdims": 0}),
            ("Relu", "m", "y"),
        ]
        proto, x = model(nodes, *shapes, w), rng.normal(size=(8, 8, 4)).astype(np.float32)
        assert record(proto, x, features="g").features.shape == (8, 3)
        message = (
            "Samples must not depend on each other. The first one of a batch cannot run alone (h must have one row for"
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
            record(proto, x, features="h")

    def test_of_an_onnx_file(self):
        net, x, _ = torch_net("cnn")
        proto = onnx.load_from_string(exported_net("cnn"))
        conv = next(node for node in proto.graph.node if node.op_type == "Conv")
        bare, rec = record(proto, x), record(proto, x, features=["*", conv.name], batch_size=16)
        with torch.no_grad():
            x = torch.from_numpy(x)
            net.eval()
            given = [net[:1](x), net[:3](x), net[:6](x), net[:9](x)]
            expected = [value.mean((2, 3)) if value.ndim > 2 else value for value in given]
            net.train()
        for name, got, value in zip(rec.layers, rec.layers.values(), expected, strict=True):
            if name != conv.name:  # an exporter may fold the norm that follows into it
                np.testing.assert_allclose(got, value.numpy(), atol=1e-5)
            assert got.shape == value.shape
        assert rec.features is list(rec.layers.values())[-1]
        assert rec.layer_names == bare.layer_names == tuple(rec.layers)[-1:]
        np.testing.assert_array_equal(rec.patterns.words, bare.patterns.words)

    def test_of_a_scikit_learn_mlp(self, rng):
        x = rng.normal(size=(50, 3))
        net = MLPClassifier((12, 8, 5), max_iter=5, random_state=0).fit(x, np.arange(50) % 3)
        bare, rec = record(net, x), record(net, x, features=["hidden_2", "hidden_1"])
        first, second, _ = hidden_activations(net, x)
        assert list(rec.layers) == ["hidden_1", "hidden_2"]
        np.testing.assert_array_equal(rec.layers["hidden_1"], first)
        np.testing.assert_array_equal(rec.features, second)
        assert (rec.layer_names, rec.widths) == (("hidden_3",), (5,))
        np.testing.assert_array_equal(rec.patterns.words, bare.patterns.words)

    def test_saved_and_loaded_they_keep_their_order(self, tmp_path):
        rec = record(cnn(), torch.randn(9, 3, 8, 8), features=["head", "conv", "act2"], path=tmp_path / "r")
        loaded = Recorded.load(tmp_path / "r")
        assert list(loaded.layers) == ["conv", "act2", "head"]
        assert loaded.features is loaded.layers["head"]
        np.testing.assert_array_equal(loaded.features, rec.features)

    @pytest.mark.parametrize(
        ("features", "message"),
        [
            (
                "act4",
                (
                    "features must name gated layers that run. Got 'act4'; near it are body.act, body.act3, body.act2 "
                    "(3 in all: terrafirma.layers lists them)."
                ),
            ),
            (
                "unused",
                (
                    "features must name layers that run. Got 'unused', a module that gave nothing on these inputs: it never "
                    "ran, or runs inside TorchScript, where only gates are seen. The last modules that ran: body, body.conv, "
                    "body.act, body.pool, body.conv2, body.act2, body.flat, body.fc, body.act3, body.head."
                ),
            ),
            (
                "pair",
                (
                    "features must name gates, or modules that give a tensor with one row for each of the 4 samples. Got "
                    "'pair', which gives tuple of int; name another."
                ),
            ),
            ([], "features must be a name, or a list of names. Got []; give True for those of layers."),
            (None, "features must be a name, or a list of names. Got None; give True for those of layers."),
        ],
    )
    def test_names_that_are_wrong(self, features, message):
        net = Calls(
            lambda self, x: (self.pair(x), self.body(x))[1],
            pair=Calls(lambda self, x: (1,)),
            body=cnn(),
            unused=nn.Linear(2, 2),
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):  # a note may follow
            record(net, torch.randn(4, 3, 8, 8), features=features)

    def test_names_that_other_networks_lack(self, rng):
        x = rng.normal(size=(20, 4)).astype(np.float32)
        net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5).fit(x, x[:, 0])
        for network, near in ((net, "hidden_1 (1"), (onnx_mlp(rng), "r1 (1")):
            message = f"features must name gated layers that run. Got 'relu'; near it are {near} in all: "
            with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):
                record(network, x, features="relu")


def check_head(rec):
    """A head is what it says, to rounding."""
    W, b = rec.head
    assert W.shape == (rec.outputs.shape[1], rec.features.shape[1])
    assert b.shape == W.shape[:1]
    np.testing.assert_allclose(rec.features @ W.T + b, rec.outputs, atol=1e-4 * np.ptp(rec.outputs))


class TestHead:
    def test_of_a_torch_network(self, tmp_path):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
        rec = record(net, torch.randn(20, 5), features=True, path=tmp_path / "r")
        for W, b in (rec.head, Recorded.load(tmp_path / "r").head):
            np.testing.assert_array_equal(W, net[-1].weight.detach().numpy())
            np.testing.assert_array_equal(b, net[-1].bias.detach().numpy())
        assert repr(rec).endswith("; head>")

    def test_of_as_many_features_as_classes_the_right_one_is_found(self):
        """And not the middle one, whose weights have the same shape, nor a bias that is but near."""
        net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6))
        net[-1].near = nn.Parameter(net[-1].bias.detach() * (1 + 1e-5))
        rec = record(net, torch.randn(20, 5), "3", features=True)
        np.testing.assert_array_equal(rec.head[0], net[-1].weight.detach().numpy())
        np.testing.assert_array_equal(rec.head[1], net[-1].bias.detach().numpy())

    def test_of_pooled_maps(self):
        def forward(self, x):
            return self.fc(self.conv(x).relu().mean((2, 3)))

        def convolved(self, x):
            return self.fc(self.conv(x).relu()).mean((2, 3))

        x, conv = torch.randn(20, 3, 8, 8), nn.Conv2d(3, 6, 3)
        for net in (Calls(forward, conv=conv, fc=nn.Linear(6, 4)), Calls(convolved, conv=conv, fc=nn.Conv2d(6, 4, 1))):
            check_head(record(net, x, features="relu"))
            assert record(net, x, features=True).head is None  # of every position

    @pytest.mark.parametrize("kind", ["functional", "transposed", "without bias", "weight norm", "float64"])
    def test_however_it_is_written(self, kind):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3, bias=kind != "without bias"))
        if kind == "weight norm":
            net[2] = nn.utils.parametrizations.weight_norm(net[2])
        elif kind == "float64":
            net = net.double()
        elif kind in ("functional", "transposed"):
            net[2] = Calls(lambda self, x: x @ self.w + self.b if kind == "transposed" else x @ self.w.T + self.b)
            net[2].w = nn.Parameter(torch.randn(8, 3) if kind == "transposed" else torch.randn(3, 8))
            net[2].b = nn.Parameter(torch.randn(3))
        check_head(record(net, torch.randn(20, 5), features=True))

    @pytest.mark.parametrize(
        "last",
        [
            nn.Sequential(nn.Linear(8, 3), nn.Softmax(1)),
            nn.Sequential(nn.Linear(8, 3), nn.Tanh()),
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)),
            nn.Sequential(nn.Linear(8, 4), nn.Unflatten(1, (2, 2))),
            nn.Identity(),
        ],
        ids=["softmax", "tanh", "norm between", "not a vector", "no layer"],
    )
    def test_none_where_there_is_none(self, last):
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), last)
        rec = record(net, torch.randn(20, 5), features=True)
        assert rec.head is None
        assert rec.features.shape == (20, 8)

    def test_none_of_other_layers_or_without_features(self):
        net, x = cnn(), torch.randn(9, 3, 8, 8)
        assert record(net, x).head is None
        assert record(net, x, features="act2").head is None
        assert record(net, x, features=["act2", "act3"]).head is not None
        assert record(net, x, features=["act3", "head"]).head is None  # the last of them is the output

    def test_of_an_onnx_file(self, rng, tmp_path):
        x = rng.normal(size=(30, 4)).astype(np.float32)
        gemm = onnx_mlp(rng)
        rec = record(gemm, x, features=True)
        check_head(rec)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in gemm.graph.initializer}
        np.testing.assert_array_equal(rec.head[0], weights["w2"].T)
        np.testing.assert_array_equal(rec.head[1], weights["b2"])
        onnx.save(gemm, tmp_path / "n.onnx", save_as_external_data=True, location="n.data", size_threshold=0)
        np.testing.assert_array_equal(record(tmp_path / "n.onnx", x, features=True).head[0], rec.head[0])

        w = {"w": rng.normal(size=(3, 4)).astype(np.float32), "b": rng.normal(size=(1, 3)).astype(np.float32)}
        shapes = {"x": (TensorProto.FLOAT, ["n", 4])}, {"y": (TensorProto.FLOAT, ["n", 3])}
        for nodes in (
            [("Gemm", "r w b", "y", {"transB": 1})],
            [("Gemm", "r w", "y", {"transB": 1})],
            [("Transpose", "w", "v"), ("MatMul", "r v", "h"), ("Add", "h b", "y")],
        ):
            check_head(record(model([("Relu", "x", "r"), *nodes], *shapes, w), x, features=True))
        nodes = [("Relu", "x", "r"), ("Gemm", "r w b", "h", {"transB": 1}), ("Tanh", "h", "y")]
        assert record(model(nodes, *shapes, w), x, features=True).head is None

    def test_none_of_a_quantised_onnx_file(self, rng):
        weights = {
            "w": rng.integers(-9, 9, (4, 3)).astype(np.int8),
            "scale": np.array(0.1, np.float32),
            "zero": np.array(0, np.int8),
        }
        nodes = [("Relu", "x", "r"), ("DequantizeLinear", "w scale zero", "v"), ("MatMul", "r v", "y")]
        shapes = {"x": (TensorProto.FLOAT, ["n", 4])}, {"y": (TensorProto.FLOAT, ["n", 3])}
        x = rng.normal(size=(30, 4)).astype(np.float32)
        assert record(model(nodes, *shapes, weights), x, features=True).head is None

    def test_of_a_scikit_learn_mlp(self, rng):
        X = rng.normal(size=(90, 3))
        few = np.exp(0.3 * X[:, 0])
        for y, kind in ((np.arange(90) % 3, MLPClassifier), (X[:, 0] > 0, MLPClassifier), (few, MLPRegressor)):
            net = make_pipeline(StandardScaler(), kind(hidden_layer_sizes=(8, 6), max_iter=5, random_state=0))
            rec = record(net.fit(X, y), X, features=True)
            check_head(rec)
            assert rec.head[0].dtype == np.float64
            assert record(net, X, features="hidden_1").head is None
        net = MLPRegressor(hidden_layer_sizes=(8, 6), max_iter=5, random_state=0).fit(X, few)
        net.out_activation_ = "exp"  # as of a Poisson regression
        assert record(net, X, features=True).head is None

    def test_candidates_are_tried_on_rows_of_all_the_data(self, rng):
        """Where the first rows are all alike, wrong weights fit them."""
        W, wrong = rng.normal(size=(2, 3, 5))
        x = np.vstack([np.zeros((900, 5)), rng.normal(size=(100, 5))])
        found, b = find_head(x, x @ W.T, [wrong, W], [])
        np.testing.assert_array_equal(found, W)
        np.testing.assert_array_equal(b, np.zeros(3))
        assert find_head(x, np.where(x[:, :3] > 0, np.inf, 0), [W], []) is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("pooled", [False, True])
    def test_of_half_precision(self, dtype, pooled):
        if pooled:
            parts = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
            layers, x = "1", torch.randn(50, 3, 8, 8)
        else:
            parts, layers, x = [nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()], True, torch.randn(50, 5)
        net = nn.Sequential(*parts, nn.Linear(16, 16)).to(dtype)
        rec = record(net, x, features=layers)
        np.testing.assert_array_equal(rec.head[0], net[-1].weight.detach().float().numpy())
        np.testing.assert_array_equal(rec.head[1], net[-1].bias.detach().float().numpy())
        net.append(nn.Softmax(1))
        assert record(net, x, features=layers).head is None

    def test_of_an_onnx_file_in_half_precision(self, rng):
        shapes = {"x": (TensorProto.FLOAT16, ["n", 4])}, {"y": (TensorProto.FLOAT16, ["n", 3])}
        w = {"w": rng.normal(size=(4, 3)).astype(np.float16), "b": rng.normal(size=3).astype(np.float16)}
        proto = model([("Relu", "x", "r"), ("Gemm", "r w b", "y")], *shapes, w)
        rec = record(proto, rng.normal(size=(50, 4)).astype(np.float16), features=True)
        np.testing.assert_array_equal(rec.head[0], w["w"].T.astype(np.float32))

    def test_what_counts_as_the_outputs(self, rng):
        """Outputs may be off by rounding, of their spread and of their size, and by no more."""
        x, W, b = rng.normal(size=(60, 5)), rng.normal(size=(3, 5)), rng.normal(size=3)
        y, off = x @ W.T + b, rng.choice([-1.0, 1.0], (60, 3))
        spread = np.ptp(y, axis=0).max()
        assert find_head(x, y + 0.9e-4 * spread * off, [W], [b]) is not None
        assert find_head(x, y + 1.2e-4 * spread * off, [W], [b]) is None
        far = (y + 1e5).astype(np.float32)
        assert np.abs(far - y - 1e5).max() > 1e-4 * spread
        assert find_head(x, far, [W], [b + 1e5]) is not None
        assert find_head(x, far + 0.3 * off, [W], [b + 1e5]) is None


class TestInputs:
    @pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
    def test_they_are_kept_as_they_are(self, rng, dtype):
        x = (100 * rng.random((20, 5))).astype(dtype)
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        net = net if dtype != np.uint8 else Calls(lambda self, x: self.net(x.float()), net=net)
        for given in (x, torch.from_numpy(x), [x[:9], x[9:]]):
            rec = record(net, given, inputs=True, batch_size=7)
            np.testing.assert_array_equal(rec.inputs, x)
            assert rec.inputs.dtype == dtype
        assert record(net, x).inputs is None

    def test_a_network_that_writes_to_its_inputs_cannot_change_them(self):
        x = torch.randn(20, 5)
        given = x.clone()
        rec = record(nn.Sequential(nn.ReLU(inplace=True), nn.Dropout()), given, inputs=True, dropout=0.5)
        assert torch.equal(given, x)
        np.testing.assert_array_equal(rec.inputs, x.numpy())

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (
                {"x": torch.zeros(4, 3)},
                (
                    "inputs=True keeps inputs that are one array. Got dict of x: Tensor (4, 3); leave it out, or wrap the "
                    "network in one that takes an array."
                ),
            ),
            (
                [((np.zeros((4, 3)), np.zeros((4, 3))), np.zeros(4, int))],
                (
                    "inputs=True keeps inputs that are one array. Got tuple of ndarray (4, 3), ndarray (4, 3); leave it out, "
                    "or wrap the network in one that takes an array."
                ),
            ),
        ],
    )
    def test_they_must_be_one_array(self, inputs, message):
        net = Calls(lambda self, x, z=None: torch.relu(x))
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(net, inputs, inputs=True)

    def test_they_must_be_numbers(self, rng):
        from sklearn.preprocessing import OneHotEncoder

        words = np.array(["a", "b", "c"])[rng.integers(0, 3, (30, 2))]
        net = make_pipeline(OneHotEncoder(sparse_output=False), MLPClassifier((4,), max_iter=2))
        net.fit(words, np.arange(30) % 2)
        message = "inputs=True keeps inputs that are numbers. Got <U1; leave it out."
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(net, words, inputs=True)


class Killed(BaseException):
    """As by a signal."""


class TestResuming:
    EVERYTHING = {  # noqa: RUF012
        "features": ["head", "conv", "act2"],
        "inputs": True,
        "dropout": [0.5, 0.1],
        "passes": 3,
        "seed": 4,
        "batch_size": 8,
    }

    @pytest.fixture(autouse=True)
    def part_after_every_batch(self, monkeypatch):
        monkeypatch.setattr(parts_module, "SECONDS", 0.0)

    @pytest.fixture
    def net(self):
        return nn.Sequential(OrderedDict(cnn()._modules, drop=nn.Dropout(), last=nn.Linear(3, 2)))

    @pytest.fixture
    def killed(self, net, tmp_path):
        """A capture that was killed in the third batch."""
        x, path = torch.randn(50, 3, 8, 8), tmp_path / "train.safetensors"
        ran = []

        def die(*_):
            ran.append(1)
            if len(ran) > 2 * 7 + 3:  # in the third batch, after its first pass with dropout
                raise Killed

        hook = net.conv.register_forward_pre_hook(die)
        with pytest.raises(Killed):
            record(net, (x, torch.arange(50) % 2), path=path, **self.EVERYTHING)
        hook.remove()
        assert not path.exists()
        return x, path

    def test_goes_on_with_all_of_it(self, net, killed):
        x, path = killed
        data, ran = (x, torch.arange(50) % 2), []
        whole = record(net, data, **self.EVERYTHING)
        hook = net.conv.register_forward_pre_hook(lambda *_: ran.append(1))
        rec = record(net, data, path=path, **self.EVERYTHING)
        hook.remove()
        assert len(ran) == 7 * (7 - 2) + 2  # and the first samples alone, beside others
        for got in (rec, Recorded.load(path)):
            assert list(got.layers) == list(whole.layers) == ["conv", "act2", "head"]
            assert got.features is got.layers["head"]
            assert got.layer_names == whole.layer_names == ("act3",)
            for name in ("outputs", "labels", "errors", "inputs"):
                np.testing.assert_array_equal(getattr(got, name), getattr(whole, name))
            for name, value in whole.layers.items():
                np.testing.assert_array_equal(got.layers[name], value)
            assert list(got.stochastic) == [0.1, 0.5]
            for p, several in whole.stochastic.items():
                assert several.shape == (3, 50, 2)
                np.testing.assert_array_equal(got.stochastic[p], several)
            np.testing.assert_array_equal(got.head[0], net.last.weight.detach().numpy())
            assert got.source == whole.source
        assert rec.stochastic[0.5].base is not None  # turned, not copied

    @pytest.mark.parametrize(
        "other",
        [
            {"features": True},
            {"features": ["conv", "act2"]},
            {"inputs": False},
            {"dropout": 0.5},
            {"dropout": ()},
            {"passes": 4},
            {"seed": 5},
        ],
        ids=str,
    )
    def test_refuses_other_settings(self, net, killed, other):
        x, path = killed
        message = "It was begun with another network, other layers or other settings; delete the folder to start anew."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, (x, torch.arange(50) % 2), path=path, **self.EVERYTHING | other)
