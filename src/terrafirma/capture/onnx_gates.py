"""The gated layers of an ONNX graph: which nodes they are, and which tensor goes into each.

Some are one node (Relu, Gelu, ...). Others come in pieces, as exporters write them: SiLU is ``x * Sigmoid(x)``, GELU
``x * (1 + Erf(x / sqrt(2))) / 2``. So a product of ``x`` with a squashing function of ``x`` alone is a gate as well, and
so is one of two parts of a Split of which one is squashed (GLU).

Only the main graph is read: functions must be inlined before, and the branches and bodies of If, Loop and Scan are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.capture.network import is_chosen, unknown_layer
from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

__all__ = ["Gate", "OnnxGraph"]

GATES = {
    "Relu": "relu",
    "LeakyRelu": "leaky_relu",
    "PRelu": "prelu",
    "ThresholdedRelu": "relu",
    "Clip": "clamp",
    "Max": "clamp",
    "Elu": "elu",
    "Selu": "selu",
    "Celu": "celu",
    "Gelu": "gelu",
    "HardSwish": "hardswish",
    "Mish": "mish",
    "Swish": "silu",
}
"""Nodes that gate their first input; of those in ``ONLY_AT_ZERO``, the ones that do so at 0."""
ONLY_AT_ZERO = ("ThresholdedRelu", "Clip", "Max")
SQUASHES = {
    "Softplus": "mish",  # before Tanh, which Mish has too: the first that a product contains names it
    "Tanh": "gelu",
    "Erf": "gelu",
    "Sigmoid": "silu",
    "HardSigmoid": "hardswish",
    "Clip": "hardswish",
}
ELEMENTWISE = {*SQUASHES, "Mul", "Div", "Add", "Pow"}
LONGEST = 12  # nodes in a row of an activation written in pieces; the longest known has 8
DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Gate:
    """A gated layer, or any node whose output's sign is asked for.

    Attributes
    ----------
    name : str
        Of its node, or of the node's output if the node has none.
    kind : str
        ``relu``, ``gelu``, ...; ``output`` where the node is no gate.
    source, result : str
        The tensors that go in and come out. The unit is active where the source is > 0.
    channels_first : bool
        Whether channels are axis 1 of its maps, as after a convolution; else they are the last axis.
    position : int
        Of the node in the graph.

    """

    name: str
    kind: str
    source: str
    result: str
    channels_first: bool
    position: int


class OnnxGraph:
    """A graph read once: its gates, in the order in which they run."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes: list[NodeProto] = list(graph.node)
        self._producer = {output: i for i, node in enumerate(self.nodes) for output in node.output if output}
        self._scalars = _scalars(graph)
        self._after_convolution = self._last_contractions()
        self._of_samples = _of_samples(graph)
        self.gates = self._find()

    def choose(self, layers: Sequence[str] | None, argument: str = "layers") -> list[Gate]:
        """The gates that are meant by names and globs, in order; None is the last one."""
        if layers is None:
            if not self.gates:
                raise self._no_gate()
            return self.gates[-1:]
        chosen: dict[int, Gate] = {}
        for pattern in layers:
            exact = [gate for gate in self.gates if gate.name == pattern]  # though it may read as a glob of others, too
            meant = (
                exact
                or [gate for gate in self.gates if is_chosen(gate.name, 1, [pattern])]
                or [self._named(pattern, argument)]
            )
            chosen.update((gate.position, gate) for gate in meant)
        return [gate for _, gate in sorted(chosen.items())]

    def _named(self, name: str, argument: str) -> Gate:
        """Any node, or the tensor it gives, by its exact name."""
        for position, node in enumerate(self.nodes):
            if node.output and (name in node.output or name == node.name):
                tensor = name if name in node.output else node.output[0]
                return Gate(name, "output", tensor, tensor, self._is_channels_first(tensor), position)
        raise unknown_layer(name, [gate.name for gate in self.gates], argument)

    def _no_gate(self) -> InvalidInput:
        ops = ", ".join(sorted({node.op_type for node in self.nodes}))
        return InvalidInput(
            f"The graph must have a gated layer (Relu, Gelu, ...) to record by default. Got none among {ops:.200}, and the "
            "branches and bodies of If, Loop and Scan are not seen; name in layers any node or tensor whose sign to take."
        )

    def _find(self) -> list[Gate]:
        """Every gate. What is a piece of one is none of its own."""
        gates: list[Gate] = []
        pieces: set[int] = set()
        for i, node in enumerate(self.nodes):
            if node.domain not in DOMAINS:
                continue
            if node.op_type in GATES and self._varying(node):
                gates.append(self._gate(i, GATES[node.op_type], self._varying(node)[0], node.output[0]))
            elif node.op_type == "Mul":
                kind, source, parts = self._product(node)
                if kind:
                    gates.append(self._gate(i, kind, source, self._scaled_result(node.output[0])))
                    pieces |= parts
        return [gate for gate in gates if gate.position not in pieces and gate.source in self._of_samples]

    def _gate(self, position: int, kind: str, source: str, result: str) -> Gate:
        node = self.nodes[position]
        return Gate(node.name or node.output[0], kind, source, result, self._is_channels_first(source), position)

    def _varying(self, node: NodeProto) -> list[str]:
        """What a node gates: its one input, beside parameters; nothing where it does not do so at 0."""
        if node.op_type not in ONLY_AT_ZERO:
            return [node.input[0]]
        if node.op_type == "Max":
            given = [name for name in node.input if self._scalars.get(name) != 0]
            return given if len(given) == 1 and len(node.input) == 2 else []
        at = {a.name: a.f for a in node.attribute}
        if node.op_type == "ThresholdedRelu":
            return [node.input[0]] if at.get("alpha", 1.0) == 0 else []
        least = self._scalars.get(node.input[1]) if len(node.input) > 1 else at.get("min")
        return [node.input[0]] if least == 0 else []

    def _product(self, node: NodeProto) -> tuple[str, str, set[int]]:
        """What a Mul gates, if anything: kind, source and the nodes that are pieces of it."""
        for other, squashed in (tuple(node.input), tuple(node.input)[::-1]):
            source = self._unscaled(other)
            pieces = self._pieces(squashed, source)
            kind = next((SQUASHES[op] for op in SQUASHES if op in {self.nodes[i].op_type for i in pieces}), "")
            if kind:
                return kind, source, pieces
            squash = self._node(squashed)
            if squash and squash.op_type == "Sigmoid":
                half, gate = self._node(other), self._node(squash.input[0])
                if half is not None and half is gate and half.op_type == "Split":
                    return "glu", squash.input[0], set()
        return "", "", set()

    def _pieces(self, tensor: str, source: str, longest: int = LONGEST) -> set[int]:
        """Nodes between: none unless the tensor is an elementwise function of the source and of scalars alone."""
        node = self._node(tensor)
        if node is None or node.op_type not in ELEMENTWISE or longest == 0:
            return set()
        pieces = {self._producer[tensor]}
        for name in node.input:
            if name and name != source and name not in self._scalars:
                deeper = self._pieces(name, source, longest - 1)
                if not deeper:
                    return set()
                pieces |= deeper
        return pieces

    def _unscaled(self, tensor: str) -> str:
        """The tensor of which this one is a positive multiple."""
        node = self._node(tensor)
        if node is None or node.op_type not in ("Mul", "Div"):
            return tensor
        whole, factor = node.input if node.input[1] in self._scalars else node.input[::-1]
        reciprocal = node.op_type == "Div" and factor == node.input[0]
        return tensor if reciprocal or not self._scalars.get(factor, 0) > 0 else str(whole)

    def _scaled_result(self, tensor: str) -> str:
        """The multiple of a product that is all the rest of the network sees, as in GELU's last halving."""
        users = [node for node in self.nodes if tensor in node.input]
        if len(users) == 1 and self._unscaled(users[0].output[0]) == tensor:
            return str(users[0].output[0])
        return tensor

    def _node(self, tensor: str) -> NodeProto | None:
        position = self._producer.get(tensor)
        return None if position is None else self.nodes[position]

    def _is_channels_first(self, tensor: str) -> bool:
        return self._after_convolution.get(tensor, (-1, False))[1]

    def _last_contractions(self) -> dict[str, tuple[int, bool]]:
        """Of each tensor, the last contraction it depends on: its position, and whether it is a convolution."""
        last: dict[str, tuple[int, bool]] = {}
        for i, node in enumerate(self.nodes):
            if "Conv" in node.op_type:
                here = (i, True)
            elif "MatMul" in node.op_type or node.op_type in ("Gemm", "Einsum"):
                here = (i, False)
            elif node.op_type in ("Sigmoid", "HardSigmoid"):
                here = (-1, False)  # of factors between 0 and 1, as in squeeze-and-excitation, the other factor counts
            else:
                here = max((last[name] for name in node.input if name in last), default=(-1, False))
            last.update((output, here) for output in node.output)
        return last


def _scalars(graph: GraphProto) -> dict[str, float]:
    """Constants of one value: initializers and Constant nodes, also after a cast."""
    from onnx import numpy_helper

    tensors: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    scalars: dict[str, float] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            value = node.attribute[0]
            if value.name == "value":
                tensors[node.output[0]] = value.t
            elif value.name in ("value_float", "value_int"):
                scalars[node.output[0]] = value.f if value.name == "value_float" else value.i
    for name, tensor in tensors.items():
        if np.prod(tensor.dims) == 1 and tensor.data_type != tensor.STRING:
            scalars[name] = float(numpy_helper.to_array(tensor).ravel()[0])
    for node in graph.node:
        if node.op_type in ("Cast", "CastLike", "Identity") and node.input[0] in scalars:
            scalars[node.output[0]] = scalars[node.input[0]]
    return scalars


def _of_samples(graph: GraphProto) -> set[str]:
    """Tensors that hold something of each sample: computed from inputs, but not from their shapes alone."""
    weights = {tensor.name for tensor in graph.initializer}
    found = {value.name for value in graph.input if value.name not in weights}
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and found.intersection(node.input):
            found.update(node.output)
    return found
