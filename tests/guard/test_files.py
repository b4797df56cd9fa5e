import errno
import json
import os
import re
from dataclasses import fields

import numpy as np
import pytest
from sklearn.neural_network import MLPClassifier

from terrafirma import storage
from terrafirma.capture.record import record
from terrafirma.capture.sklearn import SklearnNetwork
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.guard import files
from terrafirma.guard.guard import Guard
from terrafirma.recorded import ClippedError, Recorded
from terrafirma.scores.subfunction import SubfunctionBound

pytestmark = [pytest.mark.jit, pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(900, 4))
    y = (X[:, 0] + 0.3 * rng.normal(size=900) > 0).astype(int)
    return X, y


@pytest.fixture(scope="module")
def mlp(data):
    X, y = data
    return MLPClassifier((20,), max_iter=60, random_state=0).fit(X[:300], y[:300])


@pytest.fixture
def guard(mlp, data):
    X, y = data
    return Guard(mlp).fit((X[:300], y[:300]), (X[300:], y[300:]), risk=0.4, verbose=False)


def same_verdicts(a, b):
    return all(np.array_equal(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))


def test_a_loaded_guard_decides_as_the_saved_one(guard, mlp, data, tmp_path):
    X, _ = data
    guard.save(tmp_path / "g")
    loaded = Guard.load(tmp_path / "g", mlp)
    assert same_verdicts(loaded.predict(X), guard.predict(X))
    assert loaded.predict(X).accepted.any()
    assert loaded.summary() == guard.summary()
    assert loaded.state.history == guard.state.history
    assert loaded.state.fingerprints == guard.state.fingerprints
    assert loaded.state.fingerprints.keys() == {"train", "validation"}
    for one, other in zip(loaded.explain(X[:5]), guard.explain(X[:5]), strict=True):
        assert str(one) == str(other)


def test_a_loaded_guard_learns_and_forgets_as_the_saved_one(guard, mlp, data, tmp_path):
    X, y = data
    guard.forget([5, 7])
    guard.save(tmp_path / "g")
    loaded = Guard.load(tmp_path / "g", mlp)
    for one in (guard, loaded):
        one.partial_fit((X[300:400], y[300:400])).forget([300, 0])
    assert np.array_equal(loaded.state.samples.ids, guard.state.samples.ids)
    assert same_verdicts(loaded.predict(X), guard.predict(X))


def test_a_stale_policy_is_still_stale(guard, mlp, tmp_path):
    guard.forget([0], recalibrate=False)
    guard.save(tmp_path / "g")
    assert "stale" in Guard.load(tmp_path / "g", mlp).summary()


def test_the_card_says_what_the_guard_is(guard, tmp_path):
    guard.save(tmp_path / "g")
    card = files.about(tmp_path / "g")
    assert (card["layers"], card["widths"]) == (["hidden_1"], [20])
    assert card["decides"] == str(guard.policy)
    assert card["network"]["name"] == "MLPClassifier"
    assert card["network"]["fingerprint"] == SklearnNetwork(guard.model).fingerprint()
    assert card["sign"] == "a unit is active where its pre-activation is > 0"
    assert card["score"]["gaussian"] == guard.state.score.rho
    assert card["libraries"].keys() >= {"python", "numpy", "numba", "scikit-learn"}
    assert card["data_fingerprints"] == guard.state.fingerprints
    assert json.loads((tmp_path / "g" / "guard.json").read_text())["settings"] == card


def test_errors_of_regressions_are_remembered(mlp, data, tmp_path):
    X, _ = data
    recorded = Recorded(patterns=X > 0, outputs=X, errors=np.linspace(0, 1, 900), labels=X)
    guard = Guard(None, SubfunctionBound(2.0), error=ClippedError(2.5)).fit(recorded, recorded, verbose=False)
    guard.save(tmp_path / "g")
    assert Guard.load(tmp_path / "g").error == ClippedError(2.5)


def test_saving_again_replaces_the_guard(guard, mlp, data, tmp_path):
    guard.save(tmp_path)
    guard.forget([1, 2, 3]).save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(Guard.load(tmp_path, mlp).state.samples.ids) == 297


