"""Guards of real networks, the same one in each framework: equal patterns, equal decisions, and one graph of all of it."""

import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")

from onnx import TensorProto  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402
from torch import nn  # noqa: E402

from terrafirma.capture.record import record  # noqa: E402
from terrafirma.errors import InvalidInput  # noqa: E402
from terrafirma.guard.guard import Guard  # noqa: E402
from terrafirma.scores.subfunction import SubfunctionBound  # noqa: E402
from tests import onnx_nets  # noqa: E402

pytestmark = pytest.mark.jit
KINDS = ("cnn", "relu", "gelu")
LAYERS = {"cnn": ["5", "8"], "relu": None, "gelu": "1.*"}
ONNX_LAYERS = {"cnn": ["node_relu_1", "node_relu_2"], "relu": None, "gelu": "*"}


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A network in torch and as an ONNX file, and labelled data of which it gets some wrong."""
    kind = request.param
    net, x, _ = onnx_nets.torch_net(kind)
    path = tmp_path_factory.mktemp(kind) / "net.onnx"
    path.write_bytes(onnx_nets.exported_net(kind))
    rng = np.random.default_rng(1)
    near = [0.1] * 8 + [3.0] * 4  # the last third far from training, and mostly wrong
    X = np.concatenate([x + scale * rng.normal(size=x.shape).astype(np.float32) for scale in near])
    y = record(net, X).predictions
    wrong = rng.random(len(y)) < np.where(np.arange(len(y)) < 320, 0.02, 0.7)
    y[wrong] = (y[wrong] + 1) % 3
    return kind, net, path, X, y


def fitted(model, layers, X, y):
    guard = Guard(model, SubfunctionBound(4.0), layers=layers)
    return guard.fit((X[:200], y[:200]), (X[200:], y[200:]), risk=0.2, confidence=0.9, verbose=False)


@pytest.mark.parametrize("reduce", ["none", "any", "mean"])
def test_torch_and_onnx_give_the_same_patterns(case, reduce):
    kind, net, path, X, y = case
    a = record(net, (X, y), LAYERS[kind], reduce)
    b = record(path, (X, y), ONNX_LAYERS[kind], reduce)
    assert a.widths == b.widths
    assert np.mean(a.patterns.to_bool() != b.patterns.to_bool()) <= 1e-5
    assert np.array_equal(a.errors, b.errors)
    assert 0 < a.patterns.to_bool().mean() < 1


def test_torch_and_onnx_give_the_same_decisions(case):
    kind, net, path, X, y = case
    a = fitted(net, LAYERS[kind], X, y).predict(X)
    b = fitted(path, ONNX_LAYERS[kind], X, y).predict(X)
    assert 0 < a.accepted.mean() < 1
    same = np.isclose(a.unreliability, b.unreliability, rtol=0, atol=1e-9)
    assert same.mean() > 0.99  # a bit of rounding may flip a pattern
    assert np.array_equal(a.accepted[same], b.accepted[same])
    np.testing.assert_allclose(a.output, b.output, atol=1e-4)


@pytest.mark.parametrize("source", ["torch", "onnx"])
def test_one_graph_decides_as_the_guard(case, source, tmp_path):
    kind, net, path, X, y = case
    guard = fitted(net, LAYERS[kind], X, y) if source == "torch" else fitted(path, ONNX_LAYERS[kind], X, y)
    guard.export(tmp_path / "guarded.onnx", X[:200])
    session = ort.InferenceSession(tmp_path / "guarded.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["output", "unreliability", "accepted"]
    output, unreliability, accepted = session.run(None, {session.get_inputs()[0].name: X[200:]})
    verdict = guard.predict(X[200:])
    assert unreliability.dtype == np.float64
    np.testing.assert_allclose(output, verdict.output, atol=1e-4)
    same = np.isclose(unreliability, verdict.unreliability, rtol=0, atol=1e-4)
    assert same.mean() > (0.99 if source == "torch" else 0.999)
    assert np.array_equal(accepted[same], verdict.accepted[same])
    assert 0 < accepted.mean() < 1


def test_an_mlp_is_the_same_network_in_scikit_learn_torch_and_onnx(rng, tmp_path):
    X = rng.normal(size=(900, 6)).astype(np.float32)
    y = (X[:, 0] + 0.3 * X[:, 1] > 0) + (X[:, 2] > 0.5).astype(int)
    mlp = MLPClassifier((24, 16), solver="lbfgs", max_iter=1000, random_state=0).fit(X[:300], y[:300])
    mlp.coefs_, mlp.intercepts_ = (
        [array.astype(np.float32) for array in arrays] for arrays in (mlp.coefs_, mlp.intercepts_)
    )
    parts, nodes, weights, x = [], [], {}, "x"
    for i, (W, b) in enumerate(zip(mlp.coefs_, mlp.intercepts_, strict=True)):
        linear = nn.Linear(*W.shape)
        linear.weight.data, linear.bias.data = torch.tensor(W.T), torch.tensor(b)
        parts += [linear, nn.ReLU()]
        weights |= {f"W{i}": W, f"b{i}": b}
        nodes += [("Gemm", f"{x} W{i} b{i}", f"h{i}"), ("Relu", f"h{i}", f"r{i}")]
        x = f"r{i}"
    graph = onnx_nets.model(
        nodes[:-1], {"x": (TensorProto.FLOAT, ["n", 6])}, {"h2": (TensorProto.FLOAT, ["n", 3])}, weights
    )
    onnx.save(graph, tmp_path / "mlp.onnx")
    networks = {"sklearn": mlp, "torch": nn.Sequential(*parts[:-1]), "onnx": tmp_path / "mlp.onnx"}
    recorded = {name: record(model, (X, y)) for name, model in networks.items()}
    verdicts = {name: fitted(model, None, X, y).predict(X) for name, model in networks.items()}
    for name in ("torch", "onnx"):
        assert np.array_equal(recorded[name].patterns.words, recorded["sklearn"].patterns.words)
        assert np.array_equal(recorded[name].errors, recorded["sklearn"].errors)
        assert np.array_equal(verdicts[name].unreliability, verdicts["sklearn"].unreliability)
        assert np.array_equal(verdicts[name].accepted, verdicts["sklearn"].accepted)
    assert np.ptp(verdicts["onnx"].unreliability) > 0.5
    with pytest.raises(
        InvalidInput, match=r"Only torch and ONNX networks can be exported\. Got MLPClassifier; use guard\.predict\."
    ):
        fitted(mlp, None, X, y).export(tmp_path / "no.onnx")


def test_an_onnx_guard_is_whole_in_its_folder(case, tmp_path):
    kind, _, path, X, y = case
    guard = fitted(path, ONNX_LAYERS[kind], X, y)
    guard.save(tmp_path / "g")
    path.rename(path.with_suffix(".moved"))
    try:
        loaded = Guard.load(tmp_path / "g")
        assert np.array_equal(loaded.predict(X).unreliability, guard.predict(X).unreliability)
        loaded.save(tmp_path / "g")
        assert sorted(p.suffix for p in (tmp_path / "g").iterdir()) == [".json", ".onnx", ".safetensors"]
    finally:
        path.with_suffix(".moved").rename(path)


def test_a_torch_guard_is_exported_by_running_it(case, tmp_path):
    kind, net, _, X, y = case
    message = r"example must be some inputs of the network: it is exported by running it\. Got none\."
    with pytest.raises(InvalidInput, match=message):
        fitted(net, LAYERS[kind], X, y).export(tmp_path / "g.onnx")


def test_dict_batches_reach_networks_by_name(rng):
    class TwoInputs(nn.Module):
        """Named inputs, and a dict of outputs."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 16), nn.Linear(2, 16), nn.Linear(16, 2)

        def forward(self, left, right):
            return {"logits": self.head(torch.relu(self.a(left) + self.b(right)))}

    torch.manual_seed(0)
    net = TwoInputs()
    left, right = rng.normal(size=(300, 3)).astype(np.float32), rng.normal(size=(300, 2)).astype(np.float32)
    data = {"left": left, "right": right}
    y = record(net, data).predictions
    held_out = [{name: value[::-1].copy() for name, value in {**data, "labels": y}.items()}]
    guard = Guard(net, SubfunctionBound(2.0)).fit({**data, "labels": y}, held_out, verbose=False)
    verdict = guard.predict({name: torch.tensor(value) for name, value in data.items()})
    assert isinstance(verdict.accepted, torch.Tensor)
    assert np.array_equal(verdict.prediction.numpy(), y)
    wrapped = guard.wrap()(**{name: torch.tensor(value) for name, value in data.items()})
    assert torch.equal(wrapped.unreliability, verdict.unreliability)


