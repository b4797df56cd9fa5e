"""What holds for every score that there is."""

import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from terrafirma import Recorded, scores, storage
from terrafirma.errors import BadFile, InvalidInput, NotFitted
from terrafirma.scores.base import Score

NAMES = scores.available()
ENSEMBLES = [name for name in NAMES if name.startswith("ensemble_")]
PUBLISHED = (
    "max_response",
    "entropy",
    "margin",
    "mc_dropout",
    "class_distance",
    "cluster_distance",
    "gaussian_process",
    "residual_flow",
)
QUICK = {  # their own tests train and search well
    "residual_flow": {"epochs": 2, "blocks": 2, "width": 16},
    "gaussian_process": {"scale": 1.0},
}
CLASSES, UNITS = 4, 12


def network(rng):
    """A random two-layer network: from inputs (n, 6) to everything that it does on them."""
    W1, W2 = rng.normal(size=(6, UNITS)), rng.normal(size=(CLASSES, UNITS))

    def run(inputs, labels=None, dtype=np.float64):
        hidden = np.maximum(inputs @ W1, 0)
        outputs = hidden @ W2.T
        masks = np.random.default_rng(0).random((2, 5, 1, UNITS)) < 0.5
        passes = {p: np.stack([(hidden * mask) @ W2.T for mask in masks[i]]) for i, p in enumerate((0.5, 0.25))}
        return Recorded(
            patterns=hidden > 0,
            outputs=outputs.astype(dtype),
            features=hidden.astype(dtype),
            labels=labels,
            layers={"first": inputs.astype(dtype), "second": hidden.astype(dtype)},
            stochastic={p: value.astype(dtype) for p, value in passes.items()},
            inputs=inputs.astype(dtype),
            layer_names=("second",),
        )

    return run


@pytest.fixture
def run(rng):
    return network(rng)


@pytest.fixture
def data(rng, run):
    """Clusters of four classes, of which the network gets some wrong: train, validation, test."""
    centres = rng.normal(size=(CLASSES, 6)) * 3
    sets = []
    for n in (240, 120, 60):
        inputs = centres[rng.integers(CLASSES, size=n)] + rng.normal(size=(n, 6))
        predicted = run(inputs).predictions
        labels = np.where(rng.random(n) < 0.8, predicted, rng.integers(CLASSES, size=n))
        sets.append(run(inputs, labels))
    return sets


def make(name, **parameters):
    return scores.get(name, **QUICK.get(name, {}), **parameters)


def given(name, recorded):
    """A recording as the score takes it: several networks for an ensemble."""
    if not name.startswith("ensemble_"):
        return recorded
    noise = np.random.default_rng(1).normal(size=recorded.outputs.shape)
    return [recorded, replace(recorded, outputs=recorded.outputs + 0.1 * noise, errors=recorded.errors)]


def fitted(name, train, validation, **parameters):
    return make(name, **parameters).fit(given(name, train), given(name, validation))


@pytest.fixture
def unreliability(data):
    train, validation, test = data
    return lambda name, **parameters: fitted(name, train, validation, **parameters).unreliability(given(name, test))


@pytest.mark.parametrize("name", NAMES)
def test_one_finite_number_for_each_sample(unreliability, name):
    u = unreliability(name)
    assert u.shape == (60,)
    assert u.dtype == np.float64
    assert np.isfinite(u).all()
    assert len(np.unique(u)) > 10


@pytest.mark.parametrize("name", PUBLISHED)
def test_eight_come_as_published_too(unreliability, name):
    u = unreliability(name, variant="published")
    assert np.isfinite(u).all()
    assert len(np.unique(u)) > 10


# not vim and cluster_distance: logits and norms grow with the distance, which by their definitions speaks for a sample
@pytest.mark.parametrize(
    "name",
    [
        "knn",
        "mahalanobis",
        "relative_mahalanobis",
        "class_distance",
        "gaussian_process",
        "trust_score",
        "subfunction",
        "residual_flow",
    ],
)
def test_a_sample_far_from_all_training_samples_is_less_reliable(rng, run, data, name):
    """Its features lie where no training sample's do: other units, in other proportions."""
    train, validation, test = data
    score = fitted(name, train, validation)
    away = -20 * train.inputs[:10]
    far = run(away, np.zeros(10, dtype=int))
    assert np.median(score.unreliability(far)) > np.median(score.unreliability(test))


