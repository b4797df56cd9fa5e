"""One ONNX graph of a network and its guard: ``output``, ``unreliability`` and ``accepted``.

Implements thm:true_error. with nodes of ONNX. A pattern's Hamming distances to all training regions are one integer matrix
product; all that follows is in doubles.
"""

from __future__ import annotations

import glob
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.capture.network import Reduction
from terrafirma.capture.onnx_gates import Gate, OnnxGraph
from terrafirma.capture.onnx_model import graph_inputs, inlined, main_output
from terrafirma.core._checks import check_delta
from terrafirma.core.bound import Smoother, log_gap_constant
from terrafirma.core.patterns import BoolArray
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput, require
from terrafirma.scores.subfunction import SubfunctionBound
from terrafirma.storage import write_bytes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

__all__ = ["guarded_model", "save_model"]

NETWORK, GUARD = "network/", "guard/"  # names begin with, so that none clash
OUTPUTS = ("output", "unreliability", "accepted")
OLDEST_OPSET = 13
AXES_AS_INPUT = 18  # the opset from which on ReduceLogSumExp takes its axes as an input
SLACK = 1e-9
MOST_UNPACKED = 2**28  # bits in one matrix; onnxruntime does not unpack beforehand what then takes a GiB
LARGEST_FILE = 2**31 - 2**20  # of protobuf, less what names and headers take


def guarded_model(
    model: ModelProto, gates: Sequence[str], est: SubfunctionBound, threshold: float, reduce: Reduction = "none"
) -> ModelProto:
    """The graph of a network with that of its guard appended.

    Its outputs are ``output`` (the network's own), ``unreliability`` (double, (n,)) and ``accepted`` (bool, (n,)).

    Parameters
    ----------
    model : onnx.ModelProto
        Functions are inlined; an opset before 13 is converted.
    gates : names of gated layers, as ``OnnxNetwork`` has them
        In the order in which their units stand in the patterns.
    est : SubfunctionBound
        Fitted on these layers.
    threshold : float
        The largest unreliability that is accepted; -inf accepts nothing.
    reduce : "none", "any" or "mean"
        As in recording.

    """
    if math.isnan(threshold):
        raise InvalidInput(
            "threshold must be a number, or -inf to accept nothing. Got nan; calibrate the policy first."
        )
    check_delta(est.delta)
    log_gap = log_gap_constant(est.delta, est.n_samples_)
    guarded = _prefixed(model)
    graph = OnnxGraph(guarded.graph)
    nodes = _Nodes(_opset(guarded))
    layers = [_bits(nodes, gate, reduce) for name in gates for gate in graph.choose([NETWORK + name])]
    bits = nodes.add("Concat", *layers, axis=1)
    unreliability = _unreliability(nodes, bits, est.smoother_, log_gap)
    # sums run in another order than in predict, so a score at the threshold needs some slack
    limit = threshold + SLACK * (1 + abs(threshold)) if math.isfinite(threshold) else threshold
    main = main_output(guarded)
    for value, output in ((main, OUTPUTS[0]), (unreliability, OUTPUTS[1])):
        nodes.add("Identity", value, output=output)
    nodes.add("LessOrEqual", unreliability, nodes.constant(np.float64(limit)), output=OUTPUTS[2])
    _replace_outputs(guarded, main)
    guarded.graph.node.extend(nodes.nodes)
    guarded.graph.initializer.extend(nodes.constants)
    return guarded


def save_model(model: ModelProto, path: str | os.PathLike[str], *, largest_file: int = LARGEST_FILE) -> None:
    """Write a model, whole or not at all; what no one file can hold goes to a second beside it.

    The second file is named after the first, and the large tensors have then left ``model``.
    """
    path = Path(path)
    others = set(path.parent.glob(f"{glob.escape(path.name)}.*.data"))
    large = None
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > largest_file:
        large = path.with_name(f"{path.name}.{secrets.token_hex(4)}.data")
        external = require("onnx.external_data_helper", extra="onnx")
        external.convert_model_to_external_data(model, location=large.name)
    try:
        if large:
            external.write_external_data_tensors(model, str(path.parent))
        write_bytes(path, model.SerializeToString())
    except BaseException:
        if large:
            large.unlink(missing_ok=True)
        raise
    for other in others:  # of the file that is now replaced
        other.unlink(missing_ok=True)


