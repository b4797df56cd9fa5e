"""The commands."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrafirma._version import __version__
from terrafirma.capture.record import BATCH_SIZE
from terrafirma.capture.record import layers as layers_of
from terrafirma.capture.record import record as record_of
from terrafirma.cli import scores
from terrafirma.cli.networks import named_network, zeros_for
from terrafirma.cli.options import (
    AsJson,
    BatchSize,
    Confidence,
    Data,
    Delta,
    ErrorName,
    GuardFolder,
    ModelName,
    OnnxFile,
    Reduce,
    Require,
    Rho,
    Risk,
    Weights,
    as_error,
)
from terrafirma.cli.output import print_card, print_json, print_table
from terrafirma.cli.samples import Samples, read_samples, take
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded

if TYPE_CHECKING:
    from terrafirma.guard.guard import Guard

__all__ = ["app"]

app = typer.Typer(
    name="terrafirma",
    help="Which predictions of a trained network stand on firm ground?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SHOWN = 10  # rows that score prints where it writes no file


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"terrafirma {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Which predictions of a trained network stand on firm ground?"""


@app.command()
def fit(  # noqa: PLR0913  # one parameter for each option
    train: Annotated[Path, typer.Option(help="What the network was trained on: .npz, .parquet or a recording.")],
    validation: Annotated[Path, typer.Option(help="Labelled samples that it was not trained on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the guard.")],
    onnx: OnnxFile = None,
    model: ModelName = None,
    weights: Weights = None,
    calibration: Annotated[
        Path | None, typer.Option(help="More such, for the threshold alone; else half of these.")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="Name or glob of a layer to record; by default the last.")
    ] = None,
    reduce: Annotated[Reduce, typer.Option(help="Of maps: every position, any of them, or their mean.")] = Reduce.none,
    risk: Risk = 0.02,
    confidence: Confidence = 0.95,
    score: Annotated[
        str | None, typer.Option(help="Name of a score (terrafirma scores lists them); by default subfunction.")
    ] = None,
    rho: Rho = None,
    delta: Delta = None,
    error: ErrorName = None,
    batch_size: BatchSize = BATCH_SIZE,
    as_json: AsJson = False,
) -> None:
    """Learn which predictions of a network to accept, and save that as a folder."""
    is_sample_file = [path is not None and path.suffix != ".safetensors" for path in (train, validation, calibration)]
    network = _network(onnx, model, weights, needed=any(is_sample_file))
    if (rho is None) != (delta is None):
        raise typer.BadParameter("--rho and --delta must be given together, or neither, to select both.")
    if score is not None and rho is not None:
        raise typer.BadParameter("--rho and --delta belong to the subfunction bound. Leave out --score, or them.")

    from terrafirma.guard import files
    from terrafirma.guard.guard import Guard
    from terrafirma.scores.subfunction import SubfunctionBound

    files.check_target(output)
    chosen = score if rho is None or delta is None else SubfunctionBound(rho, delta)
    guard = Guard(network, chosen, layer or None, reduce.value, as_error(error), batch_size)
    trained, validated = (read_samples(path, batch_size, labelled=True) for path in (train, validation))
    calibrated = None if calibration is None else read_samples(calibration, batch_size, labelled=True)
    guard.fit(trained, validated, calibrated, risk, confidence, verbose=False).save(output)
    if as_json:
        print_json({"guard": output, **files.about(output)})
    else:
        print(f"{guard.summary()}\nGuard saved in {output}")


@app.command()
def record(  # noqa: PLR0913  # one parameter for each option
    data: Annotated[Path, typer.Option(help="Samples: .npz or .parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recording to write, .safetensors.")],
    onnx: OnnxFile = None,
    model: ModelName = None,
    weights: Weights = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="Name or glob of a layer whose patterns to record; by default the last.")
    ] = None,
    reduce: Annotated[Reduce, typer.Option(help="Of maps: every position, any of them, or their mean.")] = Reduce.none,
    features: Annotated[bool, typer.Option("--features", help="Keep what these layers give, too.")] = False,
    features_of: Annotated[
        list[str] | None, typer.Option(help="Keep what other layers give, maps averaged; may be repeated.")
    ] = None,
    inputs: Annotated[bool, typer.Option("--inputs", help="Keep the inputs.")] = False,
    dropout: Annotated[
        list[float] | None, typer.Option(help="Probability for stochastic passes; may be repeated.")
    ] = None,
    error: ErrorName = None,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="Do not look at labels: of samples that are none of the classes.")
    ] = False,
    batch_size: BatchSize = BATCH_SIZE,
    as_json: AsJson = False,
) -> None:
    """Run a network over samples once and keep what scores need of it; goes on where it was if it is killed."""
    network = _network(onnx, model, weights)
    if output.suffix != ".safetensors":
        raise typer.BadParameter(f"-o must end in .safetensors, the format of recordings. Got {output}.")
    if features and features_of:
        raise typer.BadParameter(
            "--features keeps what the pattern's layers give, --features-of other layers: give one."
        )
    samples = read_samples(data, batch_size, labelled=not no_labels)
    recorded = record_of(
        network,
        samples,
        layer or None,
        reduce.value,
        error=as_error(error),
        features=features_of or features,
        inputs=inputs,
        dropout=dropout or (),
        path=output,
        batch_size=batch_size,
    )
    if as_json:
        print_json({"recording": output, "n_samples": len(recorded), "layers": recorded.layer_names})
    else:
        print(f"{recorded!r} written to {output}")