def test_several_inputs_reach_a_wrapped_network_by_position(rng):
    class Sum(nn.Module):
        """Of two inputs."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 16), nn.Linear(2, 16), nn.Linear(16, 2)

        def forward(self, left, right):
            return self.head(torch.relu(self.a(left) + self.b(right)))

    torch.manual_seed(0)
    net = Sum()
    X = tuple(torch.tensor(rng.normal(size=(200, n)), dtype=torch.float32) for n in (3, 2))
    y = record(net, (X, None)).predictions
    halves = [(tuple(x[rows] for x in X), y[rows]) for rows in (slice(100), slice(100, 200))]
    guard = Guard(net, SubfunctionBound(2.0)).fit(*halves, verbose=False)
    output, unreliability, accepted = guard.wrap()(*X)
    assert torch.equal(output.argmax(1), torch.tensor(y))
    assert np.array_equal(unreliability.numpy(), guard.unreliability((X, y)))
    assert accepted.dtype == torch.bool


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("no torch here")

sys.meta_path.insert(0, NoTorch())
import numpy as np, terrafirma

X, y = (np.load(name) for name in sys.argv[2:4])
guard = terrafirma.Guard(sys.argv[1], terrafirma.SubfunctionBound(4.0))
guard.fit((X[:200], y[:200]), (X[200:], y[200:]), risk=0.5, verbose=False)
guard.export(sys.argv[4])
np.save(sys.argv[5], guard.predict(X).unreliability)
assert "torch" not in sys.modules
"""


