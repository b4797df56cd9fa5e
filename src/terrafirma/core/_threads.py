"""Where work runs: a map over ranges of rows, serial or in threads.

Numerics are written once, as functions of a range; whoever calls them injects the map. The kernels release the
interpreter's lock, so plain threads use all cores. A pool lives for one call only (a tenth of a millisecond): no state
survives that a fork could copy, and any number of callers may run at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from terrafirma.errors import InvalidInput

__all__ = ["Map", "n_threads", "row_ranges", "serial", "threads"]

T = TypeVar("T")


class Map(Protocol):
    """Anything that applies a function to slices, in any order and at any place, and returns the results in order."""

    def __call__(self, function: Callable[[slice], T], slices: Iterable[slice], /) -> list[T]: ...


def serial(function: Callable[[slice], T], slices: Iterable[slice], /) -> list[T]:
    """One after the other, here."""
    return [function(rows) for rows in slices]


def threads(function: Callable[[slice], T], slices: Iterable[slice], /) -> list[T]:
    """On all cores that this process may use (or ``TERRAFIRMA_THREADS`` of them)."""
    slices = list(slices)
    workers = min(n_threads(), len(slices)) if len(slices) > 1 else 1
    if workers == 1:
        return serial(function, slices)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(function, slices))


def n_threads() -> int:
    """Number of threads in use: ``TERRAFIRMA_THREADS`` if set, else the cores that this process may use."""
    asked = os.environ.get("TERRAFIRMA_THREADS")
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise InvalidInput(f"TERRAFIRMA_THREADS must be a positive integer. Got {asked!r}.")
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def row_ranges(n: int, step: int) -> list[slice]:
    """Cut ``range(n)`` into slices of at most ``step`` rows.

    >>> row_ranges(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]
