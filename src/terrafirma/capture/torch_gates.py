"""Which operations of torch are gates, and what the gates in a module are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["FUSED", "GATES", "HIDING", "Channels", "Parts", "operation_name", "part_name"]


def _whole(x: Tensor, *_: Any) -> Tensor:
    return x


def _from_zero(x: Tensor, low: Any = None, *_: Any) -> Tensor | None:
    return x if isinstance(low, int | float) and low == 0 else None


def _second_half(x: Tensor, dim: int = -1) -> Tensor:
    return x.tensor_split(2, dim)[1]


BENT = ("relu", "relu6", "leaky_relu", "prelu", "rrelu")
SMOOTH = ("elu", "selu", "celu", "silu", "gelu", "mish", "hardswish")
GATES: dict[str, tuple[str, Callable[..., Tensor | None]]] = {
    **{name: (name, _whole) for name in (*BENT, *SMOOTH)},
    "_prelu_kernel": ("prelu", _whole),
    "rrelu_with_noise": ("rrelu", _whole),
    "hardtanh": ("relu6", _from_zero),
    "threshold": ("threshold", _from_zero),
    "clamp": ("clamp", _from_zero),
    "clamp_min": ("clamp", _from_zero),
    "clip": ("clamp", _from_zero),
    "glu": ("glu", _second_half),
}
"""By operation: its kind, and what finds the pre-activation among its arguments; None where it is no gate: clamp(-1, 1)."""

HIDING = ("_transformer_encoder_layer_fwd", "to_mkldnn")  # operations that run or announce gates that nothing can see
FUSED = "TensorExpr"  # what TorchScript has fused, in the text of its graph


@cache
def operation_name(operation: Any) -> str:
    """The name of an operation without its library, its overload and whether it works in place."""
    return str(operation.name()).partition("::")[2].partition(".")[0].removesuffix("_")


class Channels:
    """Where the channels of maps are, told by the last convolution or matrix product that ran."""

    def __init__(self) -> None:
        self.convolved, self.product_size = False, 0

    def note(self, operation: str, result: Any) -> None:
        """Note what an operation of this name gave."""
        if "conv" in operation:
            self.convolved, self.product_size = True, 0
        elif operation.endswith("mm") or "linear" in operation or operation in ("matmul", "einsum"):
            self.product_size = result.numel()

    def axis(self, x: Tensor) -> int:
        """The axis of channels."""
        # a product on the side, as in squeeze-and-excitation, is told by its size
        is_product = self.product_size and self.product_size % max(x.numel(), 1) == 0
        return 1 if self.convolved and not is_product else x.ndim - 1


class Parts:
    """The names of a module's parts, and of gates that run in them."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.named_modules())
        self.names = {part: part_name(name) for name, part in parts if not hasattr(part, "_orig_mod")}
        self.compiled = len(self.names) < len(parts)
        self.taken = set(self.names.values())
        self.parents = {"", *(name.rpartition(".")[0] for name in self.taken)}

    def gate(self, owner: str, kind: str) -> str:
        """A name for a gate that runs in the part ``owner``."""
        if owner not in self.parents:
            return owner
        name = f"{owner}.{kind}".lstrip(".")
        while name in self.taken:
            name += "_"
        return name

    def owners(self, patterns: Sequence[str] | None) -> frozenset[str] | None:
        """The parts in which gates of these names run; None unless all are names, not globs, of what these parts have."""
        owners = set()
        for pattern in patterns or ("*",):
            base, _, call = pattern.rpartition("#")
            name = base if base and call.isdecimal() else pattern
            owner = name if name in self.taken else name.rpartition(".")[0]
            if owner not in self.taken or any(wild in pattern for wild in "*?["):
                return None
            owners.add(owner)
        return frozenset(owners)


def part_name(name: str) -> str:
    """The dotted name of a part, without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")
