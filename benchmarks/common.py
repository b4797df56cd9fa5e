"""What the benchmarks share: patterns like real ones, a fair stopwatch, the machine, and reports.

The stopwatch warms every competitor up, then lets them run in turns and keeps each one's best time: other
work on the machine then slows all of them alike, and the ratios of the best times stay true where the times
do not.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from terrafirma.core._threads import n_threads

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("terrafirma", "numpy", "scipy", "numba", "llvmlite")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vpopcntdq")  # those that decide how fast bits can be counted
N_TRAIN = 42_500  # training samples of the paper's job

BoolArray = npt.NDArray[np.bool_]


# --------------------------------------------------------------------------------------------------- patterns


@dataclass(frozen=True)
class Clusters:
    """Activation patterns like those of a classifier: a typical one for each class, and bits that differ.

    ``centres``, bool (classes, M), are the typical patterns, three bits in ten active.
    """

    centres: BoolArray
    rng: np.random.Generator

    FLIPPED = 0.15  # share of bits in which a sample differs from its centre

    @classmethod
    def seeded(cls, M: int, classes: int = 10, seed: int = 0) -> Clusters:
        """Centres of their own for each size and seed."""
        rng = np.random.default_rng(seed)
        return cls(rng.random((classes, M)) < 0.3, rng)

    def draw(self, n: int) -> BoolArray:
        """Draw patterns of ``n`` samples, bool (n, M)."""
        M = self.centres.shape[1]
        out = np.empty((n, M), dtype=np.bool_)
        limit = round(self.FLIPPED * 2**16)  # 16 random bits to a coin: four times as fast as floats
        for start in range(0, n, 1024):
            rows = out[start : start + 1024]
            classes = self.rng.integers(0, len(self.centres), len(rows))
            rows[:] = self.centres[classes]
            rows ^= self.rng.integers(0, 2**16, (len(rows), M), dtype=np.uint16) < limit
        return out

    def wrong(self, n: int, share: float) -> BoolArray:
        """Draw errors of ``n`` samples, exactly this share of them wrong: bool (n,)."""
        errors = np.zeros(n, dtype=np.bool_)
        errors[self.rng.permutation(n)[: round(share * n)]] = True
        return errors


# -------------------------------------------------------------------------------------------------- stopwatch


def race(
    competitors: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.5,
    least: int = 3,
    most: int = 100,
    warm_up: bool = True,
) -> dict[str, float]:
    """Find the best time of each competitor, in seconds.

    Each runs once to warm up; then all run in turns. One that has used up its ``seconds`` and had ``least``
    turns drops out, so that slow competitors do not hold up the race. Every round has another order: threads
    that wait busily for more work, as those of BLAS and OpenMP do, slow down whoever comes next, but not
    always the same.
    """
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for run in competitors.values() if warm_up else ():
        run()
    rng = np.random.default_rng(0)
    for _ in range(most):
        for name in rng.permutation(list(competitors)).tolist():
            if len(times[name]) < least or sum(times[name]) < seconds:
                times[name].append(seconds_of(competitors[name]))
    return {name: min(seen) for name, seen in times.items()}


def seconds_of(run: Callable[[], object]) -> float:
    """Time one call. The result is freed outside the measured time."""
    start = time.perf_counter()
    result = run()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


@dataclass
class Watch:
    """Watches what else the machine does: a context, and afterwards a note (Linux only; else it knows nothing).

    Ratios survive some other work, since all competitors run in turns; they do not survive much of it.
    """

    others: float | None = None

    def __enter__(self) -> Watch:
        self._busy, self._all, self._own = *_machine_seconds(), _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        busy, total = (now - then for now, then in zip(_machine_seconds(), (self._busy, self._all), strict=True))
        if total > 0:
            self.others = max(0.0, busy - (_own_seconds() - self._own)) / total

    def note(self, name: str) -> list[str]:
        """Say which share of the cores other work took."""
        if self.others is None:
            return []
        doubt = "; too much to trust the ratios" if self.others > 0.2 else ""
        return [f"{name}: meanwhile other work took {self.others:.0%} of all cores{doubt}."]


def _machine_seconds() -> tuple[float, float]:
    """Read the time that all cores were busy (or taken away by the host), and all their time."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0, 0.0
    ticks = [int(value) for value in path.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for disks
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(ticks) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return sum(os.times()[:4])  # with children


# ---------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Figure:
    """One measured number and its target, if it has one; a ``stretch`` target need not be met."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    stretch: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def target(self) -> str:
        """The target in words."""
        if self.met is None:
            return ""
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{bound} (stretch)" if self.stretch else bound

    @property
    def verdict(self) -> str:
        """``met`` or ``missed``; nothing without a target."""
        return "" if self.met is None else "met" if self.met else "missed"


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark, with what else there is to say of how they came about."""

    name: str
    title: str
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)

    def finish(self) -> Report:
        """Print the report and write it to ``benchmarks/results``."""
        self._print()
        self._write()
        return self

    def _print(self) -> None:
        table = Table(title=self.title, title_justify="left")
        table.add_column("measured")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("target")
        table.add_column("")
        for figure in self.figures:
            colour = {None: "", True: "green", False: "yellow" if figure.stretch else "red"}[figure.met]
            verdict = f"[{colour}]{figure.verdict}[/]" if colour else ""
            table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, figure.target, verdict)
        console = Console(width=max(110, Console().width))
        console.print(table)
        for note in (*self.notes, _line(machine()), _line(versions())):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        console.print()

    def _write(self) -> None:
        content = {
            "benchmark": self.name,
            "machine": machine(),
            "versions": versions(),
            "notes": self.notes,
            "figures": [
                {
                    "name": figure.name,
                    "value": float(f"{figure.value:.5g}"),
                    "unit": figure.unit,
                    "target": figure.target,
                    "verdict": figure.verdict,
                }
                for figure in self.figures
            ],
        }
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (RESULTS / f"{self.name}.json").write_text(text, encoding="utf-8")


def machine() -> dict[str, Any]:
    """Describe the processor, what of it is in use, and how busy it is besides."""
    about: dict[str, Any] = {
        "cpu": cpu_info().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": n_threads(),
        "flags": [flag for flag in CPU_FLAGS if flag in cpu_info().get("flags", "").split()],
        "system": platform.system(),
    }
    if "cpu family" in cpu_info():  # model names of virtual machines say little
        about["family"] = f"{cpu_info()['cpu family']}/{cpu_info()['model']}"
    if hasattr(os, "getloadavg"):
        about["load"] = round(os.getloadavg()[0], 1)
    return about


def cpu_info() -> dict[str, str]:
    """Read what Linux says of the first core; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first_core = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first_core.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def versions() -> dict[str, str]:
    """List versions of Python and of the packages that do the work."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}


def version_of(package: str) -> str:
    """Look up the installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _line(values: Mapping[str, Any]) -> str:
    shown = {name: " ".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())
