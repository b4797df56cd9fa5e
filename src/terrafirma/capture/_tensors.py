"""Between users and torch modules: arguments out of what users have, and the tensor that matters in what a module gives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["bind", "first_rows", "main_tensor", "shown"]


def bind(inputs: Any, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Arguments for the module, on its device and in its precision, and the number of samples."""
    torch = require("torch", extra="torch")
    device = next((value.device for value in chain(module.parameters(), module.buffers())), None)
    dtype = next((value.dtype for value in module.parameters() if value.is_floating_point()), None)

    def place(given: Any) -> Any:
        if isinstance(given, Mapping):
            return {name: place(part) for name, part in given.items()}
        value = given
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "bfiuc":
                raise InvalidInput(f"inputs must be numbers. Got an array of {value.dtype}; convert it first.")
            value = torch.from_numpy(np.array(value, order="C"))  # a copy
        if not isinstance(value, torch.Tensor):
            return value
        placed = value.to(device, dtype if value.is_floating_point() else None)
        return placed.clone() if placed is given else placed  # modules may write to their inputs

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = {name: place(value) for name, value in inputs.items()}
    elif isinstance(inputs, tuple | list):
        args = tuple(place(value) for value in inputs)
    else:
        args = (place(inputs),)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim:
            return args, kwargs, len(value)
    raise InvalidInput(
        f"inputs must be an array or a tensor with samples first, or a tuple or dict with one. Got {shown(inputs)}."
    )


def first_rows(inputs: Any, n: int) -> Any:
    """The first samples alone."""
    if isinstance(inputs, Mapping):
        return {name: first_rows(value, n) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(first_rows(value, n) for value in inputs)
    return inputs[:n] if getattr(inputs, "ndim", 0) else inputs


def main_tensor(result: Any, n: int) -> Tensor | None:
    """The tensor with n rows in what a module gave: itself, the logits, or the first of floats; None if there is none."""
    torch = require("torch", extra="torch")
    if isinstance(result, torch.Tensor):
        found = [result]
    elif isinstance(result, Mapping) and "logits" in result:
        found = [result["logits"]]
    else:
        values = result.values() if isinstance(result, Mapping) else result if isinstance(result, tuple | list) else ()
        found = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return next((tensor for tensor in found if tensor.ndim and len(tensor) == n), None)


def shown(value: Any) -> str:
    """Types and shapes, for messages."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of " + (", ".join(f"{k}: {shown(v)}" for k, v in value.items()) or "nothing")
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of " + (", ".join(shown(item) for item in value[:5]) or "nothing")
    return f"{type(value).__name__} {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
