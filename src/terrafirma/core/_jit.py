"""How kernels are compiled: without the interpreter's lock, and kept on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["kernel"]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on its first use; from then on it is read from numba's cache, if there is a place to write one."""
    try:
        return njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:  # a read-only installation and no home: compiled anew in each process
        return njit(nogil=True, boundscheck=False)(function)