@pytest.mark.parametrize(
    "name", ["max_response", "entropy", "margin", "energy", "max_logit", "gen", "temperature", "odin"]
)
def test_an_undecided_network_is_less_reliable(data, name):
    train, validation, _ = data
    sure, unsure = np.eye(CLASSES)[:1] * 9, np.eye(CLASSES)[:1] * 0.1
    score = fitted(name, train, validation)
    u = score.unreliability(Recorded(outputs=np.concatenate([sure, unsure])))
    assert u[1] > u[0]


@pytest.mark.parametrize("name", NAMES)
def test_order_of_samples_does_not_matter(rng, data, name):
    train, validation, test = data
    rows = rng.permutation(len(test))
    score = fitted(name, train, validation)
    u = score.unreliability(given(name, test))
    shuffled = [one[rows] for one in given(name, test)] if name in ENSEMBLES else test[rows]
    assert score.unreliability(shuffled) == pytest.approx(u[rows], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENSEMBLES])
def test_how_samples_are_cut_into_parts_does_not_matter(data, name, monkeypatch):
    train, validation, test = data
    score = fitted(name, train, validation)
    whole = score.unreliability(test)
    one_by_one = np.concatenate([score.unreliability(test[[i]]) for i in range(len(test))])
    assert one_by_one == pytest.approx(whole, rel=1e-9, abs=1e-12)
    monkeypatch.setattr(type(score), "rows", 7)
    assert score.unreliability(test) == pytest.approx(whole, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENSEMBLES])
def test_single_precision_gives_nearly_the_same(rng, name):
    run = network(np.random.default_rng(5))
    inputs = rng.normal(size=(200, 6)).astype(np.float32).astype(np.float64)
    labels = rng.integers(CLASSES, size=200)
    u = []
    for dtype in (np.float64, np.float32):
        recorded = run(inputs, labels, dtype)
        recorded = replace(recorded, errors=(labels == 0).astype(float))
        u.append(fitted(name, recorded[:100], recorded[100:160]).unreliability(recorded[160:]))
    assert np.corrcoef(u[0], u[1])[0, 1] > 0.999


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["absent", "alone", "constant", "doubled", "one", "wide", "far", "all right"])
def test_hard_cases_give_finite_numbers_or_a_clear_error(rng, data, name, case):
    train, validation, test = hard(case, *data, rng)
    try:
        u = fitted(name, train, validation).unreliability(given(name, test))
    except InvalidInput as error:
        assert len(str(error)) > 40  # noqa: PT017  # that it says something is all that is asked
        assert case in ("one", "wide") or (case, name) == ("constant", "vim")  # which needs the last layer's features
    else:
        assert u.shape == (len(test),)
        assert np.isfinite(u).all()


def hard(case, train, validation, test, rng):
    """Training data that real users have."""
    labels, constant = train.labels, np.ones_like
    match case:
        case "absent":  # a class that the network knows and the training data has not
            train = train[labels != 2]
        case "alone":  # a class with one sample
            train = train[np.concatenate([np.flatnonzero(labels != 2), np.flatnonzero(labels == 2)[:1]])]
        case "constant":  # a layer that says nothing
            train, validation, test = (
                replace(
                    one, features=constant(one.features), layers={"second": constant(one.features)}, errors=one.errors
                )
                for one in (train, validation, test)
            )
        case "doubled":  # every sample twice
            train = train[np.repeat(np.arange(len(train)), 2)]
        case "one":
            train = train[:1]
        case "wide":  # more features than samples
            train, validation, test = (wide(one) for one in (train[:20], validation, test))
        case "far":
            features = test.features * 1e6
            layers = {name: value * 1e6 for name, value in test.layers.items()}
            test = replace(test, features=features, layers=layers, inputs=test.inputs * 1e6, errors=test.errors)
        case "all right":  # nothing to choose by
            validation = replace(validation, errors=np.zeros(len(validation)))
    return train, validation, test


