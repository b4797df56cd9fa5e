"""Run the benchmarks: all of them, or those that are named (``python -m benchmarks kernel job``)."""

from __future__ import annotations

import importlib
import sys
import time

NAMES = ("kernel", "job", "log_z", "latency", "memory", "dedup", "guard", "scores", "quality")


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"There is no benchmark {unknown[0]!r}. There are: {', '.join(NAMES)}.")
        return 2
    start = time.perf_counter()
    reports = [importlib.import_module(f"benchmarks.{name}").run() for name in names or NAMES]
    figures = [(report.name, figure) for report in reports for figure in report.figures]
    targets = [(name, figure) for name, figure in figures if figure.met is not None and not figure.stretch]
    missed = [(name, figure) for name, figure in targets if not figure.met]
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(targets) - len(missed)} of {len(targets)} targets met, in {minutes:.1f} minutes.")
    for name, figure in missed:
        print(f"Missed by {name}: {figure.name}: {figure.value:.4g} {figure.unit}, target {figure.target}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
