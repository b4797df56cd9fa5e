"""Distances in several layers: each is that of Mahalanobis, and how they are joined, against plain sums and scikit-learn."""

import re

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from terrafirma import Recorded, record, scores
from terrafirma.errors import InvalidInput
from terrafirma.scores.joining import log_odds
from tests.scores.test_gaussian import blobs, slowly


def draw(rng, n, centres, shift=0.0, extra=0.0):
    """Two layers of three classes, the first of maps; wrong where ``shift`` of the second is large."""
    labels = rng.integers(0, 3, n)
    hard = rng.exponential(size=n)
    maps = centres[labels][:, :4, None, None] + rng.normal(size=(n, 4, 2, 3)) + shift
    last = centres[labels] + rng.normal(size=(n, 8)) * (1 + 0.5 * hard)[:, None] + shift
    errors = (hard + 0.5 * rng.normal(size=n) > 2).astype(float)
    return Recorded(layers={"block/a.0": maps, "fc#2": last}, features=last, labels=labels, errors=errors)


@pytest.fixture
def data(rng):
    centres = 3 * rng.normal(size=(3, 8))
    return [draw(rng, n, centres) for n in (400, 300, 50)]


def columns(train, recorded):
    pooled = [
        np.array([[[m.sum() / 6] for m in x] for x in part.layers["block/a.0"]])[..., 0] for part in (train, recorded)
    ]
    return np.stack(
        [
            slowly(*pair)
            for pair in ((pooled[0], train.labels, pooled[1]), (train.features, train.labels, recorded.features))
        ],
        axis=1,
    )


def test_one_layer_is_mahalanobis(rng, data):
    features, labels = blobs(rng)
    train, queries = Recorded(features=features, labels=labels), Recorded(features=rng.normal(size=(30, 6)))
    expected = scores.get("mahalanobis").fit(train).unreliability(queries)
    score = scores.get("class_distance").fit(train)
    np.testing.assert_array_equal(score.unreliability(queries), expected)
    assert (score.joined_by_, score.layers_) == ("one layer", ["features"])
    named = Recorded(layers={"fc": features}, features=features, labels=labels)
    score = scores.get("class_distance").fit(named)
    for recorded in (queries, Recorded(layers={"fc": queries.features}, features=queries.features)):
        np.testing.assert_array_equal(score.unreliability(recorded), expected)


def test_layers_are_joined_by_the_odds_of_validation_errors(data):
    train, validation, queries = data
    score = scores.get("class_distance").fit(train, validation)
    lengths, asked = np.sqrt(columns(train, validation)), np.sqrt(columns(train, queries))
    mean, spread = lengths.mean(axis=0), lengths.std(axis=0)
    peer = LogisticRegression(tol=1e-10).fit(
        ((lengths - mean) / spread)[:, score.join_["weights"] > 0], validation.errors
    )
    expected = peer.decision_function(((asked - mean) / spread)[:, score.join_["weights"] > 0])
    np.testing.assert_allclose(score.unreliability(queries), expected, rtol=1e-5, atol=1e-6)
    assert score.joined_by_ == "regression"
    assert score.join_["weights"][1] > 0


@pytest.mark.parametrize("known", ["none", "no errors", "few errors", "few right"])
def test_without_errors_to_learn_from_the_mean(data, known):
    train, validation, queries = data
    few = {"no errors": None, "few errors": np.arange(300) < 4, "few right": np.arange(300) >= 4}.get(known)
    own = Recorded(layers=validation.layers, features=validation.features, errors=few)
    score = scores.get("class_distance").fit(train, None if known == "none" else own)
    lengths, asked = np.sqrt(columns(train, train if known == "none" else own)), np.sqrt(columns(train, queries))
    expected = ((asked - lengths.mean(axis=0)) / lengths.std(axis=0)).mean(axis=1)
    np.testing.assert_allclose(score.unreliability(queries), expected, rtol=1e-6, atol=1e-9)
    assert score.joined_by_ == "mean"


