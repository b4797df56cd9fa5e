"""What commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["plain", "print_card", "print_json", "print_table"]

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


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document."""
    print(json.dumps(plain(document), indent=2, allow_nan=False))


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