def test_onnx_networks_need_no_torch(case, tmp_path):
    _, _, path, X, y = case
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    files = [tmp_path / name for name in ("X.npy", "y.npy", "guarded.onnx", "u.npy")]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, path, *files], check=True)
    guard = Guard(path, SubfunctionBound(4.0)).fit((X[:200], y[:200]), (X[200:], y[200:]), risk=0.5, verbose=False)
    assert np.array_equal(np.load(files[-1]), guard.predict(X).unreliability)


def test_layers_of_equal_width_are_not_mistaken_for_each_other(tmp_path):
    """Two samples alone could not tell them apart."""
    torch.manual_seed(3)
    net = nn.Sequential(
        *(part for _ in range(3) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())),
        nn.Flatten(),
        nn.Linear(16 * 16, 3),
    )
    X = np.random.default_rng(0).normal(size=(300, 16, 4, 4)).astype(np.float32)
    y = record(net, X).predictions
    guard = Guard(net, SubfunctionBound(2.0), layers="3", reduce="any").fit(
        (X[:150], y[:150]), (X[150:], y[150:]), verbose=False
    )
    guard.export(tmp_path / "g.onnx", X[:2])
    session = ort.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    (unreliability,) = session.run(["unreliability"], {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(unreliability, guard.predict(X).unreliability, atol=1e-4)


def test_a_transformer_with_a_class_token_is_exported(tmp_path):
    class Vision(nn.Module):
        """Patches, a class token and positions."""

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 8)
            self.token, self.place = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 6, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), self.up(x)], dim=1) + self.place
            return self.head(self.encoder(x)[:, 0])

    torch.manual_seed(0)
    net, X = Vision(), np.random.default_rng(0).normal(size=(200, 5, 6)).astype(np.float32)
    y = record(net, X).predictions
    guard = Guard(net, SubfunctionBound(4.0)).fit((X[:100], y[:100]), (X[100:], y[100:]), verbose=False)
    guard.export(tmp_path / "g.onnx", X[:8])
    session = ort.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    (unreliability,) = session.run(["unreliability"], {session.get_inputs()[0].name: X})
    assert np.isclose(unreliability, guard.predict(X).unreliability, atol=1e-4).mean() > 0.99


def test_names_with_brackets_are_names(tmp_path, rng):
    weights = {f"w{i}": rng.normal(size=(4, 6) if i == 1 else (6, 6)).astype(np.float32) for i in (1, 2)}
    weights["w3"] = rng.normal(size=(6, 3)).astype(np.float32)
    nodes = [
        ("MatMul", "x w1", "h1"),
        ("Relu", "h1", "r1", {}, "layer0/relu"),
        ("MatMul", "r1 w2", "h2"),
        ("Relu", "h2", "r2", {}, "layer[0]/relu"),
        ("MatMul", "r2 w3", "y"),
    ]
    onnx.save(onnx_nets.model(nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, None, weights), tmp_path / "net.onnx")
    X = rng.normal(size=(100, 4)).astype(np.float32)
    y = record(tmp_path / "net.onnx", X).predictions
    guard = Guard(tmp_path / "net.onnx", SubfunctionBound(2.0)).fit((X[:50], y[:50]), (X[50:], y[50:]), verbose=False)
    assert guard.state.layer_names == ("layer[0]/relu",)
    assert guard.predict(X).unreliability.shape == (100,)
    guard.export(tmp_path / "g.onnx")
    session = ort.InferenceSession(tmp_path / "g.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(["unreliability"], {"x": X})[0], guard.predict(X).unreliability, atol=1e-4)


def test_recordings_say_how_maps_were_reduced(case):
    kind, net, _, X, y = case
    train, rest = record(net, (X[:200], y[:200]), LAYERS[kind], "any"), (X[200:], y[200:])
    guard = Guard(net, SubfunctionBound(4.0)).fit(train, rest, risk=0.5, verbose=False)
    assert guard.state.reduce == "any"
    assert guard.predict(X).unreliability.shape == (len(X),)
