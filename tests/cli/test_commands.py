import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from terrafirma.cli import scores
from terrafirma.cli.app import app
from terrafirma.cli.networks import named_network, zeros_for
from terrafirma.cli.options import as_error
from terrafirma.cli.requirements import Requirement
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.guard.guard import Guard
from terrafirma.recorded import ClippedError

pytestmark = pytest.mark.jit
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
N_TEST = 961  # five parts of 64 batches of 3, and one sample
COLUMNS = ["row", "id", "prediction", "unreliability", "error_probability", "accepted"]


def onnx_mlp(mlp, output="logits", rows="n", features=2):
    """The graph of a scikit-learn MLP: Gemm, Relu, Gemm, ..."""
    helper, nodes, weights, x = onnx.helper, [], [], "X"
    for i, (W, b) in enumerate(zip(mlp.coefs_, mlp.intercepts_, strict=True)):
        weights += [
            onnx.numpy_helper.from_array(part.astype(np.float32), f"{n}{i}") for n, part in (("W", W), ("b", b))
        ]
        is_last = i == len(mlp.coefs_) - 1
        nodes.append(helper.make_node("Gemm", [x, f"W{i}", f"b{i}"], [output if is_last else f"z{i}"]))
        if not is_last:
            nodes.append(helper.make_node("Relu", [f"z{i}"], [f"h{i}"], name=f"relu{i}"))
            x = f"h{i}"
    kind = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("X", kind, [rows, features])]
    outputs = [helper.make_tensor_value_info(output, kind, [rows, mlp.coefs_[-1].shape[1]])]
    graph = helper.make_graph(nodes, "mlp", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


TORCH_CODE = """
import torch

def network(width=48):
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))

def wide():
    return network(49)

def talk():
    print("here I am")
    return network()


def nothing():
    return None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes in the plane, a network in every form, samples in files, and a fitted guard."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    folder = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(20221118)
    X = rng.normal(size=(4000 + N_TEST, 2)).astype(np.float32)
    y = (X[:, 0] * X[:, 1] > 0).astype(np.int64) + (X[:, 0] > 1)
    y = np.where((X[:, 1] > 1) & (rng.random(len(X)) < 0.4), rng.integers(0, 3, len(X)), y)  # what nobody can know
    ids = np.array([f"s{i}" for i in range(N_TEST)])
    mlp = MLPClassifier((48,), max_iter=500, tol=0.001, random_state=0).fit(X[:2000], y[:2000])
    onnx.save(onnx_mlp(mlp), folder / "net.onnx")
    line = MLPRegressor(hidden_layer_sizes=(16,), max_iter=100, tol=0.01, random_state=0).fit(
        X[:2000], X[:2000].sum(axis=1)
    )
    onnx.save(onnx_mlp(line, "y"), folder / "line.onnx")
    np.savez(folder / "train.npz", X=X[:2000], y=y[:2000])
    np.savez_compressed(folder / "val.npz", X=X[2000:4000], y=y[2000:4000])
    np.savez(folder / "test.npz", X=X[4000:], y=y[4000:], id=ids)
    (folder / "nets.py").write_text(TORCH_CODE)
    run = CliRunner().invoke(app, [*map(str, fit_arguments(folder)), "-o", str(folder / "guard")])
    assert run.exit_code == 0, run.output
    return folder


def fit_arguments(folder, network="net.onnx", **others):
    """Arguments of fit, each option replaceable."""
    options = {"train": folder / "train.npz", "validation": folder / "val.npz", "risk": 0.08} | others
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return ["fit", *([folder / network] if network else []), *given]


def terrafirma(*arguments, code=0):
    """Run a command: its standard output and standard error."""
    run = CliRunner().invoke(app, [str(part) for part in arguments])
    assert run.exit_code == code, run.output + repr(run.exception)
    return run.stdout, run.stderr


def fails(sentence, *arguments):
    """Run a command that must end as one of our errors."""
    run = CliRunner().invoke(app, [str(part) for part in arguments])
    assert run.exit_code == 1
    assert str(run.exception) == sentence


def wrong_usage(text, *arguments):
    """Run a command that must be refused while it is parsed."""
    _, stderr = terrafirma(*arguments, code=2)
    assert text in re.sub(r"[\s│]+", " ", stderr)


def document(*arguments, code=0):
    """The one JSON document that a command prints."""
    stdout, _ = terrafirma(*arguments, "--json", code=code)
    return json.loads(stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture(scope="module")
def expected(folder):
    """What the guard says of the test set in Python."""
    with np.load(folder / "test.npz") as file:
        return Guard.load(folder / "guard").predict(file["X"])


# ------------------------------------------------------------------------------------------------------- fit


def test_fit_saves_the_guard_that_python_fits(folder, tmp_path):
    stdout, _ = terrafirma(*fit_arguments(folder), "-o", tmp_path / "g")
    with np.load(folder / "train.npz") as train, np.load(folder / "val.npz") as val:
        guard = Guard(folder / "net.onnx").fit((train["X"], train["y"]), (val["X"], val["y"]), risk=0.08, verbose=False)
    assert stdout == f"{guard.summary()}\nGuard saved in {tmp_path / 'g'}\n"
    loaded = Guard.load(tmp_path / "g")
    assert loaded.policy == guard.policy
    assert 100 < loaded.policy.n_accepted < 1000
    np.testing.assert_array_equal(loaded.state.table.counts, guard.state.table.counts)


def test_options_of_fit_reach_the_guard(folder, tmp_path):
    options = [
        "--layer",
        "relu*",
        "--reduce",
        "any",
        "--confidence",
        0.8,
        "--rho",
        3,
        "--delta",
        0.1,
        "--batch-size",
        7,
    ]
    arguments = fit_arguments(folder, calibration=folder / "test.npz")
    found = document(*arguments, *options, "-o", tmp_path / "g")
    assert found["guard"] == str(tmp_path / "g")
    assert (found["layers"], found["widths"]) == (["relu0"], [48])
    assert (found["risk"], found["confidence"], found["reduce"], found["selected"]) == (0.08, 0.8, "any", None)
    assert found["score"]["delta"] == 0.1
    assert found["policy"]["n_samples"] == N_TEST
    assert document("info", tmp_path / "g") == found


def test_a_regression_names_its_error(folder, tmp_path, rng):
    for name in ("train", "val", "test"):
        with np.load(folder / f"{name}.npz") as file:
            np.savez(tmp_path / f"{name}.npz", X=file["X"], target=file["X"].sum(axis=1))
    others = {"train": tmp_path / "train.npz", "validation": tmp_path / "val.npz", "error": "clipped:0.5"}
    terrafirma(*fit_arguments(folder, "line.onnx", **others), "-o", tmp_path / "g")
    found = document("score", tmp_path / "g", tmp_path / "test.npz")
    predictions = np.array([row["prediction"] for row in found["rows"]])
    with np.load(tmp_path / "test.npz") as file:
        error = ClippedError(0.5)(predictions, file["target"]).mean()
    assert document("evaluate", tmp_path / "g", tmp_path / "test.npz")["error"] == pytest.approx(error)


def test_recordings_are_taken_wherever_samples_are(folder, tmp_path, expected):
    from terrafirma.capture.record import record

    for name in ("train", "val", "test"):
        with np.load(folder / f"{name}.npz") as file:
            record(folder / "net.onnx", (file["X"], file["y"]), path=tmp_path / f"{name}.safetensors")
    sets = {"train": tmp_path / "train.safetensors", "validation": tmp_path / "val.safetensors"}
    terrafirma(*fit_arguments(folder, None, **sets), "-o", tmp_path / "g")
    rows = document("score", tmp_path / "g", tmp_path / "test.safetensors")["rows"]
    np.testing.assert_array_equal([row["unreliability"] for row in rows], expected.unreliability)
    assert list(rows[0]) == [name for name in COLUMNS if name != "id"]
    one = document("explain", tmp_path / "g", tmp_path / "test.safetensors", "--row", 7)["explanations"][0]
    assert one["unreliability"] == expected.unreliability[7]
    assert document("evaluate", tmp_path / "g", tmp_path / "test.safetensors")["n_samples"] == N_TEST
    fails(
        f"--data must hold samples. Got the recording {tmp_path / 'test.safetensors'}; give .npz, .npy or .parquet.",
        *("layers", folder / "net.onnx", "--data", tmp_path / "test.safetensors"),
    )


def test_fit_is_refused_before_any_work(folder, tmp_path):
    start = [*fit_arguments(folder, train=tmp_path / "missing.npz"), "-o", tmp_path / "g"]
    not_empty = f"path must be an empty folder, or one with a guard. Got {folder}, which holds other files."
    fails(not_empty, *start[:-1], folder)
    wrong_usage("--rho and --delta must be given together, or neither, to select both.", *start, "--rho", 3)
    wrong_usage(
        "'--risk': risk must lie between 0 and 1 (the largest mean error of accepted predictions to allow). Got 2.0.",
        *start,
        "--risk",
        2,
    )
    wrong_usage(
        "'--confidence': confidence must lie between 0 and 1 (the probability with which the promise holds). Got 1.0.",
        *start,
        "--confidence",
        1,
    )
    wrong_usage("rho must be a positive float (the kernel's width in bits). Got -1.0.", *start, "--rho", -1)
    wrong_usage("delta must lie in (0, 1] (the bound holds with probability > 1 - delta).", *start, "--delta", 0)
    wrong_usage("--error must be clipped:SCALE", *start, "--error", "squared")
    wrong_usage("'max' is not one of 'none', 'any', 'mean'", *start, "--reduce", "max")
    wrong_usage("'--model': --model must read pkg.mod:function", *start, "--model", "net.onnx")
    wrong_usage("Name one network: MODEL.onnx, or --model PKG.MOD:FUNCTION.", *start, "--model", "nets:network")
    wrong_usage("Name one network: MODEL.onnx, or --model PKG.MOD:FUNCTION.", *start[:1], *start[2:])
    wrong_usage("--weights goes with --model PKG.MOD:FUNCTION; an ONNX file has its own.", *start, "--weights", "w")
    fails(f"{tmp_path / 'missing.npz'} does not exist. Give the path of a file of samples.", *start)


def test_an_error_is_clipped_with_a_scale():
    assert as_error("clipped:2.5") == ClippedError(2.5)
    assert as_error(None) is None
    for text in ("clipped:", "clipped:-1", "clipped:nan", "squared:1", "clipped"):
        sentence = (
            "--error must be clipped:SCALE (the absolute error that counts as wholly wrong), as clipped:2.5. Got "
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}{text!r}.$"):
            as_error(text)


# ----------------------------------------------------------------------------------------------------- score


def read_scores(path):
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open(newline="") as file:
        convert = [int, str, int, float, float, lambda text: {"True": True, "False": False}[text]]
        rows = list(csv.DictReader(file))
        return [{name: f(row[name]) for f, name in zip(convert, row, strict=True)} for row in rows]


@pytest.mark.parametrize("batch_size", [3, 128])
@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_scores_are_what_predict_says_in_the_order_of_the_rows(folder, tmp_path, expected, ending, batch_size):
    path = tmp_path / f"scores.{ending}"
    found = document("score", folder / "guard", folder / "test.npz", "-o", path, "--batch-size", batch_size)
    n = int(expected.accepted.sum())
    assert found == {"n_samples": N_TEST, "accepted": n, "refused": N_TEST - n, "output": str(path)}
    assert 0 < n < N_TEST
    rows = read_scores(path)
    assert list(rows[0]) == COLUMNS
    assert [row["row"] for row in rows] == list(range(N_TEST))
    assert [row["id"] for row in rows] == [f"s{i}" for i in range(N_TEST)]
    for name in COLUMNS[2:]:
        np.testing.assert_array_equal([row[name] for row in rows], getattr(expected, name))
    assert list(tmp_path.iterdir()) == [path]  # nothing else is left behind


def test_scores_are_printed_where_no_file_is_named(folder, expected):
    stdout, _ = terrafirma("score", folder / "guard", folder / "test.npz")
    lines = stdout.splitlines()
    assert lines[0].split() == COLUMNS
    assert [line.split()[1] for line in lines[1:11]] == [f"s{i}" for i in range(10)]
    word = "yes" if expected.accepted[9] else "no"
    assert lines[10].split()[2:4] == [str(expected.prediction[9]), f"{expected.unreliability[9]:.4g}"]
    assert lines[10].split()[-1] == word
    n = int(expected.accepted.sum())
    assert lines[11] == f"{N_TEST} predictions: {n} accepted, {N_TEST - n} refused; first 10 shown, -o FILE writes all"
    assert len(lines) == 12


def test_json_without_a_file_holds_all_rows(folder, expected):
    found = document("score", folder / "guard", folder / "test.npz")
    assert [row["unreliability"] for row in found["rows"]] == expected.unreliability.tolist()


def test_labels_are_not_looked_at(folder, tmp_path, expected):
    with np.load(folder / "test.npz") as file:
        np.savez(tmp_path / "odd.npz", X=file["X"], y=np.full(N_TEST, 99))
        np.save(tmp_path / "x.npy", file["X"])
    for name in ("odd.npz", "x.npy"):
        found = document("score", folder / "guard", tmp_path / name)
        assert [row["prediction"] for row in found["rows"]] == expected.prediction.tolist()
        assert "id" not in found["rows"][0]


def test_where_scores_cannot_go_is_said_before_the_work(folder, tmp_path):
    path = tmp_path / "scores.xlsx"
    sentence = f"A file of scores must end in .parquet, .csv, .json. Got {path}; rename it."
    fails(sentence, "score", folder / "no guard", tmp_path / "missing.npz", "-o", path)
    path = tmp_path / "no" / "scores.csv"
    sentence = f"{path} cannot be written: its folder does not exist."
    fails(sentence, "score", folder / "guard", folder / "test.npz", "-o", path)


@pytest.mark.parametrize("ending", ["parquet", "csv", "json"])
def test_a_failure_half_way_leaves_the_old_file(tmp_path, ending):
    path = tmp_path / f"scores.{ending}"
    path.write_text("old")

    def parts():
        yield {"row": np.arange(3)}
        raise InvalidInput("half-way")

    with pytest.raises(InvalidInput, match="half-way"):
        scores.write(path, parts())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_scores_can_be_gone_through_again(folder, expected):
    from terrafirma.cli.samples import read_samples

    found = scores.Scores(Guard.load(folder / "guard"), read_samples(folder / "test.npz", 10, labelled=False))
    for _ in range(2):
        assert [len(columns["row"]) for columns in found] == [640, 321]
        assert found.n_accepted == expected.accepted.sum()


def test_outputs_of_several_numbers_have_a_column_each():
    from terrafirma.guard.verdict import Verdict

    u = np.array([0.5, np.inf])
    verdict = Verdict(np.arange(4.0).reshape(2, 2), None, u, u < 1, u)
    columns = scores._columns(verdict, 5, None)
    assert list(columns) == ["row", "prediction_0", "prediction_1", *COLUMNS[3:]]
    rows = list(scores.records(columns))
    assert rows[1] == {
        "row": 6,
        "prediction_0": 2.0,
        "prediction_1": 3.0,
        "unreliability": None,
        "error_probability": None,
        "accepted": False,
    }


# -------------------------------------------------------------------------------------------------- evaluate


def test_evaluate_prints_what_python_finds(folder):
    with np.load(folder / "test.npz") as file:
        found = Guard.load(folder / "guard").evaluate((file["X"], file["y"]))
    stdout, stderr = terrafirma("evaluate", folder / "guard", folder / "test.npz")
    assert stdout == f"{found}\n"
    assert stderr == ""
    figures = document("evaluate", folder / "guard", folder / "test.npz")
    for name in ("n_samples", "error", "risk", "coverage", "aucea", "auroc", "promised_risk", "promised_confidence"):
        assert figures[name] == getattr(found, name)
    assert figures["requirements"] == []


def test_requirements_decide_the_exit_code(folder):
    with np.load(folder / "test.npz") as file:
        found = Guard.load(folder / "guard").evaluate((file["X"], file["y"]))
    start = ["evaluate", folder / "guard", folder / "test.npz"]
    holds, fails_ = f"risk@0.9<={found.risk_at(0.9)!r}", f"risk@0.9<{found.risk_at(0.9)!r}"
    stdout, stderr = terrafirma(*start, "--require", holds, "--require", "accuracy > 0")
    assert f"holds: {holds} (it is {found.risk_at(0.9):.6g})" in stdout.splitlines()
    assert stderr == ""
    _, stderr = terrafirma(*start, "--require", holds, "--require", fails_, code=1)
    assert stderr == f"FAILS: {fails_} (it is {found.risk_at(0.9):.6g})\n"
    outcome = document(*start, "--require", holds, "--require", fails_, code=1)["requirements"]
    assert outcome == [
        {"requirement": holds, "value": found.risk_at(0.9), "holds": True},
        {"requirement": fails_, "value": found.risk_at(0.9), "holds": False},
    ]


def test_malformed_requirements_are_wrong_usage(tmp_path):
    wrong_usage("Got 'risc<=0.1'.", "evaluate", tmp_path / "no", tmp_path / "no.npz", "--require", "risc<=0.1")


MALFORMED = [
    "",
    "risk",
    "risk<=",
    "risk=0.1",
    "risc<=0.1",
    "auroc@0.5>1",
    "risk@1.5<=1",
    "risk@x<=1",
    "risk<=nan",
    "risk<=0.1.1",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_requirements_have_one_form(text):
    sentence = (
        "A requirement must compare one of accuracy, error, coverage, risk, aucea, auroc, risk@SHARE or coverage@RISK with a "
        f'number, by <=, <, >= or >, for example "risk@0.9<=0.02". Got {text!r}.'
    )
    with pytest.raises(InvalidInput, match=f"^{re.escape(sentence)}$"):
        Requirement.parse(text)


def test_figures_are_those_of_the_evaluation(rng):
    from terrafirma.guard.verdict import evaluate

    u, errors = rng.random(50), (rng.random(50) < 0.3).astype(float)
    found = evaluate(u, errors, u < 0.5, 0.1, 0.9)
    order = np.argsort(u)
    values = {
        "accuracy": 1 - errors.mean(),
        "error": errors.mean(),
        "coverage": (u < 0.5).mean(),
        "risk": errors[u < 0.5].mean(),
        "aucea": found.aucea,
        "auroc": found.auroc,
        "risk@0.5": errors[order[:25]].mean(),
        "coverage@0.2": max((k / 50 for k in range(1, 51) if errors[order[:k]].mean() <= 0.2), default=0),
    }
    for name, value in values.items():
        assert Requirement.parse(f" {name} >= 1e-1").value(found) == pytest.approx(value)
    for operator, is_true in {"<=": True, ">=": True, "<": False, ">": False}.items():
        assert Requirement.parse(f"error{operator}0.5").holds(0.5) is is_true


def test_what_is_not_defined_fails(rng):
    from terrafirma.guard.verdict import evaluate

    found = evaluate(rng.random(5), np.zeros(5), np.zeros(5, bool), 0.1, 0.9)
    for text in ("risk<=1", "auroc>0"):
        requirement = Requirement.parse(text)
        assert requirement.value(found) is None
        assert requirement.holds(requirement.value(found)) is False


# ------------------------------------------------------------------------------------- explain, info, layers, export


def test_explain_shows_the_rows_asked_for(folder):
    with np.load(folder / "test.npz") as file:
        found = Guard.load(folder / "guard").explain(file["X"][[7, 3]], 2)
    start = ["explain", folder / "guard", folder / "test.npz", "--row", 7, "--row", 3, "-n", 2]
    stdout, _ = terrafirma(*start)
    assert stdout == f"row 7, id s7: {found[0]}\nrow 3, id s3: {found[1]}\n"
    parts = document(*start)["explanations"]
    assert [(part["row"], part["id"]) for part in parts] == [(7, "s7"), (3, "s3")]
    assert [part["unreliability"] for part in parts] == [one.unreliability for one in found]
    assert parts[0]["regions"][1]["samples"] == found[0].regions[1].samples.tolist()
    fails("row must lie in 0 to 960. Got 961; rows count from 0.", *start, "--row", N_TEST)


def test_info_needs_the_folder_alone(folder, tmp_path):
    stdout, _ = terrafirma("info", folder / "guard")
    lines = {line.split()[0]: line.split()[1:] for line in stdout.splitlines()}
    assert (lines["layers"], lines["widths"]) == (["relu0"], ["48"])
    assert lines["network"] == []
    assert lines["risk"] == ["0.08"]
    fails(f"{tmp_path / 'g'} does not exist. Save a guard there first.", "info", tmp_path / "g")


def test_layers_of_an_onnx_file_need_no_data(folder, tmp_path):
    stdout, _ = terrafirma("layers", folder / "net.onnx")
    assert [line.split() for line in stdout.splitlines()] == [
        ["name", "kind", "shape", "units"],
        ["relu0", "relu", "48", "48"],
    ]
    expected = [{"name": "relu0", "kind": "relu", "shape": [48], "units": 48}]
    assert document("layers", folder / "net.onnx") == {"layers": expected}
    assert document("layers", folder / "net.onnx", "--data", folder / "test.npz") == {"layers": expected}


def test_shapes_that_an_onnx_file_does_not_declare(folder, tmp_path):
    model = onnx.load(folder / "net.onnx")
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_value = 7
    onnx.save(model, tmp_path / "seven.onnx")
    assert zeros_for(tmp_path / "seven.onnx")["X"].shape == (7, 2)
    dims[1].dim_param = "features"
    path = tmp_path / "any.onnx"
    onnx.save(model, path)
    sentence = "{} must declare the shape of its inputs. Got X with unknown {}; give a file of samples with --data."
    fails(sentence.format(path, "features"), "layers", path)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    fails(sentence.format(path, "shape"), "layers", path)


def test_the_exported_graph_says_what_predict_says(folder, tmp_path, expected):
    import onnxruntime

    path = tmp_path / "guarded.onnx"
    assert document("export", folder / "guard", "-o", path) == {"output": str(path)}
    assert terrafirma("export", folder / "guard", "-o", path)[0] == f"Guarded network written to {path}\n"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with np.load(folder / "test.npz") as file:
        output, unreliability, accepted = session.run(["output", "unreliability", "accepted"], {"X": file["X"]})
    np.testing.assert_array_equal(output.argmax(axis=1), expected.prediction)
    np.testing.assert_allclose(unreliability, expected.unreliability, atol=1e-4)
    np.testing.assert_array_equal(accepted, expected.accepted)


# ---------------------------------------------------------------------------------------------- torch by import path


@pytest.fixture
def torch_options(folder, tmp_path, monkeypatch):
    """The same network as a torch module, by its import path."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part != str(folder)])
    weights = {
        value.name: onnx.numpy_helper.to_array(value) for value in onnx.load(folder / "net.onnx").graph.initializer
    }
    layers = {
        f"{2 * i}.{ours}": weights[f"{theirs}{i}"].T
        for i in (0, 1)
        for ours, theirs in (("weight", "W"), ("bias", "b"))
    }
    from safetensors.torch import save_file

    save_file({name: torch.tensor(value.copy()) for name, value in layers.items()}, tmp_path / "weights.safetensors")
    yield ["--model", "nets:network", "--weights", tmp_path / "weights.safetensors"]
    sys.modules.pop("nets", None)


def test_a_torch_network_by_its_import_path(folder, tmp_path, torch_options, expected):
    terrafirma(*fit_arguments(folder, None), *torch_options, "-o", tmp_path / "g")
    found = document("score", tmp_path / "g", folder / "test.npz", *torch_options)
    assert [row["prediction"] for row in found["rows"]] == expected.prediction.tolist()
    np.testing.assert_allclose([row["unreliability"] for row in found["rows"]], expected.unreliability, rtol=1e-6)
    layers = document("layers", *torch_options, "--data", folder / "test.npz")["layers"]
    assert layers == [{"name": "1", "kind": "relu", "shape": [48], "units": 48}]
    assert document("evaluate", tmp_path / "g", folder / "test.npz", *torch_options)["n_samples"] == N_TEST
    assert (
        document("explain", tmp_path / "g", folder / "test.npz", "--row", 0, *torch_options)["explanations"][0]["row"]
        == 0
    )
    wrong_usage("A torch network must run to show its layers: give samples with --data.", "layers", *torch_options)
    sentence = (
        f"The guard in {tmp_path / 'g'} must be given its network, which is code and in no file of ours. "
        "Name it: --model PKG.MOD:FUNCTION --weights FILE.safetensors."
    )
    fails(sentence, "score", tmp_path / "g", folder / "test.npz")
    run = CliRunner().invoke(app, ["score", str(tmp_path / "g"), str(folder / "test.npz"), "--model", "nets:network"])
    assert run.exit_code == 1
    assert "must be the one that the guard was fitted with" in str(run.exception)  # its weights are others


def test_a_network_that_prints_does_not_spoil_a_document(folder, tmp_path, torch_options):
    talkative = ["--model", "nets:talk", *torch_options[2:]]
    terrafirma(*fit_arguments(folder, None), *talkative, "-o", tmp_path / "g")
    assert document("score", tmp_path / "g", folder / "test.npz", *talkative)["n_samples"] == N_TEST


def test_networks_that_cannot_be_had(folder, tmp_path, torch_options):
    def says(sentence, name, weights=None, error=InvalidInput):
        with pytest.raises(error, match=f"^{re.escape(sentence)}"):
            named_network(name, weights)

    says("--model must read pkg.mod:function (it is called and gives a torch module). Got 'nets'.", "nets")
    says("--model must name a module that can be imported from here. Got 'no.such'.", "no.such:network")
    says("--model must name a function of nets. Got 'net', which it lacks.", "nets:net")
    (folder / "odd.py").write_text("network = 3\ndef broken(): return None.weight")
    says("--model must name a function of odd. Got 'network', which it lacks.", "odd:network")
    says("'NoneType' object has no attribute 'weight'", "odd:broken", error=AttributeError)
    says("--model must give a torch.nn.Module when called. Got NoneType from nets:nothing.", "nets:nothing")
    says(
        f"--weights must fit the network. Got {torch_options[-1]}: Error(s) in loading", "nets:wide", torch_options[-1]
    )
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    says(f"{broken} is not a whole safetensors file (", "nets:network", broken, BadFile)
    (folder / "needy.py").write_text("import no_such_package")
    says("No module named 'no_such_package'", "needy:network", error=ModuleNotFoundError)


# ------------------------------------------------------------------------------------------ as a user runs it


def shell(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "terrafirma", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_errors_of_files_are_one_sentence_and_exit_code_1(folder):
    run = shell(folder, "score", "guard", "missing.npz", "--json")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "error: missing.npz does not exist. Give the path of a file of samples.\n"


def test_a_failed_requirement_is_exit_code_1_and_leaves_json_whole(folder):
    run = shell(folder, "evaluate", "guard", "test.npz", "--require", "coverage>1", "--json")
    assert run.returncode == 1
    coverage = json.loads(run.stdout)["coverage"]
    assert run.stderr == f"FAILS: coverage>1 (it is {coverage:.6g})\n"
