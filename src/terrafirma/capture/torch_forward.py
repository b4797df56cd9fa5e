"""One batch on its way through a torch module: its gates are seen where torch dispatches operations.

A dispatch mode sees every operation below modules, functions, methods and TorchScript: ``nn.ReLU()``, ``F.relu(x)`` and
``x.relu_()`` look alike to it. Hooks only tell in which module that happens, for the names: a gate in a module without
children is called as that module (``classifier.4``), any other by its module and its kind (``block1.relu``).

A ReLU made of other operations (``x * (x > 0)``, ``torch.maximum``) is not seen. Name its module instead, and the sign of
what that module gives is recorded, as kind ``output``.

Of maps, the channels are the second axis after a convolution, as in images, and the last one after a matrix product, as
in transformers.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from terrafirma.capture._tensors import bind, main_tensor, shown
from terrafirma.capture.network import Layer, Reduction, Step, final_names, is_chosen, unknown_layer
from terrafirma.capture.torch_gates import FUSED, GATES, HIDING, Channels, Parts, operation_name
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["EVERYWHERE", "Forward", "Wanted", "dispatch_mode", "outputs_of", "plainly"]

EVERYWHERE = frozenset({""})  # the module itself, with all its parts


@dataclass(frozen=True)
class Wanted:
    """Which layers to keep, and what of them.

    Attributes
    ----------
    patterns : names or globs; None: the last gate that runs
    reduce : of maps in patterns, and in features that go with them
    features : whether to keep the features of the layers that patterns are kept of
    pooled : names or globs of layers whose features to keep, averaged over positions

    """

    patterns: tuple[str, ...] | None
    reduce: Reduction = "none"
    features: bool = False
    pooled: tuple[str, ...] = ()


class Forward:
    """One batch on its way through a module: all its gate calls, with bits for those that are wanted.

    ``inside``: the parts in which to look at operations; looking everywhere costs some per cent of a network's time.
    """

    def __init__(self, parts: Parts, wanted: Wanted, inside: frozenset[str] = EVERYWHERE) -> None:
        self.torch = require("torch", extra="torch")
        self.parts, self.wanted, self.inside = parts, wanted, inside
        self.mode = dispatch_mode(self.see)
        self.depth = 0  # of parts to look into
        self.thread = threading.get_ident()  # hooks see the calls of all threads
        self.n = 0
        self.calls: list[Layer] = []  # as yet without numbers and bits
        self.bits: dict[int, Tensor] = {}  # by position in calls
        self.pooled: set[int] = set()  # calls whose features are wanted, pooled
        self.features: dict[int, Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.matched: set[str] = set()
        self.stack: list[str] = []  # the parts that are running now
        self.ran: dict[str, None] = {}  # and those that ever ran, in order
        self.has_sequences = False  # whether a wanted layer has an axis that might be that of samples
        self.hidden = False  # whether a gate ran that cannot be seen
        self.channels = Channels()
        self.too_narrow = False  # whether a map must be pooled, and its channels are known to who looks everywhere

    def run(self, module: nn.Module, inputs: Any) -> Step:
        """Run the batch and say what happened."""
        args, kwargs, self.n = bind(inputs, module)
        with plainly(compiled=self.parts.compiled), _watched(self):
            result = module(*args, **kwargs)
        if self.hidden:
            raise InvalidInput(
                "The network must run its gates one by one. TorchScript or MKLDNN runs some fused with others; hand in the "
                "module from before torch.jit.script or to_mkldnn."
            )
        return Step(self.chosen(), outputs_of(result, self.n).cpu().numpy())

    def enter(self, part: nn.Module, _args: Any) -> None:
        """Note that a part starts."""
        if part in self.parts.names and threading.get_ident() == self.thread:
            name = self.parts.names[part]
            self.stack.append(name)
            self.ran[name] = None
            if name in self.inside:
                self.depth += 1
                if self.depth == 1:
                    self.mode.__enter__()

    def leave(self, part: nn.Module, _args: Any, result: Any) -> None:
        """Note that a part is done; if it is wanted and no gate, what it gave."""
        if part not in self.parts.names or threading.get_ident() != self.thread:
            return
        name = self.stack.pop()
        if name in self.inside:
            self.depth -= 1
            if self.depth == 0:
                self.mode.__exit__(None, None, None)
        if result is None:  # as it is where the part raised
            return
        if isinstance(part, self.torch.jit.ScriptModule):
            self.hidden = self.hidden or FUSED in str(self.torch.jit.last_executed_optimized_graph())
        as_pattern = name in (self.wanted.patterns or ())
        if not as_pattern and name not in self.wanted.pooled:
            return
        if any(call.name == name and call.kind != "output" for call in self.calls):
            return
        tensor = main_tensor(result, self.n)
        if tensor is None:
            raise InvalidInput(
                f"{'layers' if as_pattern else 'features'} must name gates, or modules that give a tensor with one row for "
                f"each of the {self.n} samples. Got {name!r}, which gives {shown(result)}; name another."
            )
        self.note(name, "output", tensor)
        self.note_result(tensor)

    def stop_looking(self) -> None:
        """Leave the parts that are looked into, if an interrupt left them running."""
        if self.depth:
            self.depth = 0
            self.mode.__exit__(None, None, None)

    def see(self, _mode: Any, operation: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operation of torch; note it if it is a gate."""
        name = operation_name(operation)
        self.hidden = self.hidden or name in HIDING
        if self.hidden:  # an error, raised later because TorchScript would make another of it
            return operation(*args, **kwargs or {})
        kind, find = GATES.get(name, ("relu", None))
        x = find(*args) if find else None
        if x is not None and not (x.is_floating_point() or x.is_quantized):  # lengths and masks are clamped, too
            x = None
        if x is not None:
            self.note(self.gate_name(kind), kind, x)  # before it runs, as it may work in place
        result = operation(*args, **kwargs or {})
        if self.wanted.reduce != "none" or self.wanted.pooled:
            self.channels.note(name, result)
        if find is None and name.endswith("_relu") and isinstance(result, self.torch.Tensor):
            x = result  # fused with what comes before, and of the sign that we look for
            self.note(self.gate_name(kind), kind, x)
        if x is not None:
            self.note_result(result)
        return result

    def gate_name(self, kind: str) -> str:
        """What a gate that runs now is called, without its number."""
        return self.parts.gate(self.stack[-1] if self.stack else "", kind)

    def note(self, name: str, kind: str, x: Tensor) -> None:
        """Note a call with pre-activation ``x``, and keep its bits if it is wanted."""
        self.counts[name] += 1
        call, hits, pooled = len(self.calls), self.hits(name, kind, self.wanted.patterns), self.wanted.pooled
        is_last = self.wanted.patterns is None and kind != "output"
        if is_last:  # which it is until another comes
            self.bits.clear()
            if not pooled:
                self.features.clear()
        if hits or is_last:
            self.bits[call] = self.active(_as_rows(x))
        if self.hits(name, kind, pooled):
            self.pooled.add(call)
        self.has_sequences |= x.ndim == 3 and (call in self.bits or call in self.pooled)
        self.calls.append(Layer(name, kind, tuple(x.shape[1:])))

    def hits(self, name: str, kind: str, patterns: Sequence[str] | None) -> bool:
        """Whether this call is meant by one of the patterns; globs are for gates."""
        call = self.counts[name]
        found = {p for p in patterns or () if (p == name if kind == "output" else is_chosen(name, call, (p,)))}
        self.matched |= found
        return bool(found)

    def active(self, x: Tensor) -> Tensor:
        """Bits (rows, units) of a pre-activation."""
        axes = self.positions(x)
        if axes and self.wanted.reduce == "any":
            x = x.amax(axes)  # many times faster than any() of bools
        elif axes:
            x = x.mean(axes, dtype=self.torch.promote_types(x.dtype, self.torch.float32))
        return (x > 0).flatten(1)

    def note_result(self, result: Tensor) -> None:
        """Keep what the call that was noted last gave, if that is wanted."""
        call = len(self.calls) - 1
        pool = call in self.pooled
        if pool or (self.wanted.features and call in self.bits):
            result = _as_rows(result)
            axes, narrow = self.positions(result, pool=pool), self.torch.float32
            kept = result.mean(axes, dtype=narrow) if axes else result.to(narrow, copy=True)  # it may change in place
            self.features[call] = kept.flatten(1)

    def positions(self, x: Tensor, *, pool: bool = False) -> list[int]:
        """The axes of a map to reduce: all but samples and channels."""
        if x.ndim < 3 or (self.wanted.reduce == "none" and not pool):
            return []
        self.too_narrow |= self.inside != EVERYWHERE
        channels = self.channels.axis(x)
        return [axis for axis in range(1, x.ndim) if axis != channels]

    def named_calls(self) -> list[Layer]:
        """All calls under their final names."""
        names = final_names([call.name for call in self.calls])
        return [replace(call, name=name) for call, name in zip(self.calls, names, strict=True)]

    def chosen(self) -> list[Layer]:
        """The wanted calls with their bits, in the order in which they ran."""
        calls = self.named_calls()
        self.check_matched([call.name for call in calls if call.kind != "output"])
        layers = []
        for call in sorted(self.bits.keys() | self.features.keys()):
            layer, bits, features = calls[call], self.bits.get(call), self.features.get(call)
            for tensor in (bits, features):
                if tensor is not None and len(tensor) != self.n:
                    raise InvalidInput(
                        f"A layer must have one row for each of the {self.n} samples. Got {layer.name!r} of shape "
                        f"{(len(tensor), *layer.shape)}; name another layer, or let samples come first (batch_first=True)."
                    )
            layers.append(replace(layer, bits=_as_array(bits), features=_as_array(features)))
        return layers

    def check_matched(self, gates: Sequence[str]) -> None:
        """Raise unless every pattern was met by a call, or there was a last one."""
        ran = ", ".join([name for name in self.ran if name][-10:]) or "none by name"
        if self.wanted.patterns is None and not gates:
            raise InvalidInput(
                "The network must run a gated layer (relu, gelu, ...), unless layers are named. None ran; name a module "
                f"and the sign of what it gives is recorded. The last modules that ran: {ran}."
            )
        for argument, patterns in (("layers", self.wanted.patterns or ()), ("features", self.wanted.pooled)):
            for pattern in patterns:
                if pattern not in self.matched and pattern in self.parts.taken:
                    raise InvalidInput(
                        f"{argument} must name layers that run. Got {pattern!r}, a module that gave nothing on these "
                        "inputs: it never ran, or runs inside TorchScript, where only gates are seen. The last modules "
                        f"that ran: {ran}."
                    )
                if pattern not in self.matched:
                    raise unknown_layer(pattern, gates, argument)


