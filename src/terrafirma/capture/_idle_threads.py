"""Threads that torch leaves waiting.

After each parallel operation the threads of GNU's OpenMP wait busily for the next one, for some 10 ms, and take their cores
from whoever computes meanwhile: on two cores the score of a batch takes twice as long. OpenMP has a call that ends them;
torch starts new ones, in a tenth of a millisecond, when it needs them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["end_idle_threads"]

SOFT = 1  # omp_pause_soft: settings stay


def end_idle_threads() -> None:
    """End the calling thread's idle helpers, where torch brought an OpenMP that can."""
    pause = _pause()
    if pause is not None:
        pause(SOFT)


@cache
def _pause() -> Any:
    """``omp_pause_resource_all`` of the OpenMP that torch uses; None where there is no such file or call."""
    import torch

    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        try:
            return ctypes.CDLL(str(library)).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
    return None
