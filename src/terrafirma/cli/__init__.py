"""The command line: parse, call, print."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run ``terrafirma``; errors of ours and of files end as one sentence, with exit code 1."""
    from rich.console import Console
    from rich.text import Text

    from terrafirma.cli.app import app
    from terrafirma.errors import TerrafirmaError

    try:
        app()
    except (TerrafirmaError, OSError) as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)