class _Nodes:
    """Nodes and constants to append to a graph."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """The output of a new node."""
        output = output or f"{GUARD}{op}_{len(self.nodes)}"
        make_node = require("onnx.helper", extra="onnx").make_node
        self.nodes.append(make_node(op, inputs, [output], name=f"{GUARD}node_{len(self.nodes)}", **attributes))
        return output

    def constant(self, array: Any) -> str:
        """A new initializer."""
        name = f"{GUARD}constant_{len(self.constants)}"
        from_array = require("onnx.numpy_helper", extra="onnx").from_array
        self.constants.append(from_array(np.ascontiguousarray(array).reshape(np.shape(array)), name))
        return name

    def cast(self, tensor: str, dtype: npt.DTypeLike) -> str:
        """A tensor in another type."""
        return self.add(
            "Cast", tensor, to=require("onnx.helper", extra="onnx").np_dtype_to_tensor_dtype(np.dtype(dtype))
        )

    def is_positive(self, tensor: str) -> str:
        """Where doubles are > 0."""
        return self.add("Greater", tensor, self.constant(np.float64(0)))

    def log_sum_exp(self, tensor: str, *, keepdims: bool) -> str:
        """Over the rows of a matrix: (n, 1) or (n,)."""
        if self.opset < AXES_AS_INPUT:
            return self.add("ReduceLogSumExp", tensor, axes=[1], keepdims=keepdims)
        return self.add("ReduceLogSumExp", tensor, self.constant(np.array([1])), keepdims=keepdims)


def _bits(nodes: _Nodes, gate: Gate, reduce: Reduction) -> str:
    """The bits of a layer as in capture, uint8 (n, units)."""
    x = nodes.cast(gate.source, np.float64)
    if reduce == "none":
        return nodes.cast(nodes.is_positive(nodes.add("Flatten", x, axis=1)), np.uint8)
    shape, positions = nodes.constant(np.array([0, 0, -1])), 2
    if not gate.channels_first:
        channels = nodes.add("Gather", nodes.add("Shape", x), nodes.constant(np.array([-1])))
        shape, positions = nodes.add("Concat", nodes.constant(np.array([0, -1])), channels, axis=0), 1
    maps = nodes.add("Reshape", x, shape)
    if reduce == "any":
        maps = nodes.cast(nodes.is_positive(maps), np.float64)
    sums = nodes.add("ReduceSum", maps, nodes.constant(np.array([positions])), keepdims=0)
    return nodes.cast(nodes.is_positive(sums), np.uint8)


def _distances(nodes: _Nodes, bits: str, table: RegionTable) -> str:
    """Hamming distances to all regions, int32 (n, L): bits set here, plus those set there, less twice those set in both."""
    here = nodes.add("ReduceSum", nodes.cast(bits, np.int32), nodes.constant(np.array([1])), keepdims=1)
    step = max(1, MOST_UNPACKED // table.n_units)
    chunks = [np.arange(start, min(start + step, len(table))) for start in range(0, len(table), step)]
    parts = []
    for regions in chunks:
        trained = table.rows(regions).to_bool().T
        both = nodes.add("MatMulInteger", bits, _unpacked(nodes, trained))
        either = nodes.add("Add", here, nodes.constant(trained.sum(axis=0, dtype=np.int32)))
        parts.append(nodes.add("Sub", either, nodes.add("Add", both, both)))
    return nodes.add("Concat", *parts, axis=1)


def _unpacked(nodes: _Nodes, bits: BoolArray) -> str:
    """A matrix of bits as int8, kept packed; onnxruntime unpacks it once, as it loads the graph."""
    rows, columns = bits.shape
    eighths = nodes.constant(np.packbits(bits, axis=0, bitorder="little")[:, None])  # (rows / 8, 1, columns)
    shifted = nodes.add("BitShift", eighths, nodes.constant(np.arange(8, dtype=np.uint8)[:, None]), direction="RIGHT")
    single = nodes.add("Mod", shifted, nodes.constant(np.uint8(2)))
    whole = nodes.add("Reshape", single, nodes.constant(np.array([-1, columns])))
    sliced = nodes.add("Slice", whole, nodes.constant(np.array([0])), nodes.constant(np.array([rows])))
    return nodes.cast(sliced, np.int8)  # the product of bytes and signed bytes takes a third of that of bytes


def _unreliability(nodes: _Nodes, bits: str, smoother: Smoother, log_gap: float) -> str:
    """The log of the bound, double (n,): the sum of risk and gap, all in logs as in ``core.bound``."""
    table, (norm,) = smoother.table, smoother.normalizers
    distances = _distances(nodes, bits, table)
    closeness = nodes.add("Gather", nodes.constant(smoother.log_d[0]), distances)  # (n, L), in logs
    masses = nodes.add("Add", closeness, nodes.constant(np.log(table.counts)))
    log_mass = nodes.log_sum_exp(masses, keepdims=True)
    gap = nodes.add("Sub", nodes.constant(np.float64(log_gap + norm.log_u)), log_mass)
    if not len(norm.wrong):
        return nodes.add("Reshape", gap, nodes.constant(np.array([-1])))
    log_values = np.log(table.error_sum[norm.wrong]) - norm.log_w - math.log(table.n_samples)
    of_wrong = nodes.add("Gather", closeness, nodes.constant(norm.wrong), axis=1)
    risk = nodes.log_sum_exp(nodes.add("Add", of_wrong, nodes.constant(log_values)), keepdims=True)
    return nodes.log_sum_exp(nodes.add("Concat", risk, gap, axis=1), keepdims=False)


def _prefixed(model: ModelProto) -> ModelProto:
    """A copy of the network, all its names but the inputs' set apart, at an opset that has what the guard needs."""
    taken = {value.name for value in graph_inputs(model)} & set(OUTPUTS)
    if taken:
        raise InvalidInput(
            f"Inputs of the model must not be called as outputs of the guard. Got {', '.join(sorted(taken))}; rename them."
        )
    compose = require("onnx.compose", extra="onnx")
    model = _converted(inlined(model))
    inputs = graph_inputs(model)
    guarded: ModelProto = compose.add_prefix(model, NETWORK, rename_inputs=False)
    del guarded.graph.input[:]  # weights may stand among them, by their old names
    guarded.graph.input.extend(inputs)
    return guarded