def test_another_network_is_refused(guard, data, tmp_path):
    X, y = data
    guard.save(tmp_path)
    other = MLPClassifier((20,), max_iter=60, random_state=1).fit(X[:300], y[:300])
    mine, others = (SklearnNetwork(net).fingerprint()[:12] for net in (guard.model, other))
    message = (
        f"The network must be the one that the guard was fitted with: MLPClassifier, fingerprint {mine}. Got MLPClassifier, "
        f"fingerprint {others}: another, or the same with other weights; fit a guard for this one."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Guard.load(tmp_path, other)


def test_a_network_that_was_trained_on_is_not_saved_with_the_old_promise(data, tmp_path):
    X, y = data
    mlp = MLPClassifier((20,), max_iter=30, random_state=0).fit(X[:300], y[:300])
    guard = Guard(mlp, SubfunctionBound(2.0)).fit((X[:300], y[:300]), (X[300:], y[300:]), verbose=False)
    mlp.coefs_[0][0] += 0.1
    with pytest.raises(InvalidInput, match="another, or the same with other weights; fit a guard for this one"):
        guard.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_guard_without_its_network_still_knows_it(guard, data, tmp_path):
    guard.save(tmp_path)
    loaded = Guard.load(tmp_path)
    assert repr(loaded).startswith("<Guard of MLPClassifier fitted on 300 samples: ")
    with pytest.raises(InvalidInput, match=re.escape("or Guard.load(path, model).")):
        loaded.predict(data[0])
    verdict = loaded.predict(record(guard.model, data[0]))
    assert np.array_equal(verdict.prediction, guard.predict(data[0]).prediction)


def test_fixed_hyperparameters_stay_fixed(mlp, data, tmp_path):
    X, y = data
    sets = (X[:300], y[:300]), (X[300:], y[300:])
    Guard(mlp, SubfunctionBound(2.5, 0.2)).fit(*sets, verbose=False).save(tmp_path)
    again = Guard.load(tmp_path, mlp).fit(*sets, verbose=False)
    assert (again.state.score.rho, again.state.score.delta) == (2.5, 0.2)


def test_an_error_function_of_the_users_own_must_be_given_again(mlp, data, tmp_path):
    def half(outputs, labels):
        return 0.5 * (outputs.argmax(axis=1) != labels)

    X, y = data
    guard = Guard(mlp, SubfunctionBound(2.0), error=half).fit((X[:300], y[:300]), (X[300:], y[300:]), verbose=False)
    guard.save(tmp_path)
    message = (
        "The guard was fitted with an error function of the user's own (half), which no file holds. "
        "Load it with Guard.load(path, model, error=...)."
    )
    loaded = Guard.load(tmp_path, mlp)
    assert np.array_equal(loaded.predict(X).accepted, guard.predict(X).accepted)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        loaded.evaluate((X, y))
    assert Guard.load(tmp_path, mlp, error=half).evaluate((X, y)).error == guard.evaluate((X, y)).error
    loaded.save(tmp_path)
    assert files.about(tmp_path)["error"] == {"function": "half"}


def test_a_first_save_on_a_full_disk_leaves_nothing(guard, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        guard.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_save_left_is_cleared_away(guard, mlp, tmp_path):
    for name in ("arrays-0123abcd.safetensors", "net-0123456789ab.onnx", ".terrafirma-00ff.tmp"):
        (tmp_path / name).write_text("half")
    guard.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    Guard.load(tmp_path, mlp)


@pytest.mark.parametrize("name", ["../victim.txt", "victim.txt", "/victim.txt", ["a"], 3])
@pytest.mark.parametrize("part", ["arrays", "network_file"])
def test_a_card_names_no_files_elsewhere(guard, tmp_path, name, part):
    (tmp_path / "victim.txt").write_text("dear to me")
    folder = tmp_path / "g"
    guard.save(folder)
    card = storage.read_json(folder / "guard.json", "Guard")
    storage.write_json(folder / "guard.json", "Guard", card | {part: name})
    with pytest.raises(BadFile, match=re.escape(f"names a file that no guard has ({name!r}). Save the guard again.")):
        Guard.load(folder)
    guard.save(folder)
    assert (tmp_path / "victim.txt").read_text() == "dear to me"


@pytest.mark.parametrize("when", ["arrays", "card"])
def test_a_full_disk_leaves_the_old_guard_whole(guard, mlp, data, tmp_path, monkeypatch, when):
    guard.save(tmp_path)
    before = Guard.load(tmp_path, mlp).predict(data[0])
    calls, fsync = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == (1 if when == "arrays" else 2):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        guard.forget(np.arange(100)).save(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    assert same_verdicts(Guard.load(tmp_path, mlp).predict(data[0]), before)


class TestRefused:
    def test_no_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere does not exist. Save a guard there first."):
            Guard.load(tmp_path / "nowhere")

    def test_a_folder_without_a_guard(self, tmp_path):
        message = f"{tmp_path} holds no guard: there is no guard.json in it. Load the folder that Guard.save wrote."
        with pytest.raises(BadFile, match=re.escape(message)):
            Guard.load(tmp_path)

    def test_a_folder_with_other_files_is_not_written_to(self, guard, tmp_path):
        (tmp_path / "thesis.tex").write_text("dear to me")
        message = f"path must be an empty folder, or one with a guard. Got {tmp_path}, which holds other files."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            guard.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_file_is_not_a_folder(self, guard, tmp_path):
        (tmp_path / "g").write_text("")
        with pytest.raises(InvalidInput, match=re.escape(f"path must be a folder. Got the file {tmp_path / 'g'}.")):
            guard.save(tmp_path / "g")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda text: text[: len(text) // 2], "is not a whole JSON file"),
            (
                lambda text: text.replace('"risk": 0.4', '"risk": 0.95'),
                "has been altered: its content does not match its checksum.",
            ),
            (
                lambda text: text.replace('"format": 1', '"format": 2'),
                "which reads formats up to 1. Install the newer version.",
            ),
            (lambda text: text.replace('"kind": "Guard"', '"kind": "Table"'), "holds a Table, not a Guard."),
            (lambda text: "[]", "was not written by terrafirma."),
        ],
        ids=["truncated", "altered", "newer", "other kind", "foreign"],
    )
    def test_a_damaged_card(self, guard, tmp_path, damage, message):
        guard.save(tmp_path)
        card = tmp_path / "guard.json"
        damaged = damage(card.read_text())
        assert damaged != card.read_text()
        card.write_text(damaged)
        with pytest.raises(BadFile, match=re.escape(message)):
            Guard.load(tmp_path)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda data: data[:-100], "is not a whole safetensors file"),
            (lambda data: data[:-8] + b"\x01" * 8, "has been altered: its content does not match its checksum."),
        ],
        ids=["truncated", "altered"],
    )
    def test_damaged_arrays(self, guard, tmp_path, damage, message):
        guard.save(tmp_path)
        (arrays,) = tmp_path.glob("*.safetensors")
        arrays.write_bytes(damage(arrays.read_bytes()))
        with pytest.raises(BadFile, match=re.escape(message)):
            Guard.load(tmp_path)

    def test_lost_arrays(self, guard, tmp_path):
        guard.save(tmp_path)
        (arrays,) = tmp_path.glob("*.safetensors")
        arrays.unlink()
        with pytest.raises(BadFile, match="does not hold a whole guard"):
            Guard.load(tmp_path)

    def test_arrays_of_another_guard(self, guard, tmp_path):
        guard.save(tmp_path / "a")
        guard.forget([0]).save(tmp_path / "b")
        (mine,), (other,) = (list((tmp_path / name).glob("*.safetensors")) for name in "ab")
        mine.write_bytes(other.read_bytes())
        with pytest.raises(BadFile, match=re.escape("do not belong together. Save the guard again.")):
            Guard.load(tmp_path / "a")

    def test_arrays_that_lack_a_part(self, guard, tmp_path):
        guard.save(tmp_path)
        (path,) = tmp_path.glob("*.safetensors")
        arrays, settings = storage.read_arrays(path, "Guard")
        del arrays["samples/ids"]
        storage.write_arrays(path, "Guard", arrays, settings)
        message = f"{tmp_path} does not hold a whole guard (KeyError('ids')). Save it again."
        with pytest.raises(BadFile, match=re.escape(message)):
            Guard.load(tmp_path)
