"""Checks of what users hand in. Each raises ``InvalidInput`` with rule, name, value and next step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.errors import InvalidInput

__all__ = ["as_array", "check_delta", "check_errors", "check_positive"]


def as_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Anything rectangular as an array; a torch tensor is detached and brought to the CPU first."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        shown = f"{type(value).__name__} ({error})"
        raise InvalidInput(
            f"{name} must be a rectangular array of numbers. Got {shown:.200}; convert it first."
        ) from error


def check_errors(errors: Any, n: int, name: str = "errors") -> npt.NDArray[np.float64]:
    """``errors`` as float64 (n,), each in [0, 1]."""
    values = as_array(errors, name)
    if values.dtype.kind not in "bfiu" or values.shape != (n,):
        raise InvalidInput(
            f"{name} must be numbers of shape ({n},), one for each row. Got {values.dtype} of shape {values.shape}; "
            "for a classifier use prediction != label, for a column ravel it."
        )
    values = values.astype(np.float64)
    bad = ~((values >= 0) & (values <= 1))
    if bad.any():
        row = int(np.argmax(bad))
        raise InvalidInput(
            f"{name} must lie in [0, 1]. Got {values[row]} in row {row}; for a classifier use prediction != label, "
            "else scale the error by its largest value."
        )
    return values


def check_positive(name: str, value: Any, meaning: str) -> None:
    """Raise unless ``value`` is a positive finite number."""
    if not _is_number(value) or not (math.isfinite(value) and value > 0):
        raise InvalidInput(f"{name} must be a positive float ({meaning}). Got {value!r}.")


def check_delta(delta: Any) -> None:
    """Raise unless ``delta`` is a number in (0, 1]."""
    if not _is_number(delta) or not 0 < delta <= 1:
        raise InvalidInput(f"delta must lie in (0, 1] (the bound holds with probability > 1 - delta). Got {delta!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
