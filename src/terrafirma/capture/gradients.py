"""Inputs moved against a gradient, and what a torch module makes of them: some scores ask how a sample answers to a nudge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from terrafirma.capture._tensors import bind, main_tensor, shown
from terrafirma.capture.torch import ONE_AT_A_TIME, evaluating
from terrafirma.core._threads import row_ranges
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Nudged", "Objective", "check_nudge", "nudge"]

BATCH = 128  # samples at a time, whose activations are all held for the way back
MOST_OFF = 0.05  # of the largest output: what other hardware or half precision may change
Objective = Callable[["Tensor", Mapping[str, "Tensor"]], "Tensor"]
Array = npt.NDArray[Any]


class Nudged(NamedTuple):
    """The moved inputs, and outputs and features by layer (n, units) there."""

    inputs: Array
    outputs: Array
    features: dict[str, Array]


def check_nudge(epsilon: Any, model: Any) -> None:
    """Raise unless ``epsilon`` is None or a size, and ``model`` None or a torch module."""
    number = isinstance(epsilon, int | float | np.integer | np.floating) and not isinstance(epsilon, bool)
    if epsilon is not None and not (number and 0 <= epsilon < math.inf):
        raise InvalidInput(
            f"epsilon must be a float of at least 0 (how far inputs are moved). Got {epsilon!r:.80}; 0 leaves them."
        )
    if model is not None:
        unwrapped(model)


def nudge(
    model: Any,
    inputs: Array,
    objective: Objective,
    epsilon: float,
    layers: Mapping[str, int] | None = None,
    *,
    expected: Array | None = None,
    raw: bool = False,
) -> Nudged:
    """Move each input by ``epsilon`` against the sign of its objective's gradient, or against the gradient itself (``raw``).

    ``objective`` takes outputs and features by layer, and returns a tensor (n,) of which each entry depends on one sample
    alone. ``layers``: names of modules, and how many units each is to have: maps are flattened, or averaged over positions,
    whichever fits. ``expected``: what the module gave on these inputs when it was recorded.
    """
    module, torch = unwrapped(model), require("torch", extra="torch")
    if inputs.dtype.kind != "f":
        raise InvalidInput(
            f"inputs must be floats to be moved along a gradient. Got {inputs.dtype}; use epsilon=0, which leaves them."
        )
    parts = []
    gradients_on = torch.inference_mode(mode=False)  # wherever a caller has turned them off
    with ONE_AT_A_TIME, evaluating(module), gradients_on:
        for rows in row_ranges(len(inputs), BATCH):
            known = None if expected is None else expected[rows]
            parts.append(_nudge_batch(module, inputs[rows], objective, (epsilon, raw), layers or {}, known))
    return Nudged(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.outputs for part in parts]),
        {name: np.concatenate([part.features[name] for part in parts]) for name in layers or {}},
    )


def unwrapped(model: Any) -> nn.Module:
    """The module that runs, without what compiles or copies it."""
    torch = require("torch", extra="torch")
    module = getattr(model, "_orig_mod", model)
    copies = isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel)
    module = module.module if copies else module
    if not isinstance(module, torch.nn.Module):
        raise InvalidInput(
            f"model must be a torch.nn.Module, to take gradients of. Got {type(model).__name__}; hand in the network as "
            "model=, or leave inputs as they are with epsilon=0."
        )
    found: nn.Module = module
    return found


def _nudge_batch(
    module: nn.Module,
    inputs: Array,
    objective: Objective,
    step: tuple[float, bool],
    layers: Mapping[str, int],
    expected: Array | None,
) -> Nudged:
    torch = require("torch", extra="torch")
    (x,), _, n = bind(inputs, module)
    x.requires_grad_()
    outputs, features = _run(module, x, n, layers)
    if expected is not None:
        _check_same(_to_numpy(outputs), expected)
    value = objective(outputs, features)
    if not value.requires_grad:
        raise InvalidInput(
            "The network must let gradients through to its inputs. Got none; use epsilon=0, or a network without detach() "
            "and no_grad()."
        )
    (slope,) = torch.autograd.grad(value.sum(), x)  # of the inputs alone: weights keep the gradients they have
    epsilon, raw = step
    with torch.no_grad():
        moved = x - epsilon * (slope if raw else slope.sign())
        outputs, features = _run(module, moved, n, layers)
    return Nudged(_to_numpy(moved), _to_numpy(outputs), {name: _to_numpy(value) for name, value in features.items()})


def _run(module: nn.Module, x: Tensor, n: int, layers: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and features by layer, at least in single precision."""
    with _listening(module, layers, n) as heard:
        output = main_tensor(module(x.clone()), n)  # a clone: the first module may work in place
    if output is None:
        raise InvalidInput(f"The network must give a tensor with one row for each of the {n} samples. Got none.")
    for name in layers:
        if name not in heard:
            raise InvalidInput(f"layers must name modules that run. Got {name!r}, which did not; record other layers.")
    return _wide(output), {name: heard[name] for name in layers}


@contextmanager
def _listening(module: nn.Module, layers: Mapping[str, int], n: int) -> Iterator[dict[str, Tensor]]:
    """Features of the layers, each from the first call of its module, as a forward pass goes on."""
    modules = dict(module.named_modules(remove_duplicate=False))
    heard: dict[str, Tensor] = {}

    def hear(name: str, result: Any) -> None:
        if name not in heard:
            heard[name] = _units(name, result, n, layers[name])

    with ExitStack() as stack:
        for name in layers:
            if name not in modules:
                raise InvalidInput(
                    f"layers must name modules, for gradients to be taken there. Got {name!r}, which is an operation or a "
                    "later call; record layers by names of modules."
                )
            hook = modules[name].register_forward_hook(lambda _part, _args, result, name=name: hear(name, result))
            stack.callback(hook.remove)
        yield heard


def _units(name: str, result: Any, n: int, width: int) -> Tensor:
    """What a module gave as (n, width): flattened, or averaged over positions with the channels first, or last."""
    tensor = main_tensor(result, n)
    if tensor is not None:
        wide = _wide(tensor)
        flat = wide.flatten(1) if wide.ndim > 1 else wide[:, None]
        if flat.shape[1] == width:
            return flat.clone()  # what comes next may work in place
        for channels in (1, wide.ndim - 1):
            if wide.ndim > 2 and wide.shape[channels] == width:
                return wide.mean([axis for axis in range(1, wide.ndim) if axis != channels])
    raise InvalidInput(
        f"layers must give as many units as were recorded. Got {shown(result)} of {name!r}, recorded with {width}; hand in the "
        "network that was recorded."
    )


def _check_same(outputs: Array, expected: Array) -> None:
    """Raise where the network gives other outputs than it gave when it was recorded."""
    same = outputs.shape == expected.shape
    if not same or not np.abs(outputs - expected).max() <= MOST_OFF * max(float(np.abs(expected).max()), 1e-6):
        raise InvalidInput(
            "model must give the outputs that were recorded. Got others; hand in the network and the inputs of the recording."
        )


def _wide(tensor: Tensor) -> Tensor:
    torch = require("torch", extra="torch")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _to_numpy(tensor: Tensor) -> Array:
    found: Array = _wide(tensor.detach()).cpu().numpy()
    return found
