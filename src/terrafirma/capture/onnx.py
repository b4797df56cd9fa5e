"""Networks in ONNX files: the tensors that go into gated layers become outputs of the graph, and onnxruntime gives them.

Maps have their channels along axis 1 where the last contraction before the layer is a convolution, else along the last
axis. A model of a fixed batch size is run in pieces of that size.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.capture._tensors import first_rows
from terrafirma.capture.dropout import Dropout
from terrafirma.capture.heads import fitting
from terrafirma.capture.network import Layer, Linear, Reduction, Step, Stochastic, check_alone
from terrafirma.capture.onnx_gates import Gate, OnnxGraph
from terrafirma.capture.onnx_model import FLOATS, as_input, fixed_size, graph_inputs, main_output, parsed
from terrafirma.core.patterns import BoolArray
from terrafirma.errors import BadFile, InvalidInput, require

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["OnnxNetwork"]

Arrays = dict[str, npt.NDArray[Any]]


class OnnxNetwork:
    """A network in an ONNX file.

    Layers go by the names of their nodes, or of the nodes' outputs where these have none. Any node or tensor may be named
    exactly; unless it is a gated layer, the sign of what it gives counts.

    A layer's features are what its node gives; where an activation is written in pieces, the product that is its last.

    Parameters
    ----------
    model : path, ``onnx.ModelProto``, or the bytes of one

    """

    classes: npt.NDArray[Any] | None = None

    def __init__(self, model: str | os.PathLike[str] | bytes | ModelProto) -> None:
        onnx = require("onnx", extra="onnx")
        self._folder: Path | None = None
        if isinstance(model, str | os.PathLike):
            path = Path(model)
            self.name, self._folder, content = path.stem, path.resolve().parent, path.read_bytes()
        elif isinstance(model, bytes | onnx.ModelProto):
            self.name = "onnx"
            content = model if isinstance(model, bytes) else model.SerializeToString()
        else:
            raise InvalidInput(
                f"model must be the path of an ONNX file, its bytes or an onnx.ModelProto. Got {type(model).__name__}."
            )
        self._proto = parsed(content, self.name, self._folder)
        self._graph = OnnxGraph(self._proto.graph)
        self._inputs = graph_inputs(self._proto)
        self._output = main_output(self._proto)
        self._session: tuple[list[str], Any] = ([], None)  # the last one, and what it gives

    def fingerprint(self) -> str:
        """SHA-256 of graph and weights, in whichever files these are."""
        rest = self.proto()
        digest = hashlib.sha256()
        for tensor in rest.graph.initializer:
            digest.update(tensor.SerializeToString(deterministic=True))
        del rest.graph.initializer[:]  # in pieces, because nothing beyond 2 GiB is made into bytes
        digest.update(rest.SerializeToString(deterministic=True))
        return digest.hexdigest()

    def file_bytes(self) -> bytes:
        """The content of an ONNX file of this network that needs no other file."""
        return bytes(self.proto().SerializeToString(deterministic=True))

    def proto(self) -> ModelProto:
        """The model, with its functions inlined and all weights within: a copy."""
        onnx = require("onnx", extra="onnx")
        whole: ModelProto = onnx.ModelProto()
        whole.CopyFrom(self._proto)
        if self._folder is not None:
            onnx.load_external_data_for_model(whole, str(self._folder))
        for tensor in whole.graph.initializer:
            tensor.ClearField("data_location")  # as in a file that has always been whole
        return whole

    def candidates(self, inputs: Any) -> list[Layer]:
        """Every gated layer of the graph, without bits."""
        gates = self._graph.gates
        arrays = self._run({gate.source: gate.name for gate in gates}, inputs)
        return [Layer(gate.name, gate.kind, arrays[gate.source].shape[1:]) for gate in gates]

    @contextmanager
    def watch(
        self, layers: Sequence[str] | None, reduce: Reduction = "none", *, features: bool | Sequence[str] = False
    ) -> Iterator[Callable[[Any], Step]]:
        """A function that runs a batch and says what happened."""
        chosen = self._graph.choose(layers)
        also, pool = chosen if features else [], reduce != "none" or not isinstance(features, bool)
        featured = also if isinstance(features, bool) else self._graph.choose(features, "features")
        gates = sorted(dict.fromkeys([*chosen, *featured]), key=lambda gate: gate.position)
        tensors = {gate.result: gate.name for gate in featured} | {gate.source: gate.name for gate in gates}

        checked: list[bool] = []  # that samples do not mix

        def look(inputs: Any) -> Step:
            arrays = self._run(tensors, inputs)
            seen = []
            for gate in gates:
                source = arrays[gate.source]
                bits = _bits(source, gate, reduce) if gate in chosen else None
                kept = _features(arrays[gate.result], gate, pool=pool) if gate in featured else None
                seen.append(Layer(gate.name, gate.kind, source.shape[1:], bits, kept))
            return Step(seen, _as_numbers(arrays[self._output]))

        def run(inputs: Any) -> Step:
            step = look(inputs)
            has_sequences = any(len(layer.shape) == 2 for layer in step.layers)
            if has_sequences and len(step.outputs) > 1 and not checked and not fixed_size(self._inputs[0]):
                check_alone(step, lambda: look(first_rows(inputs, 1)))
                checked.append(True)
            return step

        yield run

    def linear(self, n_features: int, n_outputs: int) -> Linear:
        """Weights and biases that may be those of the last linear layer: initializers of floats, the last ones first."""
        to_array, folder = require("onnx.numpy_helper", extra="onnx").to_array, str(self._folder or "")
        sizes = (n_outputs, n_outputs * n_features)
        floats = [tensor for tensor in reversed(self._proto.graph.initializer) if tensor.data_type in FLOATS]
        floats = [tensor for tensor in floats if math.prod(tensor.dims) in sizes]
        precision = max((FLOATS[tensor.data_type] for tensor in floats), default=0.0)
        return *fitting([to_array(tensor, folder) for tensor in floats], n_features, n_outputs), precision

    def dropping(self, dropout: Dropout) -> Callable[[Any, int], Stochastic]:  # noqa: ARG002  # whatever was asked for
        """Raise: what is exported to ONNX has no dropout left."""
        raise InvalidInput(
            f"dropout needs a torch module with nn.Dropout modules. Got the ONNX file {self.name}, whose dropout does nothing; "
            "hand in the module, or choose a score that needs no dropout."
        )

    def _run(self, layer_names: Mapping[str, str], inputs: Any) -> Arrays:
        """These tensors, which layers are named after for messages, and the model's output."""
        wanted = list(dict.fromkeys([self._output, *layer_names]))
        session = self._session_for(wanted)
        feed = self._feed(inputs)
        n = len(next(iter(feed.values())))
        size = fixed_size(self._inputs[0]) or n
        pieces = []
        for start in range(0, max(n, 1), max(size, 1)):
            part = {name: _filled(array[start : start + size], size) for name, array in feed.items()}
            arrays = dict(zip(wanted, _outputs_of(session, wanted, part), strict=True))
            for name, array in arrays.items():
                _check_rows(layer_names.get(name, name), array, size)
            pieces.append(arrays)
        if len(pieces) == 1:
            return {name: array[:n] for name, array in pieces[0].items()}
        return {name: np.concatenate([arrays[name] for arrays in pieces])[:n] for name in wanted}

    def _feed(self, inputs: Any) -> Arrays:
        """Inputs as arrays by name, checked against what the graph asks for."""
        names = [value.name for value in self._inputs]
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        elif isinstance(inputs, tuple | list) and len(inputs) == len(names):
            given = dict(zip(names, inputs, strict=True))
        else:
            given = dict.fromkeys(names, inputs) if len(names) == 1 else {}
        if sorted(given) != sorted(names):
            raise InvalidInput(
                f"inputs must be arrays for {', '.join(names)}: in a dict by name, or in that order in a tuple. "
                f"Got {', '.join(map(str, inputs)) if isinstance(inputs, Mapping) else _described(inputs)}."
            )
        feed = {value.name: as_input(given[value.name], value) for value in self._inputs}
        rows = {name: len(array) for name, array in feed.items()}
        if len(set(rows.values())) > 1:
            raise InvalidInput(f"All inputs must have as many rows. Got {rows}; pair them anew.")
        return feed

    def _session_for(self, wanted: list[str]) -> Any:
        """A session that gives these tensors; the last one is kept."""
        if self._session[0] == wanted:
            return self._session[1]
        onnxruntime = require("onnxruntime", extra="onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what is fatal is raised as well
        if self._folder is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._folder))
        try:
            session = onnxruntime.InferenceSession(
                self._with_outputs(wanted), options, providers=["CPUExecutionProvider"]
            )
        except _runtime_errors() as error:
            raise BadFile(
                f"{self.name} is not a model that onnxruntime can run ({error!s:.300}). Export it again."
            ) from error
        self._session = (wanted, session)
        return session

    def _with_outputs(self, wanted: Sequence[str]) -> bytes:
        """The model as bytes, with these tensors among its outputs; onnxruntime finds their types."""
        outputs = self._proto.graph.output
        known = {value.name for value in outputs}
        for name in wanted:
            if name not in known:
                outputs.add().name = name
        try:
            return bytes(self._proto.SerializeToString())
        finally:
            del outputs[len(known) :]