@pytest.mark.parametrize("known", [True, False])
def test_far_is_less_reliable(rng, data, known):
    train, validation, _ = data
    score = scores.get("class_distance").fit(train, validation if known else None)
    far = Recorded(
        layers={n: x + 100 * rng.normal(size=(1, *x.shape[1:])) for n, x in train.layers.items()},
        features=train.features,
    )
    assert score.unreliability(far).min() > score.unreliability(train).max()


def test_no_weight_is_below_0(rng):
    x = rng.normal(size=(500, 3))
    wrong = x @ [2.0, -1.0, 1.0] + rng.normal(size=500) > 1
    weights, offset = log_odds(x, wrong)
    peer = LogisticRegression(tol=1e-10).fit(x[:, [0, 2]], wrong)
    np.testing.assert_allclose(weights, [peer.coef_[0, 0], 0.0, peer.coef_[0, 1]], rtol=1e-4)
    assert offset == pytest.approx(peer.intercept_[0], rel=1e-4)
    assert log_odds(-np.abs(x[:, :1]), np.abs(x[:, 0]) > 1) is None
    assert log_odds(x, wrong, any_sign=True)[0][1] < 0


def test_as_published(data):
    train, validation, queries = data
    score = scores.get("class_distance", variant="published").fit(train, validation)

    def squared(recorded):
        flat = [part.layers["block/a.0"].reshape(len(part), -1) for part in (train, recorded)]
        return np.stack([slowly(flat[0], train.labels, flat[1]), columns(train, recorded)[:, 1]], axis=1)

    known, asked = squared(train), squared(queries)
    mean, spread = known.mean(axis=0), known.std(axis=0)
    peer = LogisticRegression(tol=1e-10).fit((known - mean) / spread, train.errors)
    np.testing.assert_allclose(
        score.unreliability(queries), peer.decision_function((asked - mean) / spread), rtol=1e-4, atol=1e-5
    )
    assert score.joined_by_ == "regression"


def test_published_needs_training_errors(data):
    train, validation, _ = data
    message = "The score class_distance needs errors, which were not recorded. Record again with labels, or errors."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("class_distance", variant="published").fit(
            Recorded(layers=train.layers, features=train.features, labels=train.labels), validation
        )


@pytest.mark.parametrize("variant", [None, "published"])
def test_a_file_holds_all_and_chunks_change_nothing(rng, data, tmp_path, variant):
    train, validation, _ = data
    score = scores.get("class_distance", variant=variant).fit(train, validation)
    score.save(tmp_path / "score")
    again = scores.load(tmp_path / "score")
    queries = draw(rng, 2100, rng.normal(size=(3, 8)))
    found = again.unreliability(queries)
    np.testing.assert_array_equal(found, score.unreliability(queries))
    single = [score.unreliability(queries[i])[0] for i in range(2040, 2060)]
    np.testing.assert_allclose(found[2040:2060], single, rtol=1e-9)
    assert again.layers_ == ["block/a.0", "fc#2"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 3])
def test_few_samples_and_constant_layers(rng, n, dtype):
    layers = {"a": np.ones((n, 3), dtype), "b": rng.normal(size=(n, 9)).astype(dtype)}
    train = Recorded(layers=layers, features=layers["b"], labels=np.arange(n) % 2)
    score = scores.get("class_distance").fit(train, train)
    found = score.unreliability(Recorded(layers={name: x + 1 for name, x in layers.items()}, features=layers["b"]))
    assert np.isfinite(found).all()
    assert found.min() > score.unreliability(train).max()


def test_bad_layers_are_named(data):
    train, _, queries = data
    score = scores.get("class_distance").fit(train)

    def expect(message, values):
        layers = {"block/a.0": queries.layers["block/a.0"]} | values
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            score.unreliability(Recorded(layers=layers, features=queries.features))

    expect("layers must hold 'fc#2', as the training data's. Got block/a.0.", {})
    expect(
        "Layer 'fc#2' must be numbers of shape (n, units), or maps. Got float64 of shape (50,).", {"fc#2": np.zeros(50)}
    )
    expect(
        "Layer 'fc#2' must be finite. Got NaN or infinity; look for an overflow in the network.",
        {"fc#2": np.full((50, 8), np.nan)},
    )
    expect(
        "Layer 'fc#2' must have 8 units, as the training data. Got 7; record both alike.", {"fc#2": np.zeros((50, 7))}
    )


