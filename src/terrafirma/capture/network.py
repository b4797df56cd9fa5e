"""What every kind of network looks like to capture: gated layers that can be watched while batches run through.

A *gated* layer is a ReLU or a relative of it (leaky ReLU, GELU, SiLU, GLU, ...). Its pattern is the sign of what goes into
it: unit ``j`` is active where its pre-activation is > 0, which for a ReLU is where its output is.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from terrafirma.capture.dropout import Dropout
from terrafirma.core.patterns import BoolArray
from terrafirma.errors import InvalidInput

__all__ = [
    "REDUCTIONS",
    "Layer",
    "Linear",
    "Network",
    "Reduction",
    "Step",
    "Stochastic",
    "check_alone",
    "final_names",
    "is_chosen",
    "unknown_layer",
]

Linear = tuple[Iterable[npt.NDArray[Any]], Sequence[npt.NDArray[Any]], float]
"""Weights (C, units), likeliest first, biases (C,), and the distance from 1 to the next number of their type."""
Stochastic = Mapping[float, npt.NDArray[Any]]
"""By dropout probability, the outputs (n, passes, ...) of a batch."""
Reduction = Literal["none", "any", "mean"]
REDUCTIONS: tuple[Reduction, ...] = ("none", "any", "mean")
"""Of maps (images, tokens), by channel: every position is a unit; active where any position is; the sign of the mean."""

MOST_MIXED = 0.02  # of bits: rounding flips fewer
MOST_OFF = 0.05  # of features: half precision changes less


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of a gated layer, on one batch.

    Attributes
    ----------
    name : str
        Dotted name of the module, or of the node; ``name#2`` for the second of several calls.
    kind : str
        ``relu``, ``gelu``, ...
    shape : tuple of int
        Of one sample's pre-activation, before any reduction.
    bits : bool array (n, units), optional
        Where the pre-activation is > 0; None where only features are wanted.
    features : float array (n, units), optional
        What the layer gives; positions averaged where maps are reduced, and wherever features were asked for by name.

    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bits: BoolArray | None = None
    features: npt.NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """What a network did on one batch: its chosen layers, in the order in which they ran, and outputs (n, ...)."""

    layers: list[Layer]
    outputs: npt.NDArray[Any]
    stochastic: Stochastic = field(default_factory=dict)


class Network(Protocol):
    """A trained network, whatever it was made with."""

    @property
    def name(self) -> str:
        """What a person calls it: the class of a module, the name of a file."""
        ...

    @property
    def classes(self) -> npt.NDArray[Any] | None:
        """Labels by output column, where the network knows them; else None, and labels are column numbers."""
        ...

    def fingerprint(self) -> str:
        """A digest of the weights: equal for equal networks, in any process."""
        ...

    def candidates(self, inputs: Any) -> list[Layer]:
        """Every gated layer that runs on these inputs, without bits."""
        ...

    def watch(
        self, layers: Sequence[str] | None, reduce: Reduction = "none", *, features: bool | Sequence[str] = False
    ) -> AbstractContextManager[Callable[[Any], Step]]:
        """Make the network ready: the context gives a function that runs a batch of inputs and says what happened.

        layers: names or globs of the layers to take bits of; None is the last gated layer that runs. features: whether to
        take what these give, too; or names and globs of the layers to take that of, pooled. On leaving the context, also by
        an exception, the network is as it was.
        """
        ...

    def linear(self, n_features: int, n_outputs: int) -> Linear:
        """All that might be weights and bias of a last linear layer of this shape; which are is for others to find out."""
        ...

    def dropping(self, dropout: Dropout) -> Callable[[Any, int], Stochastic]:
        """A function of a batch of inputs, and the number of its first row, that runs it with dropout active.

        Raise where the network has no dropout.
        """
        ...


def is_chosen(base: str, call: int, patterns: Iterable[str]) -> bool:
    """Whether this call of a layer is meant: by its name, its numbered name, or a glob of either.

    >>> is_chosen("block.relu", 2, ["*.relu"]), is_chosen("relu", 2, ["relu#1"])
    (True, False)
    """
    return any(
        pattern in (base, f"{base}#{call}")
        or fnmatch.fnmatchcase(base, pattern)
        or fnmatch.fnmatchcase(f"{base}#{call}", pattern)
        for pattern in patterns
    )


def final_names(bases: Sequence[str]) -> list[str]:
    """Names of all calls of a batch, in order: numbered where a layer was called more than once.

    >>> final_names(["fc", "relu", "relu"])
    ['fc', 'relu#1', 'relu#2']
    """
    total, seen = Counter(bases), Counter[str]()
    names = []
    for base in bases:
        seen[base] += 1
        names.append(f"{base}#{seen[base]}" if total[base] > 1 else base)
    return names


def check_alone(batch: Step, run_alone: Callable[[], Step]) -> None:
    """Raise where the first sample of a batch gives something else when it runs alone: samples do not come first then."""
    try:
        alone = run_alone()
    except InvalidInput as error:
        raise InvalidInput(
            f"Samples must not depend on each other. The first one of a batch cannot run alone ({str(error).rstrip('.')}); let "
            "samples come first (batch_first=True)."
        ) from error
    for many, one in zip(batch.layers, alone.layers, strict=True):
        if many.bits is not None and one.bits is not None and (many.bits[:1] != one.bits).mean() > MOST_MIXED:
            other = "another pattern"
        elif many.features is not None and one.features is not None and _are_far(many.features, one.features):
            other = "other features"
        else:
            continue
        raise InvalidInput(
            f"Samples must not depend on each other. Got layer {many.name!r}, where the first sample of a batch has {other} "
            "when it runs alone; let samples come first (batch_first=True)."
        )


def _are_far(many: npt.NDArray[Any], one: npt.NDArray[Any]) -> bool:
    """Whether the first of many rows is not this one, by more than rounding changes it."""
    with np.errstate(invalid="ignore"):
        off = np.linalg.norm(many[:1] - one)
    return bool(off > MOST_OFF * np.linalg.norm(many) / len(many) ** 0.5)


def unknown_layer(pattern: str, names: Sequence[str], argument: str = "layers") -> InvalidInput:
    """The error for a layer that no call matched, with the nearest of the names there are."""
    if not names:
        return InvalidInput(f"{argument} must name gated layers that run. Got {pattern!r}, and none ran at all.")
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names[-3:])
    return InvalidInput(
        f"{argument} must name gated layers that run. Got {pattern!r}; near it are {', '.join(near)} "
        f"({len(names)} in all: terrafirma.layers lists them)."
    )
