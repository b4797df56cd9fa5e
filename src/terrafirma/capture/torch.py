"""What any torch module did inside: its gates are seen where torch dispatches operations, however they are called.

A dispatch mode sees every operation below modules, functions, methods and TorchScript: ``nn.ReLU()``, ``F.relu(x)`` and
``x.relu_()`` look alike to it. Hooks only tell in which module that happens, for the names: a gate in a module without
children is called as that module (``classifier.4``), any other by its module and its kind (``block1.relu``).

A ReLU made of other operations (``x * (x > 0)``, ``torch.maximum``) is not seen. Name its module instead, and the sign of
what that module gives is recorded, as kind ``output``.

Of maps, the channels are the second axis after a convolution, as in images, and the last one after a matrix product, as
in transformers.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

from terrafirma.capture._idle_threads import end_idle_threads
from terrafirma.capture._tensors import bind, first_rows, main_tensor, shown
from terrafirma.capture.network import Layer, Reduction, Step, check_alone, final_names, is_chosen, unknown_layer
from terrafirma.capture.torch_gates import FUSED, GATES, HIDING, Parts, operation_name, part_name
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["TorchNetwork", "evaluating"]

ONE_AT_A_TIME = threading.RLock()  # modes and hooks are torch's own, for all threads


class TorchNetwork:
    """Any ``torch.nn.Module``, on any device, compiled or not, as a network to watch."""

    def __init__(self, module: nn.Module) -> None:
        torch = require("torch", extra="torch")
        if not isinstance(module, torch.nn.Module):
            raise InvalidInput(
                f"model must be a torch.nn.Module. Got {type(module).__name__}; hand in the module itself."
            )
        module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
        copies = isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel)
        self._module: Any = module.module if copies else module  # copies would run in threads, unseen

    @property
    def name(self) -> str:
        """The class of the module."""
        return str(getattr(self._module, "original_name", type(self._module).__name__))  # TorchScript wraps the class

    @property
    def classes(self) -> None:
        """None: a module does not know its labels."""
        return

    def fingerprint(self) -> str:
        """SHA-256 over the class, the weights and the buffers: the same on every device, in training or not."""
        torch = require("torch", extra="torch")
        digest = hashlib.sha256(self.name.encode())
        for name, value in self._module.state_dict().items():
            if isinstance(value, torch.Tensor):
                digest.update(f"{part_name(name)} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def candidates(self, inputs: Any) -> list[Layer]:
        """Every gated layer that runs on these inputs, without bits."""
        forward = _Forward(Parts(self._module), _Wanted((), "none", features=False))
        with ONE_AT_A_TIME, evaluating(self._module):
            forward.run(self._module, inputs)
        return forward.named_calls()

    @contextmanager
    def watch(
        self, layers: Sequence[str] | None, reduce: Reduction = "none", *, features: bool = False
    ) -> Iterator[Callable[[Any], Step]]:
        """A function that runs a batch in evaluation mode; nothing of that stays between batches. See ``Network.watch``."""
        parts, wanted = Parts(self._module), _Wanted(None if layers is None else tuple(layers), reduce, features)

        checked: list[bool] = []  # that samples do not mix
        inside = parts.owners(wanted.patterns) if reduce == "none" else None

        def run(inputs: Any) -> Step:
            with ONE_AT_A_TIME, evaluating(self._module):
                forward, step = look(inputs)
                if forward.has_sequences and forward.n > 1 and not checked:
                    _, alone = look(first_rows(inputs, 1))
                    check_alone(step, alone)
                    checked.append(True)
                end_idle_threads()
                return step

        def look(inputs: Any) -> tuple[_Forward, Step]:
            if inside is not None:
                with suppress(InvalidInput):  # whoever looks everywhere knows better what is wrong
                    forward = _Forward(parts, wanted, inside)
                    return forward, forward.run(self._module, inputs)
            forward = _Forward(parts, wanted)
            return forward, forward.run(self._module, inputs)

        yield run


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Every part in evaluation mode, and back each to its own; a part's own ``train`` may do more, so it is not called."""
    modes = [(part, part.training) for part in module.modules() if hasattr(part, "training")]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


@dataclass(frozen=True)
class _Wanted:
    """Which layers to keep (None: the last gate that runs), and what of them."""

    patterns: tuple[str, ...] | None
    reduce: Reduction
    features: bool


