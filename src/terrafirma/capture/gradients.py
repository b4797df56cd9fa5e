"""Inputs moved against a gradient, and what a torch module makes of them: some scores ask how a sample answers to a nudge."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from terrafirma.capture._tensors import bind, main_tensor, shown
from terrafirma.capture.torch import ONE_AT_A_TIME, evaluating
from terrafirma.capture.torch_forward import dispatch_mode, plainly
from terrafirma.capture.torch_gates import Channels, Parts, operation_name
from terrafirma.core._threads import row_ranges
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Nudged", "Objective", "check_layers", "check_nudge", "nudge", "nudges"]

BATCH = 128  # samples at a time, whose activations are all held for the way back
MOST_OFF = 0.05  # of the largest output: what other hardware or half precision may change
MOST_STUCK = 0.5  # of the inputs' entries that have a slope: more, and it is rounding that decides what moves
ABOUT_GRADIENTS = ("backward", "derivative", "gradient")  # in torch's messages
Objective = Callable[["Tensor", Mapping[str, "Tensor"]], "Tensor"]
Array = npt.NDArray[Any]


class Nudged(NamedTuple):
    """Outputs and features by layer (n, units) of moved inputs."""

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


def check_layers(model: Any, names: Iterable[str]) -> None:
    """Raise unless all names are of modules, or of later calls of modules (``relu#2``): a function cannot be listened to."""
    _calls(unwrapped(model), names)


def nudge(model: Any, inputs: Array, objective: Objective, epsilon: float, *arguments: Any, **more: Any) -> Nudged:
    """``nudges`` of one size."""
    return nudges(model, inputs, objective, [epsilon], *arguments, **more)[0]


def nudges(
    model: Any,
    inputs: Array,
    objective: Objective,
    epsilons: Sequence[float],
    layers: Mapping[str, int] | None = None,
    *,
    expected: Array | None = None,
    raw: bool = False,
) -> list[Nudged]:
    """Move each input by each epsilon against the sign of its objective's gradient, or against the gradient itself (``raw``).

    ``objective`` takes outputs and features by layer, and returns a tensor (n,) of which each entry depends on one sample
    alone; its gradient is taken once. ``layers``: names of modules, and how many units each is to have: maps are flattened,
    or averaged over positions, whichever fits. ``expected``: what the module gave on these inputs when it was recorded.
    """
    module, torch = unwrapped(model), require("torch", extra="torch")
    if inputs.dtype.kind != "f":
        raise InvalidInput(
            f"inputs must be floats to be moved along a gradient. Got {inputs.dtype}; use epsilon=0, which leaves them."
        )
    run = _Runs(module, layers or {})
    parts = []
    gradients_on = torch.inference_mode(mode=False)  # wherever a caller has turned them off
    plain = plainly(compiled=Parts(module).compiled, gradients=True)
    with ONE_AT_A_TIME, evaluating(module), gradients_on, plain:
        for rows in row_ranges(len(inputs), BATCH):
            known = None if expected is None else expected[rows]
            parts.append(_nudge_batch(run, inputs[rows], objective, epsilons, known, raw=raw))
    return [
        Nudged(
            np.concatenate([part.outputs for part in several]),
            {name: np.concatenate([part.features[name] for part in several]) for name in layers or {}},
        )
        for several in zip(*parts, strict=True)
    ]


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
    run: _Runs, inputs: Array, objective: Objective, epsilons: Sequence[float], expected: Array | None, *, raw: bool
) -> list[Nudged]:
    """What the module makes of a batch, moved by each epsilon."""
    torch = require("torch", extra="torch")
    (x,), _, n = bind(inputs, run.module)
    x.requires_grad_()
    with torch.enable_grad(), _no_gradients_said():
        outputs, features = run(x, n)
        if expected is not None:
            _check_same(_to_numpy(outputs), expected)
        value = objective(outputs, features)
        if not value.requires_grad:
            raise _no_gradients("none")
        (slope,) = torch.autograd.grad(value.sum(), x)  # of the inputs alone: weights keep the gradients they have
    del outputs, features, value  # and all that was held for the way back
    found = []
    with torch.no_grad():
        step = slope if raw else slope.sign()
        for epsilon in epsilons:
            moved = x - epsilon * step
            if not raw:
                _check_moved(x, moved, step, epsilon)
            outputs, features = run(moved, n)
            by_layer = {name: _to_numpy(given) for name, given in features.items()}
            found.append(Nudged(_to_numpy(outputs), by_layer))
    return found


