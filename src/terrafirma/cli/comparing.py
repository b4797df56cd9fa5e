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

__all__ = ["as_document", "check_ending", "comparison_of", "write"]

ENDINGS = (".csv", ".md", ".tex", ".json")
BOUNDS = ("value", "low", "high")


def comparison_of(paths: Sequence[Path], scores: Sequence[str] | None, ood: Sequence[str], **more: Any) -> Comparison:
    """Compare scores on recordings (train, validation, test), guards on a test recording, or both."""
    from terrafirma.comparison import compare
    from terrafirma.guard.guard import Guard
    from terrafirma.scores import get

    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist. Give recordings, and folders of guards.")
    for name in scores or ():
        get(name)  # rather now than after everything is read
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if len(files) != 3 and not (folders and len(files) == 1 and not scores):
        asked = ", and --score" if scores else ""
        raise InvalidInput(
            "compare must get three recordings (train, validation, test), and guards if there are any; or guards and one "
            f"recording, the test set. Got {len(folders)} guards and {len(files)} recordings{asked}."
        )
    *learned, test = (_recording(path) for path in files)
    train, validation = learned or (None, None)
    unseen = [_named(text) for text in ood]
    names = [*map(str, folders), *(name for name, _ in unseen)]
    if len(set(names)) < len(names):
        raise InvalidInput(f"Guards and sets must differ in name. Got {', '.join(names)}; leave out what comes twice.")
    guards = {str(folder): Guard.load(folder) for folder in folders}
    names = list(scores) if scores else []
    chosen = None if learned and not names else names
    return compare({"network": (train, validation, test, dict(unseen))}, chosen, guards, **more)


def _named(text: str) -> tuple[str, Recorded]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InvalidInput(f"--ood must read NAME=RECORDING, as svhn=svhn.safetensors. Got {text!r}.")
    return name, _recording(Path(path))


def _recording(path: Path) -> Recorded:
    if path.suffix != ".safetensors":
        raise InvalidInput(f"compare must get recordings (.safetensors). Got {path}; make one with terrafirma record.")
    return Recorded.load(path)


def check_ending(path: Path) -> None:
    """Raise unless there is a format for files of this name."""
    if path.suffix not in ENDINGS:
        raise InvalidInput(f"A file of a comparison must end in {', '.join(ENDINGS)}. Got {path}; rename it.")


def write(path: Path, found: Comparison) -> None:
    """Write a comparison in the format that the file's name asks for."""
    check_ending(path)
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