def _converted(model: ModelProto) -> ModelProto:
    if _opset(model) >= OLDEST_OPSET:
        return model
    version_converter = require("onnx.version_converter", extra="onnx")
    try:
        converted: ModelProto = version_converter.convert_version(model, OLDEST_OPSET)
    except RuntimeError as error:
        raise InvalidInput(
            f"The model must have opset {OLDEST_OPSET} or later. Got {_opset(model)}, which onnx cannot convert "
            f"({error!s:.200}); export it anew."
        ) from error
    return converted


def _opset(model: ModelProto) -> int:
    """The version of ONNX's own operators; 1 if a model uses none."""
    return next((int(opset.version) for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)


def _replace_outputs(guarded: ModelProto, main: str) -> None:
    """The three outputs of a guard, for those of the network, of which the main one keeps type and shape."""
    onnx = require("onnx", extra="onnx")
    (output,) = [value for value in guarded.graph.output if value.name == main]
    output.name = OUTPUTS[0]
    others = [
        onnx.helper.make_tensor_value_info(name, dtype, ["n"])
        for name, dtype in zip(OUTPUTS[1:], (onnx.TensorProto.DOUBLE, onnx.TensorProto.BOOL), strict=True)
    ]
    kept = [output, *others]
    del guarded.graph.output[:]
    guarded.graph.output.extend(kept)
