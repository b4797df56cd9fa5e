"""record, compare, scores, and fit with another score, on the command line."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from terrafirma import Guard, Recorded, compare, record, scores
from terrafirma.cli.app import app
from tests.cli.test_commands import document, fit_arguments, folder, terrafirma, wrong_usage  # noqa: F401

pytestmark = pytest.mark.jit


@pytest.fixture(scope="module")
def recordings(folder):  # noqa: F811
    """Training, validation and test data recorded by the command, and the plane's far end as another."""
    rng = np.random.default_rng(3)
    np.savez(folder / "far.npz", X=rng.normal(size=(300, 2)).astype(np.float32) * 4)
    paths = {}
    for name in ("train", "val", "test", "far"):
        paths[name] = folder / f"{name}.safetensors"
        arguments = ("--features", "-o", paths[name], *(["--no-labels"] if name == "far" else []))
        terrafirma("record", folder / "net.onnx", "--data", folder / f"{name}.npz", *arguments)
    return paths


def test_record_writes_what_python_records(folder, recordings):  # noqa: F811
    with np.load(folder / "test.npz") as file:
        own = record(folder / "net.onnx", (file["X"], file["y"]), features=True)
    read = Recorded.load(recordings["test"])
    for field in ("outputs", "features", "labels", "errors"):
        assert np.array_equal(getattr(read, field), getattr(own, field))
    assert np.array_equal(read.patterns.words, own.patterns.words)
    assert read.source == own.source
    assert read.head is not None


def test_options_of_record_reach_it(folder, tmp_path):  # noqa: F811
    out = tmp_path / "r.safetensors"
    arguments = ("record", folder / "net.onnx", "--data", folder / "test.npz", "-o", out)
    told = document(*arguments, "--inputs", "--features-of", "relu0", "--layer", "relu0")
    assert told == {"recording": str(out), "n_samples": 961, "layers": ["relu0"]}
    with np.load(folder / "test.npz") as file:
        assert np.array_equal(Recorded.load(out).inputs, file["X"])
    assert list(Recorded.load(out).layers) == ["relu0"]


def test_record_is_refused_before_any_work(folder, tmp_path):  # noqa: F811
    wrong_usage(
        "-o must end in .safetensors, the format of recordings.",
        *("record", folder / "net.onnx", "--data", folder / "test.npz", "-o", tmp_path / "r.npz"),
    )
    wrong_usage(
        "--features keeps what the pattern's layers give, --features-of other layers: give one.",
        *("record", folder / "net.onnx", "--data", folder / "test.npz", "-o", tmp_path / "r.safetensors"),
        *("--features", "--features-of", "relu0"),
    )


def test_compare_prints_what_python_finds(recordings):
    train, val, test, far = (Recorded.load(path) for path in recordings.values())
    own = compare({"network": (train, val, test, {"far": far})}, ["entropy", "knn"], draws=20, seed=4)
    arguments = (
        *list(recordings.values())[:3],
        "--ood",
        f"far={recordings['far']}",
        "--score",
        "entropy",
        "--score",
        "knn",
    )
    stdout, _ = terrafirma("compare", *arguments, "--draws", 20, "--seed", 4)
    assert stdout.strip() == str(own)
    told = document("compare", *arguments, "--draws", 20, "--seed", 4)
    assert told["left_out"] == {}
    assert told["results"][0] == {
        "score": "entropy",
        "data": "misclassified",
        "metric": "auroc",
        "value": own.value("entropy"),
        "low": own.results[0].interval.low,
        "high": own.results[0].interval.high,
    }


