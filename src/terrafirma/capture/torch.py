"""Any torch module as a network: watched by what it dispatches (see ``torch_forward``), and run with dropout."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from terrafirma.capture._idle_threads import end_idle_threads
from terrafirma.capture._tensors import bind, first_rows
from terrafirma.capture.dropout import Dropout, check_rows, dropout_parts, dropped
from terrafirma.capture.heads import fitting
from terrafirma.capture.network import Layer, Linear, Reduction, Step, Stochastic, check_alone
from terrafirma.capture.torch_forward import EVERYWHERE, Forward, Wanted, outputs_of, plainly
from terrafirma.capture.torch_gates import Parts, part_name
from terrafirma.core._checks import as_array
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import nn

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
        forward = Forward(Parts(self._module), Wanted(()))
        with ONE_AT_A_TIME, evaluating(self._module):
            forward.run(self._module, inputs)
        return forward.named_calls()

    @contextmanager
    def watch(
        self, layers: Sequence[str] | None, reduce: Reduction = "none", *, features: bool | Sequence[str] = False
    ) -> Iterator[Callable[[Any], Step]]:
        """A function that runs a batch in evaluation mode; nothing of that stays between batches. See ``Network.watch``."""
        patterns = None if layers is None else tuple(layers)
        pooled = () if isinstance(features, bool) else tuple(features)
        parts, wanted = Parts(self._module), Wanted(patterns, reduce, features is True, pooled)

        checked: list[bool] = []  # that samples do not mix
        inside = parts.owners(None if patterns is None else (*patterns, *pooled)) if reduce == "none" else None

        def run(inputs: Any) -> Step:
            with ONE_AT_A_TIME, evaluating(self._module):
                forward, step = look(inputs)
                if forward.has_sequences and forward.n > 1 and not checked:
                    check_alone(step, lambda: look(first_rows(inputs, 1))[1])
                    checked.append(True)
                end_idle_threads()
                return step

        def look(inputs: Any) -> tuple[Forward, Step]:
            nonlocal inside
            if inside is not None:
                with suppress(InvalidInput):  # whoever looks everywhere knows better what is wrong
                    forward = Forward(parts, wanted, inside)
                    step = forward.run(self._module, inputs)
                    if not forward.too_narrow:
                        return forward, step
                    inside = None
            forward = Forward(parts, wanted, EVERYWHERE)
            return forward, forward.run(self._module, inputs)

        yield run

    def linear(self, n_features: int, n_outputs: int) -> Linear:
        """Weights and biases that may be those of the last linear layer: of ``nn.Linear``, and any other parameters."""
        torch = require("torch", extra="torch")
        with ONE_AT_A_TIME, evaluating(self._module), torch.no_grad():
            parts = [part for part in self._module.modules() if isinstance(part, torch.nn.Linear)]
            own = [*self._module.parameters(), *(part.weight for part in parts)]  # also where these are computed
            weights, biases = fitting(own[::-1], n_features, n_outputs)
            precision = max((torch.finfo(W.dtype).eps for W in weights if W.is_floating_point()), default=0.0)
            return (as_array(W, "weights") for W in weights), [as_array(b, "bias") for b in biases], precision

    def dropping(self, dropout: Dropout) -> Callable[[Any, int], Stochastic]:
        """A function that runs a batch with dropout, all else in evaluation mode; nothing of that stays between batches."""
        torch = require("torch", extra="torch")
        parts, compiled = dropout_parts(self._module, self.name), Parts(self._module).compiled
        checked: list[bool] = []  # that samples come first

        def run(inputs: Any, first: int) -> Stochastic:
            with ONE_AT_A_TIME, evaluating(self._module), plainly(compiled=compiled):
                found = {p: torch.stack([*passes(inputs, first, p)], 1).cpu().numpy() for p in dropout.probabilities}
                n = len(next(iter(found.values())))
                if n > 1 and not checked:
                    check_rows(parts, forward, inputs, n)
                    checked.append(True)
                end_idle_threads()
                return found

        def forward(inputs: Any) -> None:
            args, kwargs, _ = bind(inputs, self._module)
            self._module(*args, **kwargs)

        def passes(inputs: Any, first: int, p: float) -> Iterator[Any]:
            for number in range(dropout.passes):
                args, kwargs, n = bind(inputs, self._module)  # anew, as modules may write to their inputs
                with dropped(parts, p, dropout, number, range(first, first + n)):
                    yield outputs_of(self._module(*args, **kwargs), n)

        return run


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