@app.command()
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="GUARD_OR_RECORDED...", help="Recordings train, validation, test; or guards and test."),
    ],
    ood: Annotated[
        list[str] | None, typer.Option(metavar="NAME=RECORDING", help="Samples that the network must not know.")
    ] = None,
    score: Annotated[
        list[str] | None, typer.Option(help="Name of a score; may be repeated. By default all that can be computed.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File: .md, .csv, .tex or .json.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Bootstrap draws for the intervals.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of these draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure scores side by side: which tells wrong and unknown samples from right ones best?"""
    from terrafirma.cli import comparing

    try:
        comparing.check_arguments(paths, score, ood or [], output)
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error
    found = comparing.comparison_of(paths, score, ood or [], draws=draws, seed=seed)
    if output is not None:
        comparing.write(output, found)
    if as_json:
        print_json(comparing.as_document(found))
    else:
        written = "\n".join([f"Comparison of {len(found.settings)} scores written to {output}", *found.notes()])
        print(found if output is None else written)


@app.command("scores")
def list_scores(as_json: AsJson = False) -> None:
    """List the scores: what each needs to be recorded, what it costs, where it is from."""
    from terrafirma.scores import describe

    table = describe()
    if as_json:
        print_json({"scores": [dict(zip(table.names, row, strict=True)) for row in table.rows]})
    else:
        print(table)


@app.command()
def score(
    folder: GuardFolder,
    samples: Annotated[Path, typer.Argument(help="New samples; labels are not looked at.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for scores: .parquet, .csv or .json.")
    ] = None,
    model: ModelName = None,
    weights: Weights = None,
    batch_size: BatchSize = BATCH_SIZE,
    as_json: AsJson = False,
) -> None:
    """Say of each sample what the network predicts, how unreliable that is, and whether to accept it."""
    if output is not None:
        scores.check_ending(output)
    data = read_samples(samples, batch_size, labelled=False)
    found = scores.Scores(_guard(folder, model, weights, data), data)
    shown: list[dict[str, Any]] = []
    if output is not None:
        scores.write(output, found)
    else:
        rows = (row for columns in found for row in scores.records(columns))
        shown = list(rows) if as_json else [row for number, row in enumerate(rows) if number < SHOWN]
    n = len(data)
    if as_json:
        counts = {"n_samples": n, "accepted": found.n_accepted, "refused": n - found.n_accepted}
        print_json(counts | ({"rows": shown} if output is None else {"output": output}))
        return
    if output is None:
        print_table(list(shown[0]), [list(row.values()) for row in shown])
    where = f"; first {len(shown)} shown, -o FILE writes all" if len(shown) < n else ""
    where = where if output is None else f"; written to {output}"
    print(f"{n} predictions: {found.n_accepted} accepted, {n - found.n_accepted} refused{where}")


@app.command()
def evaluate(
    folder: GuardFolder,
    test: Annotated[Path, typer.Argument(help="Labelled samples that neither network nor guard has seen.")],
    require: Require = None,
    model: ModelName = None,
    weights: Weights = None,
    batch_size: BatchSize = BATCH_SIZE,
    as_json: AsJson = False,
) -> None:
    """Measure a guard on labelled samples; exit with 1 where a requirement fails."""
    data = read_samples(test, batch_size, labelled=True)
    found = _guard(folder, model, weights, data).evaluate(data)
    asked = [(requirement, requirement.value(found)) for requirement in require or []]
    outcome = [{"requirement": r.text, "value": value, "holds": r.holds(value)} for r, value in asked]
    if as_json:
        figures = {part.name: getattr(found, part.name) for part in fields(found)}
        by_row = ("unreliability", "errors")
        print_json({name: value for name, value in figures.items() if name not in by_row} | {"requirements": outcome})
    else:
        print(found)
    for line in outcome:
        value = "not defined here" if line["value"] is None else f"{line['value']:.6g}"
        word = "holds" if line["holds"] else "FAILS"
        typer.echo(f"{word}: {line['requirement']} (it is {value})", err=as_json or not line["holds"])
    if not all(line["holds"] for line in outcome):
        raise typer.Exit(1)


@app.command()
def explain(
    folder: GuardFolder,
    samples: Annotated[Path, typer.Argument(help="Samples.")],
    row: Annotated[list[int], typer.Option(min=0, help="Which sample, counted from 0; may be repeated.")],
    n: Annotated[int, typer.Option("-n", min=1, help="Training regions to show of each.")] = 5,
    model: ModelName = None,
    weights: Weights = None,
    as_json: AsJson = False,
) -> None:
    """Show the training samples on which the reliability of a prediction rests."""
    data = read_samples(samples, BATCH_SIZE, labelled=False)
    chosen, ids = take(data, row), getattr(data, "ids", None)
    found = _guard(folder, model, weights, data).explain(chosen, n)
    about = [{"row": r} if ids is None else {"row": r, "id": ids[r]} for r in row]
    if as_json:
        print_json({"explanations": [named | asdict(part) for named, part in zip(about, found, strict=True)]})
        return
    for named, part in zip(about, found, strict=True):
        print(f"{', '.join(f'{name} {value}' for name, value in named.items())}: {part}")


@app.command()
def info(folder: GuardFolder, as_json: AsJson = False) -> None:
    """Say what a guard is, from its folder alone."""
    from terrafirma.guard import files

    card = files.about(folder)
    if as_json:
        print_json({"guard": folder, **card})
    else:
        print_card(card)


@app.command()
def layers(
    onnx: OnnxFile = None,
    model: ModelName = None,
    weights: Weights = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """List the layers of a network that fit could record."""
    network = _network(onnx, model, weights)
    if onnx is None and data is None:
        raise typer.BadParameter("A torch network must run to show its layers: give samples with --data.")
    found = layers_of(network, zeros_for(network) if data is None else _first_inputs(data, 2))
    if as_json:
        about = [{"name": x.name, "kind": x.kind, "shape": x.shape, "units": math.prod(x.shape)} for x in found]
        print_json({"layers": about})
    else:
        rows = [(x.name, x.kind, " x ".join(map(str, x.shape)), math.prod(x.shape)) for x in found]
        print_table(["name", "kind", "shape", "units"], rows)


@app.command()
def export(
    folder: GuardFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file to write.")],
    model: ModelName = None,
    weights: Weights = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Write network and guard as one ONNX graph: inputs to output, unreliability and accepted."""
    _guard(folder, model, weights).export(output, None if data is None else _first_inputs(data, BATCH_SIZE))
    if as_json:
        print_json({"output": output})
    else:
        print(f"Guarded network written to {output}")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pictures and tables.")] = Path(
        "terrafirma-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 2, help="Seed of data, splits and networks.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Half moons shattered into linear regions, and digits that meet the unknown: under a minute, no download."""
    from terrafirma.cli import demo  # only now: it loads all that computes

    results = demo.run(output, seed)
    if as_json:
        print_json(results)


def _network(onnx: Path | None, model: str | None, weights: Path | None, *, needed: bool = True) -> Any:
    """The network that the command line names: a path, or a torch module; None where it names none and none is needed."""
    if (onnx is None) == (model is None) and (needed or onnx is not None):
        raise typer.BadParameter("Name one network: MODEL.onnx, or --model PKG.MOD:FUNCTION.")
    if weights is not None and model is None:
        raise typer.BadParameter("--weights goes with --model PKG.MOD:FUNCTION; an ONNX file has its own.")
    return onnx if model is None else named_network(model, weights)


def _guard(folder: Path, model: str | None, weights: Path | None, data: Samples | Recorded | None = None) -> Guard:
    """The guard of a folder, with a network that can run; recordings need none."""
    network = _network(None, model, weights, needed=False)

    from terrafirma.guard.guard import Guard

    guard = Guard.load(folder, network)
    if guard.model is None and not isinstance(data, Recorded):
        raise InvalidInput(
            f"The guard in {folder} must be given its network, which is code and in no file of ours. "
            "Name it: --model PKG.MOD:FUNCTION --weights FILE.safetensors."
        )
    return guard


def _first_inputs(path: Path, n: int) -> Any:
    """Inputs of the first samples."""
    data = read_samples(path, n, labelled=False)
    if isinstance(data, Recorded):
        raise InvalidInput(f"--data must hold samples. Got the recording {path}; give .npz, .npy or .parquet.")
    return next(iter(data)).inputs
