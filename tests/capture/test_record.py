import re
import signal
import subprocess
import sys
import time
from copy import deepcopy

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, Normalizer, StandardScaler

from terrafirma.capture import parts as parts_module
from terrafirma.capture.record import layers, record
from terrafirma.capture.sklearn import SklearnNetwork, hidden_activations
from terrafirma.errors import InvalidInput
from terrafirma.recorded import ClippedError, Recorded

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(300, 3))
    return X, np.where(X[:, 0] > 0.3, "yes", np.where(X[:, 1] > 0, "maybe", "no"))


@pytest.fixture(scope="module")
def mlp(data):
    return MLPClassifier((12, 8), max_iter=20, random_state=0).fit(*data)


def test_patterns_are_the_signs_of_the_last_hidden_layer(mlp, data):
    rec = record(mlp, data)
    assert np.array_equal(rec.patterns.to_bool(), hidden_activations(mlp, data[0])[-1] > 0)
    assert rec.layer_names == ("hidden_2",)
    assert rec.features is None
    assert rec.layers == {}


def test_several_layers_stand_in_the_order_in_which_they_run(mlp, data):
    rec = record(mlp, data, ["hidden_2", "hidden_1"], features=True)
    first, second = hidden_activations(mlp, data[0])
    assert np.array_equal(rec.patterns.to_bool(), np.hstack([first, second]) > 0)
    assert (rec.layer_names, rec.widths) == (("hidden_1", "hidden_2"), (12, 8))
    assert np.array_equal(rec.layers["hidden_1"], first)
    assert np.array_equal(rec.features, second)


def test_outputs_labels_and_errors_are_the_networks(mlp, data):
    X, y = data
    rec = record(mlp, data)
    probabilities = mlp.predict_proba(X)
    softmax = np.exp(rec.outputs - rec.outputs.max(axis=1, keepdims=True))
    np.testing.assert_allclose(softmax / softmax.sum(axis=1, keepdims=True), probabilities, rtol=1e-10)
    assert np.array_equal(mlp.classes_[rec.predictions], mlp.predict(X))
    assert np.array_equal(mlp.classes_[rec.labels], y)
    assert np.array_equal(rec.errors, mlp.predict(X) != y)
    assert 0 < rec.errors.mean() < 0.7


def test_two_classes_get_an_output_each(data):
    X = data[0]
    y = (X[:, 0] > 0).astype(int)
    net = make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=20, random_state=0)).fit(X, y)
    rec = record(net, (X, y))
    assert rec.outputs.shape == (300, 2)
    np.testing.assert_allclose(1 / (1 + np.exp(rec.outputs[:, 0] - rec.outputs[:, 1])), net.predict_proba(X)[:, 1])
    assert np.array_equal(rec.errors, net.predict(X) != y)


def test_a_regression_needs_no_probabilities(data):
    X = data[0]
    y = X @ [1.0, -2.0, 0.5]
    net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, random_state=0).fit(X, y)
    np.testing.assert_allclose(record(net, X).outputs.ravel(), net.predict(X))
    rec = record(net, (X, y), error=ClippedError(scale=3.0))
    np.testing.assert_allclose(rec.errors, np.minimum(np.abs(net.predict(X) - y) / 3.0, 1))
    assert 0 < rec.errors.max() <= 1
    assert record(net, (X, y)).errors is None


@pytest.mark.parametrize("batch_size", [1, 7, 300, 1000])
def test_batches_never_change_the_result(mlp, data, batch_size):
    X, y = data
    whole, loader = record(mlp, data), [(X[:100], y[:100]), (X[100:101], y[100:101]), (X[101:], y[101:])]
    for other in (record(mlp, data, batch_size=batch_size), record(mlp, loader), record(mlp, iter(loader))):
        assert np.array_equal(whole.patterns.words, other.patterns.words)
        np.testing.assert_allclose(whole.outputs, other.outputs, rtol=1e-12, atol=1e-14)
        assert np.array_equal(whole.errors, other.errors)
        assert whole.source == other.source


