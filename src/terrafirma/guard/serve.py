"""Guards for production: a torch module that answers with its reliability, and one ONNX graph that holds everything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from terrafirma.capture.network import Network
from terrafirma.errors import InvalidInput, require
from terrafirma.guard.state import State
from terrafirma.policy import Policy

if TYPE_CHECKING:
    import torch
    from onnx import ModelProto

    from terrafirma.guard.guard import Guard

__all__ = ["Guarded", "export", "guarded_module"]


class Guarded(NamedTuple):
    """What a guarded module returns: tensors on the device of its inputs."""

    output: Any
    unreliability: Any
    accepted: Any


def guarded_module(guard: Guard, model: Any) -> torch.nn.Module:
    """A module that runs ``model`` and says of each output how unreliable it is and whether to accept it."""
    torch = require("torch", extra="torch")
    if not isinstance(model, torch.nn.Module):
        raise InvalidInput(
            f"model must be a torch.nn.Module to be wrapped. Got {type(model).__name__}; use guard.predict."
        )

    class GuardedModule(torch.nn.Module):  # type: ignore[misc, name-defined]
        """The network, and the guard that watches it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, *inputs: Any, **named: Any) -> Guarded:
            """Output, unreliability and whether to accept, of each sample."""
            if named and inputs:
                raise InvalidInput("Inputs must come all by position or all by name. Got both.")
            if torch.jit.is_tracing() or torch.compiler.is_compiling():
                raise InvalidInput(
                    "A guarded module cannot be traced, compiled or exported: its scores are computed outside torch. "
                    "Use guard.export(path, example), which writes one ONNX graph of network and guard."
                )
            x = named or (inputs[0] if len(inputs) == 1 else (inputs, None))
            verdict = guard.watching(self.network).predict(x)
            return Guarded(verdict.output, verdict.unreliability, verdict.accepted)

    return GuardedModule()


def export(
    model: Any, network: Network, state: State, policy: Policy, example: Any, path: str | os.PathLike[str]
) -> None:
    """Write the guarded network as one ONNX graph; a torch network is exported first."""
    from terrafirma.capture.onnx import OnnxNetwork
    from terrafirma.capture.torch import TorchNetwork
    from terrafirma.guard.onnx_export import guarded_model, save_model

    if isinstance(network, OnnxNetwork):
        proto, gates = network.proto(), list(state.layer_names)
    elif isinstance(network, TorchNetwork):
        proto, gates = _from_torch(model, network, state, example)
    else:
        raise InvalidInput(f"Only torch and ONNX networks can be exported. Got {network.name}; use guard.predict.")
    save_model(guarded_model(proto, gates, state.bound, policy.threshold, state.reduce), path)


def _from_torch(model: Any, network: Network, state: State, example: Any) -> tuple[ModelProto, list[str]]:
    """The exported graph, and the gates in it that are the recorded layers."""
    from terrafirma.capture.onnx import OnnxNetwork
    from terrafirma.guard.torch_export import exported, many_like, matching_gates

    if example is None:
        raise InvalidInput("example must be some inputs of the network: it is exported by running it. Got none.")
    proto, inputs = exported(model, example), many_like(example)
    with network.watch(state.layer_names, state.reduce) as run:
        bits = [layer.bits for layer in run(inputs).layers if layer.bits is not None]
    return proto, matching_gates(OnnxNetwork(proto), inputs, bits, state.reduce)
