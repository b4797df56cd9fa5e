"""What commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

import numpy as np
import typer

__all__ = ["keep_stdout_clean", "plain", "print_card", "print_json", "print_table"]

STDOUT: ContextVar[TextIO] = ContextVar("stdout of the command")
WIDTH = 1000  # where no terminal sets one: nothing is cut off


def plain(value: Any) -> Any:
    """The value as JSON knows it; numbers that are not finite become null.

    >>> plain({"a": np.array([1.5, np.nan]), 2: (np.bool_(True), "x")})
    {'a': [1.5, None], '2': [True, 'x']}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def keep_stdout_clean(context: typer.Context, asked: bool) -> bool:
    """Until the command ends, whatever a user's network prints goes to the error stream; ``print_json`` still finds its way."""
    if asked:
        STDOUT.set(sys.stdout)
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return asked


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document."""
    print(json.dumps(plain(document), indent=2, allow_nan=False), file=STDOUT.get())


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print columns: numbers to the right, text to the left."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for j, name in enumerate(names):
        is_number = all(isinstance(row[j], int | float) and not isinstance(row[j], bool) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_shown(value)) for value in row))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_card(card: Mapping[str, Any], indent: str = "") -> None:
    """Print settings within settings, a line for each."""
    for name, value in card.items():
        if isinstance(value, Mapping) and value:
            print(f"{indent}{name}")
            print_card(value, f"{indent}  ")
        elif value not in (None, {}, [], ""):
            shown = "; ".join(map(str, value)) if isinstance(value, list) else value
            print(f"{indent}{name:<{20 - len(indent)}}{shown}")
