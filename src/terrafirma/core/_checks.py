"""Checks of what users hand in. Each raises ``InvalidInput`` with rule, name, value and next step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.errors import InvalidInput

__all__ = [
    "as_array",
    "check_count",
    "check_delta",
    "check_errors",
    "check_metric_value",
    "check_positive",
    "check_scores",
    "check_share",
]


def as_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Anything rectangular as an array; a torch tensor is detached and brought to the CPU first."""
    for dense in ("toarray", "to_dense"):
        if hasattr(value, dense) and getattr(value, "is_sparse", True):
            raise InvalidInput(f"{name} must be dense. Got a sparse {type(value).__name__}; call its {dense}() first.")
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # numpy has no such type
                value = value.float()
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        shown = f"{type(value).__name__} ({error})"
        raise InvalidInput(
            f"{name} must be a rectangular array of numbers. Got {shown:.200}; convert it first."
        ) from error
    if np.ma.is_masked(value):
        raise InvalidInput(f"{name} must have a value everywhere. Got masked entries; fill them first.")
    if array.dtype.kind == "O" and array.ndim == 0:
        raise InvalidInput(f"{name} must be an array of numbers. Got {type(value).__name__}.")
    return array


REMEDY = "for a classifier use prediction != label, else scale the error by its largest value"


def check_errors(
    errors: Any, n: int, name: str = "errors", remedy: str = REMEDY, first: int = 0
) -> npt.NDArray[np.float64]:
    """``errors`` as float64 (n,), each in [0, 1]; ``first`` is the number of the first row, for messages."""
    values = as_array(errors, name)
    if values.dtype.kind not in "bfiu" or values.ndim != 1:
        raise InvalidInput(
            f"{name} must be numbers of shape ({n},), one for each row. Got {values.dtype} of shape {values.shape}; "
            "for a classifier use prediction != label, for a column ravel it, for objects use astype(float)."
        )
    if len(values) != n:
        raise InvalidInput(f"{name} must have one entry for each of the {n} rows. Got {len(values)}; pair them anew.")
    values = values.astype(np.float64)
    bad = ~((values >= 0) & (values <= 1))
    if bad.any():
        row = int(np.argmax(bad))
        remedy = "leave out such rows, here and in what goes with them" if np.isnan(values[row]) else remedy
        raise InvalidInput(f"{name} must lie in [0, 1]. Got {values[row]} in row {first + row}; {remedy}.")
    return values


def check_scores(
    unreliability: Any, name: str = "unreliability", *, may_be_empty: bool = False
) -> npt.NDArray[np.float64]:
    """An unreliability as float64 (n,) without NaN."""
    u = as_array(unreliability, name)
    if u.dtype.kind not in "bfiu" or u.ndim != 1 or (len(u) == 0 and not may_be_empty):
        rule = "numbers" if may_be_empty else "numbers, not empty"
        raise InvalidInput(f"{name} must be a one-dimensional array of {rule}. Got {u.dtype} of shape {u.shape}.")
    u = u.astype(np.float64)
    if np.isnan(u).any():
        raise InvalidInput(f"{name} must not be NaN. Got NaN in row {int(np.argmax(np.isnan(u)))}; look for its cause.")
    return u


def check_positive(name: str, value: Any, meaning: str) -> float:
    """``value`` as a positive finite float."""
    if not 0 < _number(value) < math.inf:
        raise InvalidInput(f"{name} must be a positive float ({meaning}). Got {_shown(value)}.")
    return float(value)


def check_delta(delta: Any) -> None:
    """Raise unless ``delta`` is a number in (0, 1]."""
    if not 0 < _number(delta) <= 1:
        raise InvalidInput(
            f"delta must lie in (0, 1] (the bound holds with probability > 1 - delta). Got {_shown(delta)}."
        )


def check_count(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``; narrow integers of numpy would wrap around in arithmetic."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{name} must be an integer of at least {least}. Got {_shown(value)}.")
    return int(value)


def check_share(name: str, value: Any, meaning: str) -> float:
    """``value`` as a float between 0 and 1, exclusive."""
    if not 0 < _number(value) < 1:
        raise InvalidInput(f"{name} must lie between 0 and 1 ({meaning}). Got {_shown(value)}.")
    return float(value)


def check_metric_value(value: Any) -> float:
    """What a metric returned as one finite number: NaN would win every comparison."""
    number = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
    if not math.isfinite(_number(number)):
        raise InvalidInput(
            f"metric must return one finite number. Got {_shown(value)}; choose one that these rows define."
        )
    return float(number)


def _number(value: Any) -> float:
    """The value as a float; NaN where it is none."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Any) -> str:
    shown = "an integer beyond all floats" if isinstance(value, int) and abs(value) > 1 << 1024 else repr(value)
    return shown if len(shown) < 80 else f"{shown[:80]}..."