@contextmanager
def _no_gradients_said() -> Iterator[None]:
    """Say what to do where torch cannot take gradients: of what was made in inference mode, of recurrent layers of cuDNN."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in ABOUT_GRADIENTS):
            raise
        raise _no_gradients(f"{error!s:.200}") from error


def _no_gradients(got: str) -> InvalidInput:
    return InvalidInput(
        f"The network must let gradients through to its inputs. Got {got}; use epsilon=0, or a network without detach() and "
        "no_grad(), made outside inference_mode()."
    )


def _check_moved(x: Tensor, moved: Tensor, step: Tensor, epsilon: float) -> None:
    """Raise where the step is lost to rounding."""
    sloped = int((step != 0).sum())
    stuck = int(((step != 0) & (moved == x)).sum())
    if epsilon > 0 and stuck > MOST_STUCK * sloped:
        raise InvalidInput(
            f"epsilon must be large enough to move inputs in the network's precision. Got {epsilon}, which leaves "
            f"{stuck / sloped:.0%} of their entries as they are in {str(x.dtype).removeprefix('torch.')}; use a larger one, 0, "
            "or a network in single precision."
        )


class _Runs:
    """A module that gives outputs, and features of its layers; these from the call of a module that goes by their name."""

    def __init__(self, module: nn.Module, layers: Mapping[str, int]) -> None:
        self.module, self.layers = module, layers
        self.calls = _calls(module, layers)

    def __call__(self, x: Tensor, n: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and features by layer, at least in single precision."""
        with self.listening(n) as heard:
            output = main_tensor(self.module(x.clone()), n)  # a clone: the first module may work in place
        if output is None:
            raise InvalidInput(f"The network must give a tensor with one row for each of the {n} samples. Got none.")
        for name in self.layers:
            if name not in heard:
                raise InvalidInput(
                    f"layers must name modules that run. Got {name!r}, which did not; record other layers."
                )
        return _wide(output), {name: heard[name] for name in self.layers}

    @contextmanager
    def listening(self, n: int) -> Iterator[dict[str, Tensor]]:
        """Features of the layers as a forward pass goes on."""
        heard: dict[str, Tensor] = {}
        channels, counts, thread = Channels(), Counter[Any](), threading.get_ident()  # hooks see all threads' calls

        def hear(part: nn.Module, _args: Any, result: Any) -> None:
            if threading.get_ident() == thread:
                counts[part] += 1
                for name in self.calls[part].get(counts[part], ()):
                    heard[name] = _units(name, result, n, self.layers[name], channels)

        def see(_mode: Any, operation: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            result = operation(*args, **kwargs or {})
            channels.note(operation_name(operation), result)
            return result

        with ExitStack() as stack:
            for part in self.calls:
                stack.callback(part.register_forward_hook(hear).remove)
            if self.calls:
                stack.enter_context(dispatch_mode(see))
            yield heard


def _calls(module: nn.Module, names: Iterable[str]) -> dict[nn.Module, dict[int, list[str]]]:
    """The modules that have these names, and the names of their calls, by number."""
    modules = {name: part for part, name in Parts(module).names.items()}
    found: dict[nn.Module, dict[int, list[str]]] = {}
    for name in names:
        base, _, call = name.rpartition("#")
        part = modules.get(name, modules.get(base) if call.isdecimal() else None)
        if part is None:
            raise InvalidInput(
                f"layers must name modules, for gradients to be taken there. Got {name!r}, which is none: a function, as "
                "F.relu, cannot be listened to; name modules when recording, features=[...]."
            )
        number = 1 if name in modules else int(call)
        found.setdefault(part, {}).setdefault(number, []).append(name)
    return found


def _units(name: str, result: Any, n: int, width: int, channels: Channels) -> Tensor:
    """What a module gave as (n, width): flattened, or averaged over positions; channels are where the recording sees them."""
    tensor = main_tensor(result, n)
    if tensor is not None:
        wide = _wide(tensor)
        flat = wide.flatten(1) if wide.ndim > 1 else wide[:, None]
        if flat.shape[1] == width:
            return flat.clone()  # what comes next may work in place
        for axis in (channels.axis(tensor), 1, wide.ndim - 1):
            if wide.ndim > 2 and wide.shape[axis] == width:
                return wide.mean([other for other in range(1, wide.ndim) if other != axis])
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