@pytest.mark.parametrize("ending", [".csv", ".md", ".tex", ".json"])
def test_comparisons_are_written_in_every_format(recordings, tmp_path, ending):
    out = tmp_path / f"table{ending}"
    stdout, _ = terrafirma("compare", *list(recordings.values())[:3], "--score", "margin", "--draws", 5, "-o", out)
    assert stdout == f"Comparison of 1 scores written to {out}\n"
    text = out.read_text()
    match ending:
        case ".csv":
            assert [row["score"] for row in csv.DictReader(text.splitlines())] == ["margin"] * 4
        case ".md":
            assert text.splitlines()[2].startswith("| network | misclassified: 96 of 961 | margin | **0.")
        case ".tex":
            assert text.startswith(r"\begin{tabular}")
        case ".json":
            assert len(json.loads(text)["results"]) == 4


def test_guards_are_compared_on_a_test_set(folder, recordings, tmp_path):  # noqa: F811
    terrafirma(*fit_arguments(folder, score="entropy"), "-o", tmp_path / "entropy")
    assert Guard.load(tmp_path / "entropy").state.score.name == "entropy"
    stdout, _ = terrafirma("compare", folder / "guard", tmp_path / "entropy", recordings["test"], "--draws", 5)
    test = Recorded.load(recordings["test"])
    guards = {str(path): Guard.load(path) for path in (folder / "guard", tmp_path / "entropy")}
    assert stdout.strip() == str(compare({"network": (None, None, test)}, [], guards, draws=5))


def test_guards_stand_beside_all_scores(folder, recordings):  # noqa: F811
    told = document("compare", folder / "guard", *list(recordings.values())[:3], "--draws", 2)
    assert {"entropy", "knn", str(folder / "guard")} <= {row["score"] for row in told["results"]}
    assert "mc_dropout" in told["left_out"]


def test_what_cannot_be_compared_is_wrong_usage(folder, recordings, tmp_path):  # noqa: F811
    test, guard = recordings["test"], folder / "guard"
    rule = "compare must get three recordings (train, validation, test), and guards if there are any; or guards and one"
    cases = [
        (f"{rule} recording, the test set. Got 0 guards and 1 recordings.", [test]),
        ("Got 1 guards and 1 recordings, and --score.", [guard, test, "--score", "knn"]),
        ("A score must be a name that there is. Got 'nearest' ", [test, test, test, "--score", "nearest"]),
        ("make one with terrafirma record.", [guard, folder / "test.npz"]),
        (
            "--ood must read NAME=RECORDING, as svhn=svhn.safetensors. Got 'svhn'.",
            [guard, test, "--ood", "svhn"],
        ),
        (
            "Guards and sets must differ in name. Got a, a; leave out what comes twice.",
            [test, test, test, "--ood", f"a={test}", "--ood", f"a={test}"],
        ),
        ("A file of a comparison must end in .csv, .md, .tex, .json.", [guard, test, "-o", tmp_path / "table.xlsx"]),
        ("-o must lie in a folder that exists.", [guard, test, "-o", tmp_path / "gone" / "table.md"]),
    ]
    for sentence, arguments in cases:
        wrong_usage(sentence, "compare", *arguments)


def test_recordings_that_are_not_there_are_named(folder, tmp_path):  # noqa: F811
    gone = tmp_path / "gone.safetensors"
    run = CliRunner().invoke(app, ["compare", str(folder / "guard"), str(gone)])
    assert run.exit_code == 1
    assert isinstance(run.exception, FileNotFoundError)
    assert run.exception.filename == str(gone)


def test_scores_are_listed():
    stdout, _ = terrafirma("scores")
    assert stdout.strip() == str(scores.describe())
    told = document("scores")["scores"]
    assert [row["score"] for row in told] == scores.available()


def test_fit_takes_one_score(folder, tmp_path):  # noqa: F811
    wrong_usage(
        "--rho and --delta belong to the subfunction bound. Leave out --score, or them.",
        *(*fit_arguments(folder, score="knn", rho=3, delta=0.1), "-o", tmp_path / "g"),
    )
    run = CliRunner().invoke(app, [*map(str, fit_arguments(folder, score="nearest")), "-o", str(tmp_path / "g")])
    assert str(run.exception).startswith("A score must be a name that there is. Got 'nearest'")
    assert not (tmp_path / "g").exists()
