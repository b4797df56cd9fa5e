"""The commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terrafirma._version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="terrafirma",
    help="Which predictions of a trained network stand on firm ground?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for pictures and tables.")] = Path(
        "terrafirma-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 2, help="Seed of data, splits and networks.")] = 0,
) -> None:
    """Half moons shattered into linear regions, and digits that meet the unknown: under a minute, no download."""
    from terrafirma.cli import demo  # only now: it loads all that computes

    demo.run(output, seed)
