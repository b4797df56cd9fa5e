import re

import numpy as np
import pytest

from terrafirma.core.patterns import PackedPatterns
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.recorded import ClippedError, Recorded, Source


@pytest.fixture
def recorded(rng):
    """One of everything."""
    features = rng.normal(size=(20, 70)).astype(np.float32)
    return Recorded(
        patterns=features > 0,
        outputs=rng.normal(size=(20, 3)).astype(np.float32),
        features=features,
        labels=rng.integers(0, 3, 20),
        layers={"a": features[:, :30], "b": features[:, 30:]},
        stochastic={0.5: rng.normal(size=(4, 20, 3))},
        inputs=rng.integers(0, 256, (20, 2, 2), dtype=np.uint8),
        head=(rng.normal(size=(3, 70)), rng.normal(size=3)),
        layer_names=("a", "b"),
        widths=(30, 40),
        source=Source("Net", "12", "34", "any"),
    )


def test_errors_are_misclassifications_by_default(recorded):
    assert isinstance(recorded.patterns, PackedPatterns)
    assert recorded.is_classification
    assert np.array_equal(recorded.predictions, recorded.outputs.argmax(axis=1))
    assert np.array_equal(recorded.errors, (recorded.outputs.argmax(axis=1) != recorded.labels).astype(float))
    assert 0 < recorded.errors.mean() < 1


@pytest.mark.parametrize("labels", [np.zeros(4), np.zeros((4, 1), dtype=int)])
def test_labels_that_are_no_classes_give_no_errors(labels):
    assert Recorded(outputs=np.zeros((4, 3)), labels=labels).errors is None


def test_one_output_column_gives_no_errors():
    assert Recorded(outputs=np.zeros((4, 1)), labels=np.zeros(4, dtype=int)).errors is None