def test_the_source_tells_networks_and_data_apart(mlp, data):
    X, y = data
    other = MLPClassifier((12, 8), max_iter=20, random_state=1).fit(X, y)
    a, b, c = record(mlp, data).source, record(other, data).source, record(mlp, (X[1:], y[1:])).source
    assert (a.model, a.reduce) == ("MLPClassifier", "none")
    assert a.data_fingerprint == b.data_fingerprint != c.data_fingerprint
    assert a.model_fingerprint == c.model_fingerprint != b.model_fingerprint
    scaled = [make_pipeline(StandardScaler().fit(scale * X), mlp) for scale in (1, 2)]
    assert SklearnNetwork(scaled[0]).fingerprint() != SklearnNetwork(scaled[1]).fingerprint()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Normalizer("l1"), Normalizer("l2")),
        (FunctionTransformer(np.abs), FunctionTransformer(np.exp)),
        (make_column_transformer((StandardScaler(), [0])), make_column_transformer((MinMaxScaler(), [0]))),
    ],
    ids=["parameters", "functions", "parts"],
)
def test_what_comes_before_the_network_is_part_of_it(mlp, data, one, other):
    X = data[0]
    a, b, again = (SklearnNetwork(make_pipeline(clone(step).fit(X), mlp)).fingerprint() for step in (one, other, one))
    assert a == again != b


def test_the_fingerprint_follows_every_weight(mlp):
    seen = {SklearnNetwork(mlp).fingerprint()}
    for change in ("coefs_", "intercepts_", "classes_"):
        other = deepcopy(mlp)
        if change == "classes_":
            other.classes_ = other.classes_[::-1]
        else:
            getattr(other, change)[0][0] += 1e-9
        seen.add(SklearnNetwork(other).fingerprint())
    assert len(seen) == 4


@pytest.mark.parametrize("batch_size", [1, 129])
def test_a_batch_of_one_sample_has_an_error_too(data, batch_size):
    X = data[0]
    net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5, random_state=0).fit(X, X[:, 0])
    rec = record(net, (X[:130], X[:130, 0]), error=ClippedError(scale=3.0), batch_size=batch_size)
    np.testing.assert_allclose(rec.errors, np.minimum(np.abs(net.predict(X[:130]) - X[:130, 0]) / 3, 1))


def test_an_error_function_sees_outputs_of_the_labels_shape_and_cannot_write(data):
    X = data[0]
    net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5, random_state=0).fit(X, X[:, 0])
    rec = record(net, (X, X[:, 0]), error=lambda outputs, labels: np.minimum(np.abs(outputs - labels), 1))
    np.testing.assert_allclose(rec.errors, np.minimum(np.abs(net.predict(X) - X[:, 0]), 1))

    def greedy(outputs, labels):
        labels[:] = 0

    with pytest.raises(ValueError, match="read-only"):
        record(net, (X, X[:, 0]), error=greedy)


def test_a_network_that_fails_says_on_what(mlp, data):
    with pytest.raises(InvalidInput) as caught:
        record(mlp, data[0][:, :2])
    (note,) = caught.value.__notes__
    assert note == (
        "MLPClassifier was run on a batch of 128 samples, float64 of shape (128, 2). Inputs come as one array, samples first "
        "(X[None] for one), as a dict by name, or as (X, y), of which y is the labels."
    )


def test_candidate_layers_have_names_and_shapes(mlp, data):
    found = layers(mlp, data[0][:2])
    assert [(layer.name, layer.kind, layer.shape, layer.bits) for layer in found] == [
        ("hidden_1", "relu", (12,), None),
        ("hidden_2", "relu", (8,), None),
    ]


def test_progress_shows_rate_and_time_left(mlp, data, capsys):
    record(mlp, data, progress=True)
    text = capsys.readouterr().err
    assert re.search(r"recording MLPClassifier.*300/300.*samples/s.*\d:\d\d", text)
    record(mlp, data)
    assert capsys.readouterr().err == ""


class Killed(BaseException):
    """As by a signal."""


