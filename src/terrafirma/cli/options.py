"""The options that commands share. Values are checked while they are parsed, so that no work is done for a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from terrafirma.cli.networks import check_model_name
from terrafirma.cli.requirements import Requirement
from terrafirma.core._checks import check_delta, check_positive, check_share
from terrafirma.errors import InvalidInput
from terrafirma.recorded import ClippedError

__all__ = [
    "AsJson",
    "BatchSize",
    "Confidence",
    "Data",
    "Delta",
    "ErrorName",
    "GuardFolder",
    "ModelName",
    "OnnxFile",
    "Reduce",
    "Require",
    "Rho",
    "Risk",
    "Weights",
    "as_error",
]

T = TypeVar("T")


def _usage(parse: Callable[[Any], T]) -> Callable[[Any], T]:
    """The same function, with errors that end the command as wrong usage."""

    def parsed(value: Any) -> T:
        try:
            return parse(value)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def _check_share(value: float) -> float:
    return check_share("It", value, "a probability")


def _check_rho(value: float | None) -> float | None:
    return None if value is None else check_positive("rho", value, "the kernel's width in bits")


def _check_delta(value: float | None) -> float | None:
    if value is not None:
        check_delta(value)
    return value


def _check_model_name(value: str | None) -> str | None:
    return None if value is None else check_model_name(value)


def as_error(text: str | None) -> ClippedError | None:
    """The error function that ``clipped:SCALE`` names."""
    if text is None:
        return None
    kind, _, scale = text.partition(":")
    try:
        if kind == "clipped":
            return ClippedError(float(scale))
    except ValueError:
        pass
    raise InvalidInput(
        f"--error must be clipped:SCALE (the absolute error that counts as wholly wrong), as clipped:2.5. Got {text!r}."
    )


def _check_error(value: str | None) -> str | None:
    as_error(value)
    return value


class Reduce(StrEnum):
    """How to reduce maps."""

    none = "none"
    any = "any"
    mean = "mean"


GuardFolder = Annotated[Path, typer.Argument(metavar="GUARD", help="Folder that fit wrote.")]
OnnxFile = Annotated[Path | None, typer.Argument(metavar="MODEL.onnx", help="The network; or see --model.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MOD:FUNCTION",
        callback=_usage(_check_model_name),
        help="Called, it gives a torch module.",
    ),
]
Weights = Annotated[Path | None, typer.Option(help="Weights of that module, .safetensors.")]
Data = Annotated[Path | None, typer.Option(help="A file of samples, of which the first two are used.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples that run through the network at a time.")]
Risk = Annotated[float, typer.Option(callback=_usage(_check_share), help="Largest mean error of accepted predictions.")]
Confidence = Annotated[float, typer.Option(callback=_usage(_check_share), help="Probability that this promise holds.")]
Rho = Annotated[
    float | None, typer.Option(callback=_usage(_check_rho), help="Width of the kernel in bits; with --delta.")
]
Delta = Annotated[float | None, typer.Option(callback=_usage(_check_delta), help="Confidence of the gap; with --rho.")]
ErrorName = Annotated[
    str | None,
    typer.Option(
        "--error",
        metavar="clipped:SCALE",
        callback=_usage(_check_error),
        help="For regression: absolute error over SCALE, at most 1. By default a wrong class is an error of 1.",
    ),
]
Require = Annotated[
    list[Requirement] | None,
    typer.Option(
        parser=_usage(Requirement.parse),
        metavar="FIGURE<=NUMBER",
        help='Exit with 1 unless this holds: "risk@0.9<=0.02", "coverage>0.8", "auroc>=0.7", ...',
    ),
]
