"""Torch networks as ONNX models, and their recorded layers found again there."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.capture._tensors import bind
from terrafirma.capture.network import Reduction
from terrafirma.capture.onnx import OnnxNetwork
from terrafirma.capture.torch import evaluating
from terrafirma.core._checks import as_array
from terrafirma.core.patterns import BoolArray
from terrafirma.errors import InvalidInput, require

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

__all__ = ["exported", "many_like", "matching_gates"]

MANY = 128
MOST_DIFFERING = 1e-4  # of bits: pre-activations so near 0 that rounding decides


def exported(module: nn.Module, example_input: Any) -> ModelProto:
    """A torch network as an ONNX model, for batches of any size.

    Parameters
    ----------
    module : torch.nn.Module
        Left as it was, in its mode, too.
    example_input : array, or a tuple or dict of arrays
        Some samples; two are used.

    """
    torch = require("torch", extra="torch")
    require("onnxscript", extra="onnx")
    args, kwargs, _ = bind(example_input, module)
    args = tuple(_two_rows(value) for value in args)
    kwargs = {name: _two_rows(value) for name, value in kwargs.items()}
    any_size = {0: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(kwargs, any_size) or (any_size,) * len(args)
    try:
        with evaluating(module), _quietly(), torch.no_grad():
            program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    except Exception as error:  # an exporter raises whatever the code that it traces raises
        raise InvalidInput(
            f"The module must be one that torch.onnx.export can take for batches of any size. Got {type(module).__name__}, "
            f"on which it failed ({error!s:.300}); make the guard of an ONNX file that you export yourself."
        ) from error
    proto: ModelProto = program.model_proto
    return proto


def matching_gates(
    network: OnnxNetwork, inputs: Any, layers: Sequence[BoolArray], reduce: Reduction = "none"
) -> list[str]:
    """The names of the gates that do what recorded layers did: of the same bits on these inputs, up to rounding.

    Parameters
    ----------
    network : OnnxNetwork
        What the recorded one was exported to. Its layers have other names, so they are known by what they do.
    inputs : some samples
        The more, the surer.
    layers : bool arrays (n, units)
        Recorded on these inputs, with this ``reduce``.

    """
    with network.watch(["*"], reduce) as run:
        seen = {layer.name: layer.bits for layer in run(inputs).layers}
    names: list[str] = []
    for bits in layers:
        differing = {
            name: float(np.mean(other != bits))
            for name, other in seen.items()
            if other is not None and other.shape == bits.shape and name not in names
        }
        best = min(differing, key=differing.__getitem__, default="")
        if not best or differing[best] > MOST_DIFFERING:
            near = f"{best}, of which {differing[best]:.2%} differ" if best else "none of as many units"
            raise InvalidInput(
                f"The ONNX graph must have a gate with the bits of each recorded layer of {bits.shape[1]} units. Nearest is "
                f"{near}; record a layer that is a gate in the exported graph, too."
            )
        names.append(best)
    return names


def many_like(example: Any) -> Any:
    """A hundred samples and more like those of an example: so many that no two layers have the same bits by chance."""
    if isinstance(example, Mapping):
        return {name: many_like(value) for name, value in example.items()}
    if isinstance(example, tuple | list):
        return tuple(many_like(value) for value in example)
    values = as_array(example, "example")
    rows = np.arange(max(MANY, len(values))) % len(values)
    many = values[rows]
    if many.dtype.kind == "f":
        noise = np.random.default_rng(0).normal(scale=values.std() or 1.0, size=many.shape)
        noise[: len(values)] = 0
        many = (many + noise).astype(many.dtype)
    return many


def _two_rows(value: Any) -> Any:
    """Two samples: of one alone, an exporter would take the batch size for a constant."""
    return value[[0, -1]] if getattr(value, "ndim", 0) else value


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Neither warnings nor log lines of the exporter, nor operations of torch that it has no translation for."""
    fused = require("torch", extra="torch").backends.mha
    log, fast = logging.getLogger("torch.onnx"), fused.get_fastpath_enabled()
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        fused.set_fastpath_enabled(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
        fused.set_fastpath_enabled(fast)