def outputs_of(result: Any, n: int) -> Tensor:
    """The tensor of outputs in what a module gave for n samples, in float32 unless it is in float64."""
    torch = require("torch", extra="torch")
    output = main_tensor(result, n)
    if output is None:
        raise InvalidInput(
            f"The network must give a tensor with one row for each of the {n} samples, alone or in a tuple or a "
            f"dict. Got {shown(result)}; wrap the network in a module that gives its logits."
        )
    return output.detach().to(torch.float64 if output.dtype == torch.float64 else torch.float32)


@contextmanager
def _watched(forward: Forward) -> Iterator[None]:
    """Show the forward pass every module call and every operation; nothing of that stays behind."""
    hooks = require("torch.nn.modules.module", extra="torch")
    with ExitStack() as stack:
        # hooks on all modules, because parts in TorchScript take none of their own
        stack.callback(hooks.register_module_forward_pre_hook(forward.enter).remove)
        stack.callback(hooks.register_module_forward_hook(forward.leave, always_call=True).remove)
        stack.callback(forward.stop_looking)  # hooks miss an interrupt
        yield


@contextmanager
def plainly(*, compiled: bool, gradients: bool = False) -> Iterator[None]:
    """Run every module and operation one by one: what is fused hides what is inside.

    ``compiled``: whether parts of the network are. ``gradients``: whether to leave these on.
    """
    torch = require("torch", extra="torch")
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.jit.optimized_execution(False))
        if compiled:  # torch would warn that their own calls are hooked, too, which are not looked at
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        # where it is not loaded nothing is compiled, and loading it takes long
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):  # from torch 2.6
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # not inference_mode: what a module keeps for later would be no good for training
        stack.enter_context(nullcontext() if gradients else torch.no_grad())
        yield


def dispatch_mode(see: Callable[..., Any]) -> Any:
    """What shows ``see`` every operation of torch while it is entered."""
    mode: Any = require("torch.utils._python_dispatch", extra="torch").TorchDispatchMode()
    mode.__torch_dispatch__ = MethodType(see, mode)  # for a subclass, torch would first load its compiler
    return mode


def _as_array(x: Tensor | None) -> Any:
    return None if x is None else x.cpu().numpy()


def _as_rows(x: Tensor) -> Tensor:
    """A tensor of floats with at least two dimensions, samples first."""
    x = x.dequantize() if x.is_quantized else x
    return x if x.ndim > 1 else x.reshape(-1, 1)
