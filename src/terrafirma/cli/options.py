"""The options that commands share. Values are checked while they are parsed, so that no work is done for a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from terrafirma.cli.networks import check_model_name
from terrafirma.cli.output import keep_stdout_clean
from terrafirma.cli.requirements import Requirement
from terrafirma.core._checks import check_delta, check_positive, check_share
from terrafirma.errors import InvalidInput
from terrafirma.policy.threshold import CONFIDENCE, RISK
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


def _checked(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The value, if it is given and passes; else the error of the check ends the command as wrong usage."""

    def checked(value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return checked


def _requirement(text: str) -> Requirement:
    _checked(Requirement.parse)(text)
    return Requirement.parse(text)


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
        callback=_checked(check_model_name),
        help="Called, it gives a torch module.",
    ),
]
Weights = Annotated[Path | None, typer.Option(help="Weights of that module, .safetensors.")]
Data = Annotated[Path | None, typer.Option(help="A file of samples, of which the first are used.")]
AsJson = Annotated[bool, typer.Option("--json", callback=keep_stdout_clean, help="Print one JSON document.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples that run through the network at a time.")]
Risk = Annotated[
    float,
    typer.Option(
        callback=_checked(partial(check_share, "risk", meaning=RISK)),
        help="Largest mean error of accepted predictions.",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        callback=_checked(partial(check_share, "confidence", meaning=CONFIDENCE)),
        help="Probability that this promise holds.",
    ),
]
Rho = Annotated[
    float | None,
    typer.Option(
        callback=_checked(partial(check_positive, "rho", meaning="the kernel's width in bits")),
        help="Width of the kernel in bits; with --delta.",
    ),
]
Delta = Annotated[float | None, typer.Option(callback=_checked(check_delta), help="Confidence of the gap; with --rho.")]
ErrorName = Annotated[
    str | None,
    typer.Option(
        "--error",
        metavar="clipped:SCALE",
        callback=_checked(as_error),
        help="For regression: absolute error over SCALE, at most 1. By default a wrong class is an error of 1.",
    ),
]
Require = Annotated[
    list[Requirement] | None,
    typer.Option(
        parser=_requirement,
        metavar="FIGURE<=NUMBER",
        help='Exit with 1 unless this holds: "risk@0.9<=0.02", "coverage>0.8", "auroc>=0.7", ...',
    ),
]