def wide(recorded):
    """Three hundred features that follow from those there are."""
    mixed = recorded.features @ np.random.default_rng(2).normal(size=(UNITS, 300))
    return replace(recorded, features=mixed, layers={"second": mixed}, errors=recorded.errors)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENSEMBLES])
def test_a_score_is_the_same_after_save_and_load(data, name, tmp_path):
    train, validation, test = data
    score = fitted(name, train, validation)
    score.save(tmp_path / "score")
    read = scores.load(tmp_path / "score")
    assert np.array_equal(read.unreliability(test), score.unreliability(test))
    assert repr(read) == repr(score)
    assert {path.name for path in tmp_path.iterdir()} == {"score"}


@pytest.mark.parametrize("name", NAMES)
def test_fitting_changes_nothing_that_was_given(data, name):
    train, validation, _ = data
    before = {field: np.copy(getattr(train, field)) for field in ("outputs", "features", "labels", "errors", "inputs")}
    score = make(name)
    parameters = dict(score.parameters())
    score.fit(given(name, train), given(name, validation))
    assert score.parameters() == parameters
    assert all(np.array_equal(getattr(train, field), value) for field, value in before.items())


@pytest.mark.parametrize("name", NAMES)
def test_fitting_again_gives_the_same(data, name):
    train, validation, test = data
    score = fitted(name, train, validation)
    first = score.unreliability(given(name, test))
    again = score.fit(given(name, train), given(name, validation)).unreliability(given(name, test))
    assert np.array_equal(again, first)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_lacking_is_named(data, name):
    nothing = Recorded(labels=np.zeros(5, dtype=int))
    with pytest.raises(InvalidInput, match=r"needs .*which were not recorded. Record again with "):
        fitted_or_scored(name, data, nothing)


def fitted_or_scored(name, data, nothing):
    score = fitted(name, *data[:2])
    score.unreliability([nothing, nothing] if name in ENSEMBLES else nothing)


@pytest.mark.parametrize("name", NAMES)
def test_before_fit_there_is_no_score(data, name):
    message = f"The score {name} is not fitted. Call fit(train, validation) before unreliability."
    with pytest.raises(NotFitted, match=re.escape(message)):
        make(name).unreliability(given(name, data[2]))


@pytest.mark.parametrize("name", NAMES)
def test_before_fit_there_is_nothing_to_save(name, tmp_path):
    message = f"The score {name} is not fitted. Call fit(train, validation) before save."
    with pytest.raises(NotFitted, match=re.escape(message)):
        make(name).save(tmp_path / "score")
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers(data, tmp_path):
    train, validation, test = data
    score = scores.get("knn", k=np.int64(3)).fit(train, validation)
    assert score.label == "knn(k=3)"
    score.save(tmp_path / "score")
    assert np.array_equal(scores.load(tmp_path / "score").unreliability(test), score.unreliability(test))


def test_files_that_hold_no_whole_score(data, tmp_path):
    arrays, settings = scores.get("knn", k=3).fit(data[0]).to_arrays()
    path = tmp_path / "score"
    storage.write_arrays(path, "Score", {"intruder": np.zeros(2)} | arrays, settings)
    with pytest.raises(BadFile, match=re.escape("The score knn learns nothing called 'intruder'. Save it again.")):
        scores.load(path)
    storage.write_arrays(path, "Score", arrays, {"name": "knn"})
    with pytest.raises(
        BadFile, match=re.escape(f"{path} does not hold a whole score (KeyError('parameters')). Save it again.")
    ):
        scores.load(path)


