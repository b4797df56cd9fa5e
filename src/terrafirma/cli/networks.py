"""Networks that a command line can name: an ONNX file, or a function that makes a torch module, and a file with its weights."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from terrafirma.errors import BadFile, InvalidInput, require

__all__ = ["check_model_name", "named_network", "zeros_for"]


def check_model_name(name: str) -> str:
    """``name``, if it reads ``pkg.mod:function``."""
    module, colon, function = name.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidInput(f"--model must read pkg.mod:function (it is called and gives a torch module). Got {name!r}.")
    return name


def named_network(name: str, weights: Path | None) -> Any:
    """Import ``pkg.mod:function``, call it, and fill the module that it gives with weights from a safetensors file."""
    torch = require("torch", extra="torch")
    module_name, _, function_name = check_model_name(name).partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # something that it imports
            raise
        raise InvalidInput(
            f"--model must name a module that can be imported from here. Got {module_name!r}."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidInput(f"--model must name a function of {module_name}. Got {function_name!r}, which it lacks.")
    network = function()
    if not isinstance(network, torch.nn.Module):
        raise InvalidInput(
            f"--model must give a torch.nn.Module when called. Got {type(network).__name__} from {name}."
        )
    if weights is not None:
        _fill(network, weights)
    return network


def _fill(network: Any, weights: Path) -> None:
    """Load weights; nothing in the file is executed."""
    from safetensors import SafetensorError

    load_model = require("safetensors.torch", extra="torch").load_model
    try:
        load_model(network, weights)
    except SafetensorError as error:
        raise BadFile(f"{weights} is not a whole safetensors file ({error}). Save the weights again.") from error
    except RuntimeError as error:
        raise InvalidInput(f"--weights must fit the network. Got {weights}: {error!s:.500}") from error


def zeros_for(path: Path) -> dict[str, Any]:
    """Two samples of zeros, of the shapes that an ONNX file declares."""
    from terrafirma.capture.onnx import OnnxNetwork
    from terrafirma.capture.onnx_model import graph_inputs

    as_dtype = require("onnx.helper", extra="onnx").tensor_dtype_to_np_dtype
    zeros = {}
    for value in graph_inputs(OnnxNetwork(path).proto()):
        dims = value.type.tensor_type.shape.dim
        unknown = [dim.dim_param or "?" for dim in dims[1:] if not dim.dim_value]
        if not dims or unknown:
            raise InvalidInput(
                f"{path} must declare the shape of its inputs. Got {value.name} with unknown {', '.join(unknown) or 'shape'}; "
                "give a file of samples with --data."
            )
        shape = (dims[0].dim_value or 2, *(dim.dim_value for dim in dims[1:]))
        zeros[value.name] = np.zeros(shape, as_dtype(value.type.tensor_type.elem_type))
    return zeros