def assert_same(a, b):
    assert (a.layer_names, a.widths, a.source) == (b.layer_names, b.widths, b.source)
    assert np.array_equal(a.patterns.words, b.patterns.words)
    for name in ("outputs", "features", "labels", "errors", "inputs"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
    assert a.layers.keys() == b.layers.keys()
    assert a.stochastic.keys() == b.stochastic.keys()
    assert all(np.array_equal(a.layers[name], b.layers[name]) for name in a.layers)
    assert all(np.array_equal(a.stochastic[p], b.stochastic[p]) for p in a.stochastic)
    assert all(np.array_equal(x, y) for x, y in zip(a.head, b.head, strict=True))


def test_saved_and_loaded_is_the_same(recorded, tmp_path):
    recorded.save(tmp_path / "r.safetensors")
    assert_same(recorded, Recorded.load(tmp_path / "r.safetensors"))


@pytest.mark.parametrize(
    "rows", [slice(3, 9), np.array([7, 2, 2]), np.arange(20) % 3 == 0], ids=["slice", "index", "mask"]
)
def test_rows_are_taken_from_every_field(recorded, rows):
    some = recorded[rows]
    assert np.array_equal(some.patterns.to_bool(), recorded.patterns.to_bool()[rows])
    assert np.array_equal(some.inputs, recorded.inputs[rows])
    assert np.array_equal(some.layers["b"], recorded.layers["b"][rows])
    assert np.array_equal(some.stochastic[0.5], recorded.stochastic[0.5][:, rows])
    assert np.array_equal(some.errors, recorded.errors[rows])
    assert some.head[0] is recorded.head[0]


def test_who_needs_a_field_says_so(recorded):
    assert recorded.need("patterns", by="a score") is recorded.patterns
    assert recorded.need("patterns", "layers", by="a score") == (recorded.patterns, recorded.layers)
    few = Recorded(labels=[0, 1])
    message = "vim needs features, outputs, which were not recorded. Record again with features=True, outputs."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        few.need("features", "labels", "outputs", by="vim")


def test_repr_names_what_is_there(recorded):
    text = repr(recorded)
    assert text.startswith(
        "<Recorded 20 samples: patterns of 70 units (a, b), outputs, features, labels, errors, inputs; mean"
    )
    assert repr(Recorded(labels=[1, 2, 3])) == "<Recorded 3 samples: labels>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Recorded must have at least one field. Got none; give patterns, outputs or labels."),
        (
            {"labels": [0, 1], "outputs": np.zeros((3, 2))},
            "All fields must have one row for each sample. Got 3 outputs, 2 labels.",
        ),
        (
            {"outputs": np.zeros((2, 2)), "labels": [0, 2]},
            (
                "labels must be classes from 0 to 1, one for each output of the network. Got 2 in row 1; "
                "number them as in training."
            ),
        ),
        (
            {"patterns": np.zeros((2, 5), dtype=bool), "widths": (2, 2)},
            "widths must sum to the 5 units of a pattern. Got (2, 2); leave them out.",
        ),
        (
            {"labels": [0, 1], "errors": [0.0, 1.5]},
            (
                "errors must lie in [0, 1]. Got 1.5 in row 1; for a classifier use prediction != label, else scale the error "
                "by its largest value."
            ),
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        Recorded(**fields)


@pytest.mark.parametrize(
    ("names", "widths"), [(("a", "b"), (5,)), (("a", "a"), (2, 3)), (("a",), (2, 3))], ids=["more", "twice", "fewer"]
)
def test_layers_without_a_width_each_are_refused(names, widths):
    message = f"layer_names must differ, one for each of the widths {widths}. Got {names}; leave them out."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Recorded(patterns=np.zeros((2, 5), dtype=bool), layer_names=names, widths=widths)


def test_outputs_that_are_no_numbers_are_refused():
    message = (
        "outputs must be numbers. Got NaN in row 1 (1 of 3 rows); look for NaN in the inputs or an overflow in the "
        "network."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Recorded(outputs=np.array([[0.0, 1.0], [np.nan, 1.0], [1.0, 0.0]]), labels=[0, 0, 0])


def test_one_sample_is_a_recording_too(recorded):
    assert len(recorded[7]) == 1
    assert np.array_equal(recorded[7].labels, recorded.labels[7:8])


def test_features_of_the_last_layer_are_saved_once(recorded, tmp_path):
    last = Recorded(
        patterns=recorded.patterns,
        features=recorded.layers["b"],
        layers=recorded.layers,
        layer_names=("a", "b"),
        widths=(30, 40),
    )
    last.save(tmp_path / "r")
    assert (tmp_path / "r").stat().st_size < recorded.patterns.words.nbytes + 20 * 70 * 4 + 2000
    assert np.array_equal(Recorded.load(tmp_path / "r").features, recorded.layers["b"])


def test_predictions_need_classes():
    message = "predictions needs outputs (n, classes). Got shape (3, 1); use outputs themselves."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Recorded(outputs=np.zeros((3, 1))).predictions  # noqa: B018


def test_a_file_of_another_kind_is_refused(recorded, tmp_path):
    from terrafirma import storage

    storage.write_arrays(tmp_path / "r", "Recorded", {"words": np.zeros((2, 1), dtype=np.uint64)}, {"n_units": 3})
    with pytest.raises(
        BadFile, match=r"does not hold a whole Recorded \(KeyError\('layer_names'\)\). Record it again."
    ):
        Recorded.load(tmp_path / "r")


class TestClippedError:
    def test_is_the_clipped_absolute_error_averaged_over_outputs(self):
        outputs, labels = np.array([[0.0, 1.0], [3.0, -4.0]]), np.array([[0.5, 1.0], [0.0, 0.0]])
        assert np.allclose(ClippedError(scale=2.0)(outputs, labels), [(0.25 + 0) / 2, 1.0])

    def test_takes_a_column_for_a_vector(self):
        assert np.allclose(ClippedError(1.0)(np.array([[0.5], [2.0]]), np.array([0.0, 0.0])), [0.5, 1.0])

    def test_refuses_what_does_not_pair(self):
        message = (
            "outputs and labels must hold as many numbers. Got shapes (2, 3) and (2,); "
            "give error= a function that knows what they mean."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            ClippedError(1.0)(np.zeros((2, 3)), np.zeros(2))

    @pytest.mark.parametrize("scale", [0, -1.0, np.nan, "1"])
    def test_refuses_a_scale_that_is_not_positive(self, scale):
        message = f"scale must be a positive float (the absolute error that counts as wholly wrong). Got {scale!r}."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            ClippedError(scale)