def test_a_score_that_takes_gradients_is_loaded_with_its_network(data, tmp_path):
    torch = pytest.importorskip("torch")
    train, _, test = data
    net = torch.nn.Linear(6, CLASSES)
    recorded = replace(test, outputs=net(torch.tensor(test.inputs).float()).detach().numpy(), errors=test.errors)
    score = scores.get("odin", temperature=10.0, epsilon=0.01, model=net).fit(train)
    score.save(tmp_path / "score")
    message = "The score odin must be given the network that it takes gradients of. Load it with model=."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.load(tmp_path / "score")
    assert np.array_equal(scores.load(tmp_path / "score", net).unreliability(recorded), score.unreliability(recorded))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "features",
            np.array([[1.0, np.nan]] * 3),
            "features must be finite. Got NaN or infinity in row 0; look for an overflow",
        ),
        (
            "features",
            np.zeros(3),
            "features must be numbers of shape (n, units). Got float64 of shape (3,); mahalanobis needs",
        ),
        (
            "labels",
            np.array([0.5, 1, 2]),
            "labels must be classes from 0, one for each sample. Got float64 of shape (3,);",
        ),
        (
            "labels",
            np.array([0, -1, 2]),
            "labels must be classes from 0, one for each sample. Got int64 of shape (3,);",
        ),
    ],
)
def test_fields_of_another_kind_are_named(field, value, message):
    fields = {"features": np.eye(3), "labels": np.arange(3)} | {field: value}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("mahalanobis").fit(Recorded(**fields))


def test_labels_beyond_the_outputs_are_named(data):
    train = replace(data[0], labels=np.where(np.arange(240) == 7, 10**12, data[0].labels), errors=data[0].errors)
    message = f"labels must be below {CLASSES}, the number of outputs. Got 1000000000000 in row 7; number them as in training."
    for name, parameters in (("trust_score", {}), ("gaussian_process", {"likelihood": "classification"})):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            scores.get(name, **parameters).fit(train)


def test_features_without_columns_are_named():
    message = "features must have at least one column. Got none; knn needs some."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("knn").fit(Recorded(features=np.zeros((3, 0))))


def test_another_number_of_columns_is_named(data):
    score = scores.get("mahalanobis").fit(data[0])
    message = "features must have 12 columns, as the training data. Got 3; record both alike."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        score.unreliability(Recorded(features=np.ones((2, 3))))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENSEMBLES])
def test_no_samples_give_no_scores(data, name):
    train, validation, test = data
    assert fitted(name, train, validation).unreliability(test[:0]).shape == (0,)


def test_every_name_is_its_class_and_every_fact_is_there():
    for name in NAMES:
        score = scores.get(name)
        assert score.name == name
        assert score.paper
        assert score.cost
        assert score.needs
        assert type(score).__doc__


def test_they_are_described_in_a_table():
    table = scores.describe()
    assert [row[0] for row in table.rows] == scores.available()
    assert "Sun et al., ICML 2022" in str(table)


def test_unknown_names_and_parameters_are_named():
    message = "A score must be a name that there is. Got 'entropi' (near it: entropy, "
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("entropi")
    message = "Parameters of the score entropy must be among: variant, react. Got 'temperature'."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("entropy", temperature=2)


