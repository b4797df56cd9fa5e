"""What an ONNX file says about its model: inputs, output, and what an array must be to go in."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array
from terrafirma.errors import BadFile, InvalidInput, require

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

__all__ = ["FLOATS", "as_input", "fixed_size", "graph_inputs", "inlined", "main_output", "parsed"]

FLOATS = {1: 2.0**-23, 10: 2.0**-10, 11: 2.0**-52, 16: 2.0**-7}
"""TensorProto.FLOAT, FLOAT16, DOUBLE and BFLOAT16: the distance from 1 to the next number."""


def graph_inputs(proto: ModelProto) -> list[ValueInfoProto]:
    """What must be fed: the inputs of a graph that are not initializers."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in weights]


def main_output(proto: ModelProto) -> str:
    """The output that is the network's: ``logits``, or the first of floats with two axes or more, or the first of floats."""
    outputs = list(proto.graph.output)
    floats = [value for value in outputs if value.type.tensor_type.elem_type in FLOATS]
    wide = [
        value
        for value in floats
        if not value.type.tensor_type.HasField("shape") or len(value.type.tensor_type.shape.dim) > 1
    ]
    named = [value for value in floats if value.name == "logits"]
    if named or wide or floats:
        return str([*named, *wide, *floats][0].name)
    names = ", ".join(value.name for value in outputs)
    lists = any(value.type.WhichOneof("value") in ("sequence_type", "map_type") for value in outputs)
    step = "export it with options={'zipmap': False}" if lists else "export it with its logits or probabilities"
    raise InvalidInput(f"The model must have an output that is a tensor of floats. Got {names}; {step}.")


def parsed(content: bytes, name: str, folder: Path | None) -> ModelProto:
    """A model of bytes, functions inlined; large weights in other files stay there."""
    onnx = require("onnx", extra="onnx")
    decode_error = require("google.protobuf.message", extra="onnx").DecodeError
    try:
        proto: ModelProto = onnx.load_from_string(content)
    except decode_error as error:
        raise BadFile(
            f"{name} is not a whole ONNX file ({error}). It is truncated or of another kind; export it again."
        ) from error
    if not proto.graph.output:
        raise BadFile(
            f"{name} is not a whole ONNX file (it has no output). It is truncated or of another kind; export it again."
        )
    for tensor in proto.graph.initializer:
        if folder is not None and tensor.data_location == tensor.EXTERNAL and math.prod(tensor.dims) == 1:
            require("onnx.external_data_helper", extra="onnx").load_external_data_for_tensor(tensor, str(folder))
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    return inlined(proto)


def inlined(proto: ModelProto) -> ModelProto:
    """The model without functions of its own: their nodes stand where they are called."""
    if not proto.functions:
        return proto
    whole: ModelProto = require("onnx.inliner", extra="onnx").inline_local_functions(proto)
    return whole


def fixed_size(value: ValueInfoProto) -> int:
    """The batch size that a graph demands; 0 for any."""
    dims = value.type.tensor_type.shape.dim
    return int(dims[0].dim_value) if dims else 0


def as_input(given: Any, value: ValueInfoProto) -> npt.NDArray[Any]:
    """An array of the type that the graph asks for, in any number of rows."""
    array, tensor = as_array(given, value.name), value.type.tensor_type
    dtype = require("onnx.helper", extra="onnx").tensor_dtype_to_np_dtype(tensor.elem_type)
    dims = [dim.dim_value for dim in tensor.shape.dim[1:]]  # 0 for any
    fits = array.ndim == len(dims) + 1 and all(
        dim in (0, size) for dim, size in zip(dims, array.shape[1:], strict=True)
    )
    if (tensor.HasField("shape") and not fits) or not np.can_cast(array.dtype, dtype, "same_kind"):
        shape = ", ".join(["n", *(str(dim or "any") for dim in dims)])
        raise InvalidInput(
            f"{value.name} must be an array of {dtype} of shape ({shape}). Got {array.dtype} of shape {array.shape}; "
            "reshape or convert it."
        )
    return array.astype(dtype, copy=False)