class _Forward:
    """One batch on its way through a module: all its gate calls, with bits for those that are wanted.

    ``inside``: the parts in which to look at operations; looking everywhere costs some per cent of a network's time.
    """

    def __init__(self, parts: Parts, wanted: _Wanted, inside: frozenset[str] = frozenset({""})) -> None:
        self.torch = require("torch", extra="torch")
        self.parts, self.wanted, self.inside = parts, wanted, inside
        self.mode = _dispatch_mode(self.see)
        self.depth = 0  # of parts to look into
        self.thread = threading.get_ident()  # hooks see the calls of all threads
        self.n = 0
        self.calls: list[Layer] = []  # as yet without numbers and bits
        self.bits: dict[int, Tensor] = {}  # by position in calls
        self.features: dict[int, Tensor] = {}
        self.counts: Counter[str] = Counter()
        self.matched: set[str] = set()
        self.stack: list[str] = []  # the parts that are running now
        self.ran: dict[str, None] = {}  # and those that ever ran, in order
        self.has_sequences = False  # whether a wanted layer has an axis that might be that of samples
        self.hidden = False  # whether a gate ran that cannot be seen
        self.convolved, self.product_size = False, 0  # the last contraction, see positions

    def run(self, module: nn.Module, inputs: Any) -> Step:
        """Run the batch and say what happened."""
        args, kwargs, self.n = bind(inputs, module)
        with _watched(self):
            result = module(*args, **kwargs)
        if self.hidden:
            raise InvalidInput(
                "The network must run its gates one by one. TorchScript or MKLDNN runs some fused with others; hand in the "
                "module from before torch.jit.script or to_mkldnn."
            )
        output = main_tensor(result, self.n)
        if output is None:
            raise InvalidInput(
                f"The network must give a tensor with one row for each of the {self.n} samples, alone or in a tuple or a "
                f"dict. Got {shown(result)}; wrap the network in a module that gives its logits."
            )
        wide = self.torch.float64 if output.dtype == self.torch.float64 else self.torch.float32
        return Step(self.chosen(), output.detach().to(wide).cpu().numpy())

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
        if name not in (self.wanted.patterns or ()):
            return
        if any(call.name == name and call.kind != "output" for call in self.calls):
            return
        tensor = main_tensor(result, self.n)
        if tensor is None:
            raise InvalidInput(
                f"layers must name gates, or modules that give a tensor with one row for each of the {self.n} samples. "
                f"Got {name!r}, which gives {shown(result)}; name another."
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
        if self.wanted.reduce != "none":
            self.note_contraction(name, result)
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
        hits = {pattern for pattern in self.wanted.patterns or () if is_chosen(name, self.counts[name], (pattern,))}
        self.matched |= hits
        if self.wanted.patterns is None:  # the last one is wanted, which this is until another comes
            self.bits.clear()
            self.features.clear()
        if hits or self.wanted.patterns is None:
            self.bits[len(self.calls)] = self.active(_as_rows(x))
            self.has_sequences |= x.ndim == 3
        self.calls.append(Layer(name, kind, tuple(x.shape[1:])))

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
        if self.wanted.features and call in self.bits:
            result = _as_rows(result)
            axes, narrow = self.positions(result), self.torch.float32
            kept = result.mean(axes, dtype=narrow) if axes else result.to(narrow, copy=True)  # it may change in place
            self.features[call] = kept.flatten(1)

    def note_contraction(self, operation: str, result: Any) -> None:
        """Note the last convolution or matrix product, which says where channels are."""
        if "conv" in operation:
            self.convolved, self.product_size = True, 0
        elif operation.endswith("mm") or "linear" in operation or operation in ("matmul", "einsum"):
            self.product_size = result.numel()

    def positions(self, x: Tensor) -> list[int]:
        """The axes of a map to reduce: all but samples and channels."""
        if x.ndim < 3 or self.wanted.reduce == "none":
            return []
        # a product on the side, as in squeeze-and-excitation, is told by its size
        is_product = self.product_size and self.product_size % max(x.numel(), 1) == 0
        channels = 1 if self.convolved and not is_product else x.ndim - 1
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
        for call, bits in self.bits.items():
            layer, features = calls[call], self.features.get(call)
            if len(bits) != self.n:
                raise InvalidInput(
                    f"A layer must have one row for each of the {self.n} samples. Got {layer.name!r} of shape "
                    f"{(len(bits), *layer.shape)}; name another layer, or let samples come first (batch_first=True)."
                )
            kept = None if features is None else features.cpu().numpy()
            layers.append(replace(layer, bits=bits.cpu().numpy(), features=kept))
        return layers

    def check_matched(self, gates: Sequence[str]) -> None:
        """Raise unless every pattern was met by a call, or there was a last one."""
        ran = ", ".join([name for name in self.ran if name][-10:]) or "none by name"
        if self.wanted.patterns is None and not gates:
            raise InvalidInput(
                "The network must run a gated layer (relu, gelu, ...), unless layers are named. None ran; name a module "
                f"and the sign of what it gives is recorded. The last modules that ran: {ran}."
            )
        for pattern in self.wanted.patterns or ():
            if pattern not in self.matched and pattern in self.parts.taken:
                raise InvalidInput(
                    f"layers must name layers that run. Got {pattern!r}, a module that gave nothing on these inputs: it "
                    f"never ran, or runs inside TorchScript, where only gates are seen. The last modules that ran: {ran}."
                )
            if pattern not in self.matched:
                raise unknown_layer(pattern, gates)


@contextmanager
def _watched(forward: _Forward) -> Iterator[None]:
    """Show the forward pass every module call and every operation; nothing of that stays behind."""
    torch = require("torch", extra="torch")
    hooks = torch.nn.modules.module
    with ExitStack() as stack:
        # hooks on all modules, because parts in TorchScript take none of their own
        stack.callback(hooks.register_module_forward_pre_hook(forward.enter).remove)
        stack.callback(hooks.register_module_forward_hook(forward.leave, always_call=True).remove)
        # fused operations hide the gates inside
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.jit.optimized_execution(False))
        if forward.parts.compiled:  # torch would warn that their own calls are hooked, too, which are not looked at
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        # where it is not loaded nothing is compiled, and loading it takes long
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):  # from torch 2.6
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(forward.stop_looking)  # hooks miss an interrupt
        # not inference_mode: what a module keeps for later would be no good for training
        stack.enter_context(torch.no_grad())
        yield


def _dispatch_mode(see: Callable[..., Any]) -> Any:
    """What shows ``see`` every operation of torch while it is entered."""
    mode: Any = require("torch.utils._python_dispatch", extra="torch").TorchDispatchMode()
    mode.__torch_dispatch__ = MethodType(see, mode)  # for a subclass, torch would first load its compiler
    return mode


def _as_rows(x: Tensor) -> Tensor:
    """A tensor of floats with at least two dimensions, samples first."""
    x = x.dequantize() if x.is_quantized else x
    return x if x.ndim > 1 else x.reshape(-1, 1)