class CountingNetwork(SklearnNetwork):
    """A network that counts the rows it sees, and may be killed after some."""

    def __init__(self, mlp, die_after=None):
        super().__init__(mlp)
        self.rows, self.die_after = 0, die_after

    def _run(self, inputs):
        self.rows += len(inputs)
        if self.die_after is not None and self.rows > self.die_after:
            raise Killed
        return super()._run(inputs)


def test_the_network_runs_once(mlp, data):
    network = CountingNetwork(mlp)
    record(network, data, batch_size=7)
    assert network.rows == 300


SLOW_CAPTURE = """
import sys, time
import numpy as np
from sklearn.neural_network import MLPClassifier
from terrafirma.capture import parts
from terrafirma.capture.record import record

parts.SECONDS = 0.0
saved = np.load(sys.argv[1])
X, y = saved["X"], saved["y"]
mlp = MLPClassifier((12, 8), max_iter=1).fit(X, y)
mlp.coefs_, mlp.intercepts_ = ([saved[f"{letter}{i}"] for i in range(3)] for letter in "Wb")

class Slow:
    def __iter__(self):
        for first in range(0, len(X), 10):
            yield X[first : first + 10], y[first : first + 10]
            time.sleep(0.1)

record(mlp, Slow(), path=sys.argv[2])
"""


