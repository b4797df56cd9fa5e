"""What ``terrafirma compare`` takes, and the files that a comparison is written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrafirma.cli.output import plain
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.storage import write_bytes

if TYPE_CHECKING:
    from terrafirma.comparison import Comparison

__all__ = ["as_document", "check_arguments", "comparison_of", "write"]

ENDINGS = (".csv", ".md", ".tex", ".json")
BOUNDS = ("value", "low", "high")


def check_arguments(
    paths: Sequence[Path], scores: Sequence[str] | None, ood: Sequence[str], output: Path | None
) -> None:
    """Raise, before anything is read, unless the command is well formed."""
    from terrafirma.scores import get

    if output is not None and output.suffix not in ENDINGS:
        raise InvalidInput(f"A file of a comparison must end in {', '.join(ENDINGS)}. Got {output}; rename it.")
    if output is not None and not output.parent.is_dir():
        raise InvalidInput(f"-o must lie in a folder that exists. Got {output}.")
    for name in scores or ():
        get(name)
    files = [path for path in paths if not path.is_dir()]
    guards = len(paths) - len(files)
    if len(files) != 3 and not (guards and len(files) == 1 and not scores):
        asked = ", and --score" if scores else ""
        raise InvalidInput(
            "compare must get three recordings (train, validation, test), and guards if there are any; or guards and one "
            f"recording, the test set. Got {guards} guards and {len(files)} recordings{asked}."
        )
    names = [str(path) for path in paths if path.is_dir()] + [_split(text)[0] for text in ood]
    if len(set(names)) < len(names):
        raise InvalidInput(f"Guards and sets must differ in name. Got {', '.join(names)}; leave out what comes twice.")
    for path in (*files, *(_split(text)[1] for text in ood)):
        if path.suffix != ".safetensors":
            raise InvalidInput(
                f"compare must get recordings (.safetensors). Got {path}; make one with terrafirma record."
            )


def comparison_of(paths: Sequence[Path], scores: Sequence[str] | None, ood: Sequence[str], **more: Any) -> Comparison:
    """Compare scores on recordings (train, validation, test), guards on a test recording, or both."""
    from terrafirma.comparison import compare
    from terrafirma.guard.guard import Guard

    *learned, test = (Recorded.load(path) for path in paths if not path.is_dir())
    train, validation = learned or (None, None)
    unseen = {name: Recorded.load(path) for name, path in map(_split, ood)}
    guards = {str(path): Guard.load(path) for path in paths if path.is_dir()}
    chosen = None if learned and not scores else list(scores or ())
    return compare({"network": (train, validation, test, unseen)}, chosen, guards, **more)


def _split(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InvalidInput(f"--ood must read NAME=RECORDING, as svhn=svhn.safetensors. Got {text!r}.")
    return name, Path(path)


def write(path: Path, found: Comparison) -> None:
    """Write a comparison in the format that the file's name asks for."""
    formats: dict[str, Callable[[], str]] = {
        ".csv": found.to_csv,
        ".md": found.to_markdown,
        ".tex": found.to_latex,
        ".json": partial(_json, found),
    }
    write_bytes(path, formats[path.suffix]().encode())


def _json(found: Comparison) -> str:
    return json.dumps(as_document(found), indent=2, allow_nan=False) + "\n"


def as_document(found: Comparison) -> dict[str, Any]:
    """All figures as JSON knows them."""
    rows = [
        {"score": row.score, "data": row.data, "metric": row.metric} | dict(zip(BOUNDS, row.bounds, strict=True))
        for row in found.results
    ]
    left_out = {score: why for (_, score), why in found.left_out.items()}
    document: dict[str, Any] = plain({"results": rows, "left_out": left_out})
    return document