def test_arrays_are_no_recording(data):
    message = (
        "train must be a Recorded, as terrafirma.record gives. Got ndarray; "
        "for arrays use Recorded(outputs=..., features=..., labels=...)."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scores.get("knn").fit(data[0].features)
    with pytest.raises(InvalidInput, match=re.escape("validation must have at least one sample. Got none.")):
        scores.get("knn").fit(data[0], data[1][:0])


OWN = {"name": "a", "score": lambda self, recorded: np.zeros(len(recorded))}


class TestOnesOwn:
    @pytest.fixture
    def registered(self):
        @scores.register
        class Norm(Score):
            """Small features are unreliable."""

            name = "norm"
            needs = frozenset({"features"})

            def score(self, recorded):
                return -np.linalg.norm(recorded.features, axis=1)

        yield Norm
        del scores.OWN["norm"]

    def test_it_goes_by_its_name(self, registered, data):
        train, validation, test = data
        assert scores.available()[-1] == "norm"
        u = scores.get("norm").fit(train, validation).unreliability(test)
        assert np.array_equal(u, -np.linalg.norm(test.features, axis=1))
        assert scores.describe().rows[-1][0] == "norm"

    def test_grids_are_searched_on_validation_data_alone(self, data):
        """The grid's best is found by validation errors, and ties go to the first."""

        class Noisy(Score):
            name = "noisy"
            grid: ClassVar = {"noise": (5.0, 1.0, 0.0)}
            needs = frozenset({"outputs"})

            def __init__(self, noise=None):
                self.noise = noise

            def score(self, recorded):
                rng = np.random.default_rng(0)
                return -recorded.outputs.max(axis=1) + self.noise_ * rng.normal(size=len(recorded)) * 100

        train, validation, _ = data
        knows = replace(
            validation, errors=(validation.outputs.max(axis=1) < np.median(validation.outputs.max(axis=1))) * 1.0
        )
        score = Noisy().fit(train, knows)
        assert score.noise_ == 0.0
        assert score.settings_ == {"noise": 0.0}
        assert repr(score) == "<score noisy fitted, noise 0.0>"
        assert Noisy().fit(train).noise_ == 5.0
        assert Noisy(noise=1.0).fit(train, knows).noise_ == 1.0
        right = replace(validation, errors=np.zeros(len(validation)))
        assert Noisy().fit(train, right).noise_ == 5.0

    def test_errors_are_needed_to_choose(self, data):
        train, validation, _ = data
        message = (
            "Choosing k of the score knn needs errors, which were not recorded. Record again with labels, or errors."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            scores.get("knn").fit(train, Recorded(features=validation.features))

    def test_infinite_scores_are_refused(self, data):
        class Infinite(Score):
            name = "infinite"

            def score(self, recorded):
                return np.full(len(recorded), np.inf)

        message = (
            "The score infinite must be a finite number. Got inf in row 0; look for an overflow in what was recorded."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Infinite().fit(data[0]).unreliability(data[0])

    @pytest.mark.parametrize("shape", [(5, 1), (3,)])
    def test_one_number_for_each_sample_is_what_is_asked_for(self, data, shape):
        class Many(Score):
            name = "many"

            def score(self, recorded):
                return np.zeros(shape)

        message = (
            f"The score many must return one number for each of the 5 samples. Got shape {shape}; return an array (n,)."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Many().fit(data[0]).unreliability(data[0][:5])

    def test_what_no_file_holds_is_named(self, data, tmp_path):
        class Holds(Score):
            name = "holds"

            def learn(self, train, validation):
                self.thing_ = {"a": object()}

        message = (
            "The score holds must hold arrays, dicts of arrays, numbers, text and lists of these to be saved. "
            "Got thing_, a object; make it one of them."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Holds().fit(data[0]).save(tmp_path / "score")

    @pytest.mark.parametrize(
        ("score", "message"),
        [
            (
                type("A", (Score,), OWN | {"needs": frozenset({"featurs"})}),
                "needs must be among errors, features, gradients, head, inputs, labels, layers, outputs, patterns",
            ),
            (
                type("A", (Score,), OWN | {"grid": {"k": (1, 2)}}),
                "grid must name parameters of __init__. Got k; add k=None there.",
            ),
            (
                type("A", (Score,), OWN | {"needs": "features"}),
                "needs must be a set of fields, as frozenset({'features'}). Got 'features'.",
            ),
            (
                type("A", (Score,), {"name": "a"}),
                "A score must have a method score(self, recorded). Got A, which lacks it.",
            ),
            (3, "register must get a subclass of Score. Got 3."),
            (
                type("A", (Score,), {}),
                "A score must have a name that is an identifier. Got None; set name = 'my_score'.",
            ),
            (
                type("A", (Score,), {"name": "knn"}),
                "A score must have a name of its own. Got 'knn', which is terrafirma's; choose another.",
            ),
        ],
    )
    def test_what_cannot_be_registered(self, score, message):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            scores.register(score)
