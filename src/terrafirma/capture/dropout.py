"""Dropout whose masks belong to samples: the same however these are cut into batches, on every device, in every process.

Whether a unit is dropped is a hash of seed, pass, module, call, row and unit. Each of these numbers picks one output of the
generator (splitmix64) that those before it have seeded; the last one is compared with the probability, so what is dropped at
one probability is dropped at every higher one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terrafirma.capture._tensors import first_rows
from terrafirma.core._checks import check_count, check_share
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Dropout", "check_rows", "checked_dropout", "dropout_parts", "dropped", "kept_units"]

WORD = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the constants of splitmix64
AT_ONCE = 1 << 15  # hashes: they stay in a core's cache, and torch starts no threads for so few
AT_ONCE_ON_DEVICE = 1 << 24
MOST_OFF = 0.05  # of what goes into dropout: half precision changes less, another sample more
REMEDY = "let samples come first (batch_first=True), or choose a score that needs no dropout."


@dataclass(frozen=True)
class Dropout:
    """At which probabilities to drop, how many forward passes to run at each, and the seed of all masks."""

    probabilities: tuple[float, ...]
    passes: int
    seed: int


def checked_dropout(dropout: float | Iterable[float], passes: int, seed: int) -> Dropout | None:
    """What was asked for, checked; None for nothing."""
    given = list(dropout) if isinstance(dropout, Iterable) else [dropout]
    probabilities = [check_share("dropout", p, "probabilities that a unit is dropped") for p in given]
    passes, seed = check_count("passes", passes, least=2), check_count("seed", seed, least=0)
    return Dropout(tuple(dict.fromkeys(probabilities)), passes, seed) if probabilities else None


def dropout_parts(module: nn.Module, name: str) -> dict[nn.Module, int]:
    """The dropout modules of a network, numbered; raise where there are none or other kinds."""
    kinds = require("torch", extra="torch").nn
    plain = (kinds.Dropout, kinds.Dropout1d, kinds.Dropout2d, kinds.Dropout3d)
    numbers: dict[Any, int] = {}
    for own, part in module.named_modules():
        if isinstance(part, kinds.AlphaDropout | kinds.FeatureAlphaDropout):
            raise InvalidInput(
                f"dropout needs nn.Dropout, Dropout1d, Dropout2d or Dropout3d. Got {type(part).__name__} at {own!r}, which "
                "puts other values than 0; choose a score that needs no dropout."
            )
        if isinstance(part, plain):
            if getattr(part.forward, "__func__", None) not in [kind.forward for kind in plain]:
                raise InvalidInput(
                    f"dropout needs nn.Dropout modules that are torch's own. Got {type(part).__name__} at {own!r}, whose "
                    "forward is another and may drop by itself; put nn.Dropout there."
                )
            numbers[part] = len(numbers)
    if not numbers:
        raise InvalidInput(
            f"dropout needs a network with nn.Dropout modules. Got {name}, which has none (F.dropout and what runs inside "
            "TorchScript are not seen); choose a score that needs no dropout."
        )
    return numbers


@contextmanager
def dropped(parts: dict[nn.Module, int], p: float, dropout: Dropout, number: int, rows: range) -> Iterator[None]:
    """Within the context the dropout modules drop, as they do in the forward pass of this number on these rows."""
    key = _pick(_pick(0, dropout.seed), number)
    calls: Counter[nn.Module] = Counter()
    thread = threading.get_ident()  # hooks see the calls of all threads

    def drop(part: nn.Module, _args: Any, x: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        call, calls[part] = calls[part], calls[part] + 1
        channels = not isinstance(part, require("torch.nn", extra="torch").Dropout)
        left = _masked(x, p, _pick(_pick(key, parts[part]), call), rows, channels=channels)
        return x.copy_(left) if part.inplace else left  # what was handed in may be used again

    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.register_forward_hook(drop).remove)
        yield
    if not calls:
        raise InvalidInput(
            "dropout needs nn.Dropout modules that run. None of the network's did; choose a score that needs no dropout."
        )


def check_rows(parts: Iterable[nn.Module], run: Callable[[Any], Any], inputs: Any, n: int) -> None:
    """Raise where what goes into dropout does not begin with the rows of the first samples: masks go by rows.

    Three samples are compared with two, or two with one. ``run`` runs the network on inputs.
    """
    some = min(n, 3)
    whole, fewer = (_dropout_inputs(parts, run, first_rows(inputs, few)) for few in (some, some - 1))
    for x, alone in zip(whole, fewer, strict=False):
        shapes = tuple(x.shape), tuple(alone.shape)
        y = alone[None] if alone.shape == x.shape[1:] else alone  # the axis of one sample may have been squeezed away
        rows = len(y)
        if rows * some != len(x) * (some - 1) or (x[:rows] - y).norm() > MOST_OFF * y.norm():
            raise InvalidInput(
                f"Dropout must be where samples come first. Got a tensor of shape {shapes[0]} for {some} samples, of which the "
                f"first rows are others than those of {some - 1} alone, of shape {shapes[1]}; {REMEDY}"
            )


def _dropout_inputs(parts: Iterable[nn.Module], run: Callable[[Any], Any], inputs: Any) -> list[Tensor]:
    """What goes into each call of dropout."""
    torch, found, thread = require("torch", extra="torch"), [], threading.get_ident()

    def keep(_part: nn.Module, _args: Any, x: Tensor) -> None:
        if threading.get_ident() == thread:
            found.append(x.to(torch.promote_types(x.dtype, torch.float32), copy=True))  # it may change in place

    with ExitStack() as stack:
        for part in parts:  # in evaluation mode they give what they get
            stack.callback(part.register_forward_hook(keep).remove)
        run(inputs)
    return found


def _masked(x: Tensor, p: float, key: int, rows: range, *, channels: bool) -> Tensor:
    """What is left of a tensor with samples first, scaled so that its mean stays."""
    n = len(rows)
    if x.ndim == 0 or len(x) % max(n, 1):
        raise InvalidInput(
            f"Dropout must be where samples come first. Got a tensor of shape {tuple(x.shape)} for {n} samples; {REMEDY}"
        )
    shape = x.shape[:2] if channels else x.shape
    kept = kept_units(key, rows, shape.numel() // max(n, 1), p, x.device).reshape(shape)
    return x * (kept.to(x.dtype) / (1 - p)).reshape(*shape, *[1] * (x.ndim - len(shape)))


def kept_units(key: int, rows: range, units: int, p: float, device: Any = None) -> Tensor:
    """Which units of these rows are kept: bools (rows, units)."""
    torch = require("torch", extra="torch")
    numbers = torch.arange(rows.start + 1, rows.stop + 1, device=device)
    keys = _mixed(numbers * _signed(GOLDEN) + _signed(key))[:, None]
    steps = torch.arange(1, units + 1, device=device) * _signed(GOLDEN)
    kept: Tensor = torch.empty(len(rows), units, dtype=torch.bool, device=device)
    some = max(1, (AT_ONCE if kept.device.type == "cpu" else AT_ONCE_ON_DEVICE) // max(units, 1))
    for first in range(0, len(rows), some):
        words = _mixed(keys[first : first + some] + steps)
        kept[first : first + some] = _shifted(words, 1) >= int(p * 2**63)
    return kept


def _pick(key: int, number: int) -> int:
    """The output of this number of the generator with this seed."""
    x = (key + (number + 1) * GOLDEN) & WORD
    x = ((x ^ (x >> 30)) * FIRST) & WORD
    x = ((x ^ (x >> 27)) * SECOND) & WORD
    return x ^ (x >> 31)


def _mixed(words: Tensor) -> Tensor:
    """The last three steps of ``_pick``, in place; the integers of torch have a sign, and wrap around."""
    words ^= _shifted(words, 30)
    words *= _signed(FIRST)
    words ^= _shifted(words, 27)
    words *= _signed(SECOND)
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted to the right, zeros in front."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