def _filled(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """The rows of a piece, the last one again and again where it is shorter than the others."""
    return rows if len(rows) == size else np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])


def _outputs_of(session: Any, wanted: list[str], feed: Arrays) -> list[npt.NDArray[Any]]:
    try:
        arrays: list[npt.NDArray[Any]] = session.run(wanted, feed)
    except _runtime_errors() as error:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
        raise InvalidInput(
            f"onnxruntime could not run the model on {shapes} ({error!s:.300}). Give inputs as in training."
        ) from error
    return arrays


def _runtime_errors() -> tuple[type[Exception], ...]:
    """What onnxruntime raises: classes that have nothing but Exception in common."""
    state = require("onnxruntime.capi.onnxruntime_pybind11_state", extra="onnx")
    names = (
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "NoSuchFile",
        "NotImplemented",
        "RuntimeException",
    )
    return tuple(getattr(state, name) for name in names)


def _check_rows(name: str, array: npt.NDArray[Any], n: int) -> None:
    if array.ndim == 0 or len(array) != n:
        raise InvalidInput(
            f"{name} must have one row for each of the {n} samples. Got shape {array.shape}; "
            "export the model with the batch as first axis, or name another layer."
        )


def _by_channel(array: npt.NDArray[Any], gate: Gate) -> npt.NDArray[Any]:
    """Maps as (n, channels, positions)."""
    n, *rest = array.shape
    if gate.channels_first or not rest:
        return array.reshape(n, rest[0] if rest else 1, math.prod(rest[1:]))
    return array.reshape(n, math.prod(rest[:-1]), rest[-1]).swapaxes(1, 2)


def _bits(source: npt.NDArray[Any], gate: Gate, reduce: Reduction) -> BoolArray:
    if reduce == "none":
        return np.asarray(source.reshape(len(source), math.prod(source.shape[1:])) > 0)
    maps = _by_channel(source, gate)
    return np.asarray((maps > 0).any(axis=2) if reduce == "any" else maps.sum(axis=2, dtype=np.float64) > 0)


def _features(result: npt.NDArray[Any], gate: Gate, *, pool: bool) -> npt.NDArray[Any]:
    """What the gate gives; pooled, positions are averaged."""
    if not pool:
        return result.reshape(len(result), math.prod(result.shape[1:])).astype(np.float32)
    return np.asarray(_by_channel(result, gate).mean(axis=2, dtype=np.float64), dtype=np.float32)


def _as_numbers(outputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Outputs as float64 where they are that, else as float32."""
    return outputs if outputs.dtype == np.float64 else outputs.astype(np.float32, copy=False)


def _described(inputs: Any) -> str:
    return f"{len(inputs)} arrays" if isinstance(inputs, tuple | list) else f"one {type(inputs).__name__}"
