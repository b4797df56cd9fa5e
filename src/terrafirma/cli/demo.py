"""``terrafirma demo``: the paper's first picture, and a first answer to "which predictions can I trust?"."""

from __future__ import annotations

import csv
import io
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from terrafirma import storage
from terrafirma._version import __version__
from terrafirma.errors import require
from terrafirma.experiments import digits, half_moons
from terrafirma.experiments.digits import REFUSED, Digits, ScoreRow
from terrafirma.experiments.half_moons import HalfMoons
from terrafirma.report import figures

__all__ = ["run"]


def run(output: Path, seed: int) -> dict[str, Any]:
    """Run both experiments, print the tables, write everything to ``output``; the results are those of its results.json."""
    require("matplotlib", extra="plots")  # rather now than after the work
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        moons_task = progress.add_task("half moons", total=half_moons.STEPS)
        digits_task = progress.add_task("digits    ", total=digits.STEPS)
        pictures_task = progress.add_task("pictures  ", total=4)
        moons = half_moons.run(seed, lambda: progress.advance(moons_task))
        found = digits.run(seed, lambda: progress.advance(digits_task))
        for name, figure in (
            ("half_moons", figures.half_moons_figure(moons)),
            ("digits", figures.digits_figure(found)),
        ):
            for kind in ("png", "svg"):
                storage.write_bytes(output / f"{name}.{kind}", figures.render(figure, kind))
                progress.advance(pictures_task)
    results = _write_results(output, seed, moons, found)
    _print_half_moons(console, moons)
    _print_digits(console, found)
    console.print(f"\nPictures and tables: {output.resolve()}", soft_wrap=True, highlight=False)
    return results


def _print_half_moons(console: Console, moons: HalfMoons) -> None:
    best = moons.selection.best
    console.print(
        f"\n[bold]Half moons.[/] An MLP 2-32-32-2 ({moons.accuracy:.1%} right) cuts the square into "
        f"{len(moons.regions)} linear regions; training points populate {len(best.regions_)}.\n"
        f"Their log bounds run from {moons.log_bounds.min():.1f} to {moons.log_bounds.max():.1f} "
        f"(rho {best.rho:g} bits, delta {best.delta:g}).",
        highlight=False,
    )
    if np.ptp(moons.selection.table.metric) == 0:
        console.print("All settings ranked the validation set equally well; the first one stands.", style="dim")


def _print_digits(console: Console, found: Digits) -> None:
    known = ~found.novel
    best = found.selection.best
    console.print(
        f"\n[bold]Digits.[/] An MLP learned 0-7 from {found.n_train} images. It meets {known.sum()} new ones, of which it gets "
        f"{found.wrong.sum()} wrong, and {found.novel.sum()} images of 8 and 9, which it cannot get right.\n"
        f"Settings by validation misclassification alone: rho {best.rho:.3g} of {best.n_units_} bits, delta {best.delta:g}.",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("unreliability", no_wrap=True)
    for heading in ("wrong", "95 %", "AUCEA", "8 and 9", *(f"-{share:.0%}" if share else "all" for share in REFUSED)):
        table.add_column(heading, justify="right")
    columns = list(zip(*(_numbers(row) for row in found.rows), strict=True))
    for row in found.rows:
        cells = [
            f"[bold]{value:.3f}[/]" if value == max(column) else f"{value:.3f}"
            for value, column in zip(_numbers(row), columns, strict=True)
        ]
        interval = f"{row.auroc_wrong.low:.2f}-{row.auroc_wrong.high:.2f}"
        table.add_row(row.score, cells[0], interval, *cells[1:])
    console.print(table)
    console.print(
        "wrong, 8 and 9: AUROC of telling them from the right, from 0-7 (95 %: its interval). AUCEA: mean accuracy over all "
        "shares accepted. all, -10 % ...: accuracy on 0-7 when that share, the least reliable, is refused.",
        style="dim",
        highlight=False,
    )


def _numbers(row: ScoreRow) -> list[float]:
    return [row.auroc_wrong.value, row.aucea, row.auroc_novel, *row.accuracy]


def _write_results(output: Path, seed: int, moons: HalfMoons, found: Digits) -> dict[str, Any]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ends = ["auroc_wrong_low", "auroc_wrong_high"]
    numbers = [
        "auroc_wrong",
        "aucea",
        "auroc_novel",
        *(f"accuracy_refusing_{share:.0%}".strip("%") for share in REFUSED),
    ]
    writer.writerow(["score", *numbers, *ends])
    writer.writerows([row.score, *_numbers(row), row.auroc_wrong.low, row.auroc_wrong.high] for row in found.rows)
    storage.write_bytes(output / "digits.csv", text.getvalue().encode())

    known = ~found.novel
    results: dict[str, Any] = {
        "terrafirma": __version__,
        "python": platform.python_version(),
        "seed": seed,
        "half_moons": {
            "validation_accuracy": moons.accuracy,
            "linear_regions": len(moons.regions),
            "populated_regions": len(moons.selection.best.regions_),
            "rho": moons.selection.best.rho,
            "delta": moons.selection.best.delta,
            "log_bound_range": [float(moons.log_bounds.min()), float(moons.log_bounds.max())],
        },
        "digits": {
            "train": found.n_train,
            "test_known": int(known.sum()),
            "test_wrong": int(found.wrong.sum()),
            "test_novel": int(found.novel.sum()),
            "rho": found.selection.best.rho,
            "delta": found.selection.best.delta,
            "refused": list(REFUSED),
            "scores": [asdict(row) for row in found.rows],
        },
    }
    storage.write_bytes(output / "results.json", (json.dumps(results, indent=2) + "\n").encode())
    return results