def test_layers_too_large_are_named():
    maps = np.zeros((2, 33, 16, 16), dtype=np.float32)
    train = Recorded(layers={"conv": maps}, features=np.zeros((2, 2)), labels=[0, 1], errors=[0, 1])
    scores.get("class_distance").fit(train)
    message = (
        "Layer 'conv' must have at most 8192 units: beyond, its covariance alone takes gigabytes. Got 8448; record with "
        "reduce='mean', which pools maps, or leave the layer out."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("class_distance", variant="published").fit(train)


def test_bad_hyperparameters():
    message = "epsilon must be a float of at least 0 (how far inputs are moved). Got -1; 0 leaves them."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("class_distance", epsilon=-1)
    with pytest.raises(InvalidInput, match=re.escape("variant must be None (done right) or 'published'")):
        scores.get("class_distance", variant="old")


# ------------------------------------------------------------------------------------------------ moved inputs


@pytest.fixture
def moved(rng):
    """A linear network with its features, for which gradients are written down at once."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)).double()

    def run(n):
        inputs = rng.normal(size=(n, 5))
        with torch.no_grad():
            hidden = net[0](torch.as_tensor(inputs))
            outputs = net[1](hidden).numpy()
        layers = {"0": hidden.numpy(), "1": outputs}
        labels = rng.integers(0, 3, n)
        return Recorded(inputs=inputs, layers=layers, features=outputs, outputs=outputs, labels=labels)

    return net, run(60), run(60), run(10)


def moved_distances(net, train, queries, epsilon, raw):
    """By the definition, with the slope of each layer's squared distance by differences."""
    W = [part.weight.detach().numpy() for part in net]
    b = [part.bias.detach().numpy() for part in net]
    functions = {"0": lambda x: W[0] @ x + b[0], "1": lambda x: W[1] @ (W[0] @ x + b[0]) + b[1]}
    found = np.zeros((len(queries), 2))
    for i, (name, layer) in enumerate(functions.items()):

        def distance(rows, layer=layer, name=name):
            return slowly(train.layers[name], train.labels, np.array([layer(x) for x in rows]))

        for row, x in enumerate(queries.inputs):
            steps = 1e-5 * np.eye(5)
            slope = (distance(x + steps) - distance(x - steps)) / 2e-5
            found[row, i] = distance([x - epsilon * (slope if raw else np.sign(slope))])[0]
    return found


def test_inputs_are_moved_towards_the_nearest_class_of_each_layer(moved):
    net, train, validation, queries = moved
    bare = Recorded(layers=train.layers, features=train.features, labels=train.labels)  # none needed to learn
    score = scores.get("class_distance", epsilon=0.05, model=net).fit(bare, validation)
    known, asked = (np.sqrt(moved_distances(net, train, part, 0.05, raw=False)) for part in (validation, queries))
    mean, spread = known.mean(axis=0), known.std(axis=0)
    peer = log_odds((known - mean) / spread, validation.errors > 0.5)
    weights, offset = peer or ([0.5, 0.5], 0.0)
    np.testing.assert_allclose(
        score.unreliability(queries), (asked - mean) / spread @ weights + offset, rtol=1e-4, atol=1e-5
    )


def test_as_published_by_the_gradient_itself(moved):
    net, train, validation, queries = moved
    score = scores.get("class_distance", epsilon=0.05, model=net, variant="published").fit(train, validation)
    known, asked = (moved_distances(net, train, part, 0.05, raw=True) for part in (train, queries))
    mean, spread = known.mean(axis=0), known.std(axis=0)
    weights, offset = log_odds((known - mean) / spread, train.errors > 0.5, any_sign=True)
    np.testing.assert_allclose(
        score.unreliability(queries), (asked - mean) / spread @ weights + offset, rtol=1e-4, atol=1e-5
    )


def test_the_gradient_of_few_samples_with_many_units(rng):
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 20).double()
    inputs = rng.normal(size=(6, 3))
    outputs = net(torch.as_tensor(inputs)).detach().numpy()
    features = outputs + 0.1 * rng.normal(size=(6, 20))  # so that some lies beside their span
    train = Recorded(layers={"": features}, features=features, labels=[0, 1, 0, 1, 0, 1])
    queries = Recorded(layers={"": outputs}, features=outputs, inputs=inputs)
    score = scores.get("class_distance", epsilon=1e-4, model=net).fit(train)
    assert score.rest_[""][0] > 0
    plain = scores.get("class_distance").fit(train)
    assert (score.unreliability(queries) < plain.unreliability(queries)).all()