class TestResuming:
    @pytest.fixture(autouse=True)
    def part_after_every_batch(self, monkeypatch):
        monkeypatch.setattr(parts_module, "SECONDS", 0.0)

    @pytest.fixture
    def killed(self, mlp, data, tmp_path):
        """A capture that was killed at row 128 of 300."""
        path = tmp_path / "train.safetensors"
        with pytest.raises(Killed):
            record(CountingNetwork(mlp, die_after=128), data, features=True, path=path, batch_size=32)
        assert not path.exists()
        return path

    def test_goes_on_where_it_was_killed(self, mlp, data, killed):
        network = CountingNetwork(mlp)
        rec = record(network, data, features=True, path=killed, batch_size=32)
        assert network.rows == 300 - 128
        whole = record(mlp, data, features=True)
        for got in (rec, Recorded.load(killed)):
            assert np.array_equal(got.patterns.words, whole.patterns.words)
            assert np.array_equal(got.features, whole.features)
            assert np.array_equal(got.labels, whole.labels)
            assert np.array_equal(got.errors, whole.errors)
            assert got.source == whole.source
        assert [file.name for file in killed.parent.iterdir()] == [killed.name]

    def test_errors_are_those_of_the_function_that_is_given_last(self, data, tmp_path):
        X = data[0]
        net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5, random_state=0).fit(X, X[:, 0])
        path = tmp_path / "r.safetensors"
        with pytest.raises(Killed):
            record(CountingNetwork(net, 128), (X, X[:, 0]), error=ClippedError(0.01), path=path, batch_size=32)
        rec = record(net, (X, X[:, 0]), error=ClippedError(10.0), path=path, batch_size=32)
        assert np.array_equal(rec.errors, record(net, (X, X[:, 0]), error=ClippedError(10.0)).errors)

    def test_a_lost_part_is_noticed(self, mlp, data, killed):
        first, *_ = sorted((killed.parent / f"{killed.name}.parts").iterdir())
        first.unlink()
        with pytest.raises(InvalidInput, match="must hold parts of this very capture"):
            record(mlp, data, features=True, path=killed, batch_size=32)

    def test_may_be_killed_again_and_again(self, mlp, data, killed):
        for _ in range(4):
            with pytest.raises(Killed):
                record(CountingNetwork(mlp, die_after=32), data, features=True, path=killed, batch_size=32)
        network = CountingNetwork(mlp)
        record(network, data, features=True, path=killed, batch_size=32)
        assert network.rows == 300 - 128 - 4 * 32

    @pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
    def test_goes_on_after_a_process_was_killed(self, mlp, data, tmp_path):
        path, saved = tmp_path / "train.safetensors", tmp_path / "data.npz"
        weights = {f"W{i}": W for i, W in enumerate(mlp.coefs_)} | {f"b{i}": b for i, b in enumerate(mlp.intercepts_)}
        np.savez(saved, X=data[0], y=data[1], **weights)
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", SLOW_CAPTURE, saved, path])
        parts, deadline = path.with_name(path.name + ".parts"), time.monotonic() + 60
        while len(list(parts.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()  # which nothing can catch
        assert process.wait() == -signal.SIGKILL
        assert not path.exists()
        network = CountingNetwork(mlp)
        rec = record(network, data, path=path, batch_size=10)
        assert 0 < network.rows <= 300 - 2 * 10
        assert np.array_equal(rec.patterns.words, record(mlp, data).patterns.words)

    @pytest.mark.parametrize(
        "change", [lambda X, y: (X + 1e-9, y), lambda X, y: (X[:100], y[:100]), lambda X, y: (X, y[::-1])]
    )
    def test_refuses_other_data(self, mlp, data, killed, change):
        message = (
            f"{killed}.parts must hold parts of these very data. It was begun with other samples, another order or other "
            "batches; delete the folder to start anew."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(mlp, change(*data), features=True, path=killed, batch_size=32)

    def test_refuses_batches_that_cut_across_what_is_there(self, mlp, data, killed):
        with pytest.raises(InvalidInput, match=re.escape("other batches; delete the folder to start anew.")):
            record(mlp, data, features=True, path=killed, batch_size=50)

    @pytest.mark.parametrize("other", [{"layers": "hidden_1"}, {"features": False}])
    def test_refuses_other_settings(self, mlp, data, killed, other):
        message = (
            f"{killed}.parts must hold parts of this very capture. It was begun with another network, other layers or other "
            "settings; delete the folder to start anew."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(mlp, data, path=killed, **{"features": True, **other})

    def test_never_writes_over_a_file(self, mlp, data, tmp_path):
        path = tmp_path / "train.safetensors"
        record(mlp, data, path=path)
        message = f"path must not exist yet. Got {path}; read it with Recorded.load, or delete it."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(mlp, data, path=path)

    def test_needs_a_folder(self, mlp, data, tmp_path):
        path = tmp_path / "nowhere" / "train.safetensors"
        with pytest.raises(InvalidInput, match=re.escape(f"path must lie in a folder that exists. Got {path}.")):
            record(mlp, data, path=path)


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"layers": "hiden_1"},
                (
                    "layers must name gated layers that run. Got 'hiden_1'; near it are hidden_1, hidden_2 "
                    "(2 in all: terrafirma.layers lists them)."
                ),
            ),
            ({"reduce": "max"}, "reduce must be one of 'none', 'any', 'mean'. Got 'max'."),
            ({"layers": []}, "layers must be a name, or a list of names. Got []; leave it out for the last ReLU."),
            ({"batch_size": 0}, "batch_size must be an integer of at least 1. Got 0."),
            (
                {"error": lambda outputs, labels: np.full(len(labels), 2.0)},
                (
                    "What error returns must lie in [0, 1]. Got 2.0 in row 0; for a classifier use prediction != label, else "
                    "scale the error by its largest value."
                ),
            ),
        ],
    )
    def test_arguments_that_break_a_rule(self, mlp, data, arguments, message):
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(mlp, data, **arguments)

    def test_no_sample_at_all(self, mlp, data):
        message = "data must have at least one sample. Got none; look at the loader, and whether it was used up before."
        for nothing in ([], iter([]), (data[0][:0], data[1][:0])):
            with pytest.raises(InvalidInput, match=re.escape(message)):
                record(mlp, nothing)

    def test_labels_that_the_network_does_not_know(self, mlp, data):
        X, y = data
        message = "labels must be classes that the network was trained on (maybe, no, yes). Got 'never' in row 130."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(mlp, (X, np.where(np.arange(300) == 130, "never", y)))

    def test_labels_past_the_first_batch_have_their_row_named(self, data):
        nn = pytest.importorskip("torch").nn
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        X, y = data[0].astype(np.float32), np.where(np.arange(300) == 200, 2, 0)
        message = "one for each output of the network. Got 2 in row 200; number them as in training."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, (X, y))
        message = "labels must be numbers. Got <U5 ('maybe'); number the classes as in training."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, (X[1:], np.where(y[1:] == 0, "maybe", "yes")))

    def test_batches_of_another_type(self, mlp, data):
        nn = pytest.importorskip("torch").nn
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 300))
        X = data[0][:4].astype(np.float32)
        message = "labels must have one type in all batches. Got int64 from row 4 on, and uint8 before; convert them."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, [(X, np.array([1, 2, 3, 4], np.uint8)), (X, np.array([1, 2, 299, 0]))])

    def test_an_mlp_without_hidden_layers(self, data):
        net = MLPRegressor(hidden_layer_sizes=(), max_iter=5, random_state=0).fit(data[0], data[0][:, 0])
        message = "The MLP must have a hidden layer. Got none; its predictions are linear everywhere."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, data[0])

    def test_an_mlp_given_several_inputs(self, mlp, data):
        with pytest.raises(
            InvalidInput, match=re.escape("The MLP takes one array. Got 2 in a dict; name none of them.")
        ):
            record(mlp, {"a": data[0], "b": data[0]})

    def test_labels_in_some_batches_only(self, mlp, data):
        X, y = data
        message = (
            "Every batch must bring the same parts. Got outputs, words from row 10 on, and errors, labels, outputs, words "
            "before; give labels with all batches or with none."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(mlp, [(X[:10], y[:10]), X[10:]])

    def test_outputs_that_are_no_numbers(self, data):
        net = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5, random_state=0).fit(data[0], data[0][:, 0])
        net.coefs_[-1][:] = np.nan
        message = (
            "The network's outputs must be numbers. Got NaN in row 0 (7 of 7 rows); look for NaN in the inputs or an overflow "
            "in the network."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, data[0], batch_size=7)

    def test_a_model_of_another_kind(self):
        message = (
            "model must be a torch.nn.Module, the path of an .onnx file or a fitted scikit-learn MLP. Got dict; for any other "
            "framework make a Recorded of the arrays that it gives."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record({}, np.zeros((2, 2)))

    def test_a_network_of_several_labels(self, data):
        X = data[0]
        net = MLPClassifier((8,), max_iter=5, random_state=0).fit(X, X[:, :2] > 0)
        message = (
            "The MLP must give one class to each sample. Got one that gives several labels; "
            "record its activations as arrays, with errors of your own."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, X)


class TestBatchesThatDiffer:
    """Networks whose layers are as wide as their inputs."""

    @pytest.fixture
    def net(self):
        nn = pytest.importorskip("torch").nn

        class Tokens(nn.Module):
            """A mean over tokens."""

            def __init__(self):
                super().__init__()
                self.up, self.act, self.head = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)

            def forward(self, x):
                return self.head(self.act(self.up(x)).mean(dim=1))

        return Tokens()

    @pytest.fixture
    def loader(self, rng):
        return [rng.normal(size=(8, tokens, 4)).astype(np.float32) for tokens in (5, 7)]

    def test_unequal_widths_are_refused(self, net, loader):
        message = (
            "The same layers must run, as wide, on every batch. Got act (42 units) from row 8 on, and act (30 units) before; "
            "pad the inputs to one size, or pool maps with reduce='any'."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(net, loader)

    @pytest.mark.parametrize("reduce", ["any", "mean"])
    def test_pooled_they_are_equal(self, net, loader, reduce):
        rec = record(net, loader, reduce=reduce)
        assert rec.widths == (6,)
        assert len(rec) == 16

    def test_outputs_of_unequal_shape_are_refused(self, net, loader):
        nn = pytest.importorskip("torch").nn
        message = (
            "outputs must have one shape in all batches. Got (7, 6) from row 8 on, and (5, 6) before; "
            "pad the inputs to one size, or pool maps with reduce='any'."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            record(nn.Sequential(net.up, net.act), loader, reduce="any")