def test_what_is_left_open(moved):
    net, train, validation, queries = moved
    alone = scores.get("class_distance").fit(train, validation)
    assert alone.settings_ == {"epsilon": 0.0}
    chosen = scores.get("class_distance", model=net).fit(train, validation)
    assert len(chosen.open_settings(train)) == 6
    again = scores.get("class_distance", epsilon=chosen.epsilon_, model=net).fit(train, validation)
    np.testing.assert_array_equal(chosen.unreliability(queries), again.unreliability(queries))
    published = scores.get("class_distance", model=net, variant="published")
    assert [setting["epsilon"] for setting in published.open_settings(train)] == [0.001, 0.005, 0.01, 0.05, 0.1]
    assert chosen.needs == {"features", "labels", "inputs", "gradients"}
    assert alone.needs == {"features", "labels"}


def test_the_network_is_handed_in_again_after_loading(moved, tmp_path):
    net, train, validation, queries = moved
    score = scores.get("class_distance", epsilon=0.05, model=net).fit(train, validation)
    score.save(tmp_path / "score")
    again = scores.load(tmp_path / "score", model=net)
    np.testing.assert_array_equal(again.unreliability(queries), score.unreliability(queries))
    message = "The score class_distance must be given the network that it takes gradients of. Load it with model=."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.load(tmp_path / "score")


def test_inputs_are_not_moved_without_a_network():
    message = (
        "epsilon moves inputs along gradients, for which the score class_distance needs the torch module. Got epsilon 0.1 "
        "alone; give model=, too."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("class_distance", epsilon=0.1)


def test_layers_stand_for_features(rng):
    recorded = Recorded(layers={"a": rng.normal(size=(60, 3))}, labels=rng.integers(0, 2, 60))
    score = scores.get("class_distance").fit(recorded)
    assert score.unreliability(Recorded(layers=recorded.layers)).shape == (60,)


def test_inputs_that_were_not_recorded(moved):
    net, train, validation, _ = moved
    bare = Recorded(layers=validation.layers, features=validation.features, errors=validation.errors)
    message = "The score class_distance needs inputs, which were not recorded. Record again with inputs"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("class_distance", model=net).fit(train, bare)
    fitted = scores.get("class_distance", epsilon=0.1, model=net).with_setting({"epsilon": 0.1})
    with pytest.raises(
        InvalidInput, match=re.escape("The score class_distance with epsilon > 0 needs inputs, which were")
    ):
        fitted.learn(train, bare)


@pytest.mark.parametrize("variant", [None, "published"])
def test_recordings_of_a_convolutional_network(rng, variant):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(7)
    parts = [nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)]
    net = nn.Sequential(*parts)
    data = [(rng.normal(size=(n, 1, 6, 6)).astype(np.float32), rng.integers(0, 3, n)) for n in (90, 60, 20)]
    train, validation, queries = (record(net, part, features=["1", "4"], inputs=True) for part in data)
    score = scores.get("class_distance", epsilon=0.01, model=net, variant=variant).fit(train, validation)
    plain = scores.get("class_distance", variant=variant).fit(train, validation)
    assert [len(score.centre_[name]) for name in score.layers_] == [4, 8]
    near, far = score._lengths(queries, 0.01), plain._lengths(queries, 0.0)
    assert (near < far).all()
    assert np.isfinite(score.unreliability(queries)).all()
