"""A recording in the making: batches go in, a ``Recorded`` comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.capture._tensors import shown
from terrafirma.capture.batches import Batch, Batches, DataHash
from terrafirma.capture.dropout import Dropout
from terrafirma.capture.growing import GrowingArrays
from terrafirma.capture.heads import find_head
from terrafirma.capture.network import Layer, Network, Reduction, Step
from terrafirma.capture.parts import Parts, Widths
from terrafirma.capture.progress import progress_bar
from terrafirma.core._checks import as_array
from terrafirma.core.patterns import PackedPatterns
from terrafirma.errors import InvalidInput
from terrafirma.recorded import ErrorFunction, Recorded, Source, check_no_nan, errors_of, is_classification

__all__ = ["Capture", "run_through"]

FEATURES, STOCHASTIC = "features ", "stochastic "  # begin the names of arrays, before a layer's and a probability


class Capture:
    """A recording in the making.

    Parameters
    ----------
    expected : int, optional
        Samples to come, where that is known.
    parts : Parts, optional
        What an earlier run left on disk, and where to leave what this one gets.
    seen : DataHash, optional
        Takes the fingerprint of the data; parts need it.
    keep_outputs : bool
        Whether to keep outputs once the errors are known; they may take more room than the patterns.
    keep_inputs : bool
        Whether to keep the inputs.

    """

    def __init__(
        self,
        network: Network,
        error: ErrorFunction | None = None,
        expected: int | None = None,
        parts: Parts | None = None,
        seen: DataHash | None = None,
        *,
        keep_outputs: bool = True,
        keep_inputs: bool = False,
    ) -> None:
        self.network, self.error, self.parts, self.seen = network, error, parts, seen
        self.keep_outputs, self.keep_inputs = keep_outputs, keep_inputs
        self.grown = GrowingArrays(expected)
        self.layers: list[Widths] = []
        self.passed = 0
        if parts is not None:
            self.layers = parts.restore(self.grown, self._with_errors)
        self.restored = self.grown.n

    def has(self, batch: Batch) -> bool:
        """Whether the next batch was restored; raise where it is another than it was then."""
        if self.seen is not None:
            self.seen.update(batch)
        first, self.passed = self.passed, self.passed + batch.n
        if self.parts is not None and self.seen is not None and first < self.restored <= self.passed:
            self.parts.check_data(self.seen.hexdigest())
        return self.passed <= self.restored

    def add(self, batch: Batch, step: Step) -> None:
        """Keep what the network did on a batch."""
        first = self.grown.n
        widths = [_widths(layer, batch.n) for layer in step.layers]
        if first and widths != self.layers:
            raise InvalidInput(
                f"The same layers must run, as wide, on every batch. Got {_listed(widths)} from row {first} on, and "
                f"{_listed(self.layers)} before; pad the inputs to one size, or pool maps with reduce='any'."
            )
        self.layers = widths
        self.grown.add(batch.n, self._rows(batch, step, first))
        if self.parts is not None and self.seen is not None:
            self.parts.keep(self.grown, self.layers, self.seen.hexdigest())

    def _rows(self, batch: Batch, step: Step, first: int) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a batch, by name."""
        outputs = _checked_outputs(step.outputs, batch.n, first)
        bits = [layer.bits for layer in step.layers if layer.bits is not None]
        rows = {"words": PackedPatterns.pack(np.concatenate(bits, axis=1)).words, "outputs": outputs}
        rows |= {f"{FEATURES}{layer.name}": layer.features for layer in step.layers if layer.features is not None}
        for p, several in step.stochastic.items():
            check_no_nan(several, first, f"The network's outputs with dropout {p}")
            rows[f"{STOCHASTIC}{p!r}"] = several
        if self.keep_inputs:
            rows["inputs"] = _kept_inputs(batch.inputs)
        if batch.labels is not None:
            rows["labels"] = _numbered(batch.labels, self.network.classes, first)
        rows = self._with_errors(rows)
        if "errors" in rows and not self.keep_outputs:
            del rows["outputs"]
        return rows

    def _with_errors(self, rows: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the next samples with their errors, where these are known."""
        labels, outputs = rows.get("labels"), rows["outputs"]
        if labels is not None and (self.error is not None or is_classification(outputs, labels)):
            rows["errors"] = errors_of(outputs, labels, self.error, self.grown.n)
        return rows

    def result(self, source: Source | None = None) -> Recorded:
        """The recording."""
        if not self.grown.n:
            raise InvalidInput(
                "data must have at least one sample. Got none; look at the loader, and whether it was used up before."
            )
        if self.passed < self.restored and self.parts is not None:
            raise self.parts.other_data()
        arrays = self.grown.finish()
        widths = {name: width for name, width, _ in self.layers if width is not None}
        layers = {name: arrays[f"{FEATURES}{name}"] for name, _, width in self.layers if width is not None}
        dropouts = [float(name.removeprefix(STOCHASTIC)) for name in arrays if name.startswith(STOCHASTIC)]
        features = next(reversed(layers.values()), None)
        return Recorded(
            patterns=PackedPatterns(arrays["words"], sum(widths.values())),
            features=features,
            layers=layers,
            stochastic={p: np.moveaxis(arrays[f"{STOCHASTIC}{p!r}"], 1, 0) for p in sorted(dropouts)},
            head=self._head(features, arrays.get("outputs")),
            layer_names=tuple(widths),
            widths=tuple(widths.values()),
            source=source,
            **{name: arrays.get(name) for name in ("outputs", "labels", "errors", "inputs")},
        )

    def _head(
        self, features: npt.NDArray[Any] | None, outputs: npt.NDArray[Any] | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """The network's last linear layer, where it is one of the features."""
        if features is None or outputs is None or outputs.ndim != 2:
            return None
        return find_head(features, outputs, *self.network.linear(features.shape[1], outputs.shape[1]))


def run_through(
    capture: Capture,
    stream: Batches,
    chosen: Sequence[str] | None,
    reduce: Reduction,
    *,
    features: bool | Sequence[str] = False,
    dropout: Dropout | None = None,
    progress: bool | None = None,
) -> None:
    """Run every batch that is not restored already."""
    network = capture.network
    drop = None if dropout is None else network.dropping(dropout)
    with (
        network.watch(chosen, reduce, features=features) as run,
        progress_bar(f"recording {network.name}", stream.n_samples, shown=progress) as advance,
    ):
        for batch in stream:
            if not capture.has(batch):
                try:
                    step = run(batch.inputs)
                    if drop is not None:
                        step = replace(step, stochastic=drop(batch.inputs, capture.grown.n))
                except Exception as error:
                    error.add_note(
                        f"{network.name} was run on a batch of {batch.n} samples, {_shapes(batch.inputs)}. Inputs come as one "
                        "array, samples first (X[None] for one), as a dict by name, or as (X, y), of which y is the labels."
                    )
                    raise
                capture.add(batch, step)
            advance(batch.n)


def _shapes(inputs: Any) -> str:
    """What inputs look like, in words."""
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_shapes(value)}" for name, value in inputs.items())
    if isinstance(inputs, tuple | list):
        return ", ".join(map(_shapes, inputs))
    return f"{getattr(inputs, 'dtype', type(inputs).__name__)} of shape {tuple(getattr(inputs, 'shape', ()))}"


def _checked_outputs(outputs: npt.NDArray[Any], n: int, first: int) -> npt.NDArray[Any]:
    """Outputs with a row for each sample, and no NaN."""
    if outputs.ndim == 0 or len(outputs) != n:
        raise InvalidInput(
            f"The network must give one row of outputs for each sample. Got shape {outputs.shape} for {n} samples from row "
            f"{first} on; put the batch into the first dimension."
        )
    check_no_nan(outputs, first, "The network's outputs")
    return outputs


def _kept_inputs(inputs: Any) -> npt.NDArray[Any]:
    """Inputs as one array of numbers."""
    if isinstance(inputs, Mapping | tuple | list):
        raise InvalidInput(
            f"inputs=True keeps inputs that are one array. Got {shown(inputs)}; leave it out, or wrap the network in one that "
            "takes an array."
        )
    kept = as_array(inputs, "inputs")
    if kept.dtype.kind not in "biuf":
        raise InvalidInput(f"inputs=True keeps inputs that are numbers. Got {kept.dtype}; leave it out.")
    return kept


def _widths(layer: Layer, n: int) -> Widths:
    """A layer's name and widths."""
    widths = []
    for kept in (layer.bits, layer.features):
        if kept is not None and (kept.ndim != 2 or len(kept) != n):
            raise InvalidInput(
                f"Layer {layer.name} must give one row for each of the {n} samples. Got shape {kept.shape}."
            )
        widths.append(None if kept is None else int(kept.shape[1]))
    return layer.name, widths[0], widths[1]


def _listed(layers: list[Widths]) -> str:
    return (
        ", ".join(f"{name} ({features if bits is None else bits} units)" for name, bits, features in layers) or "none"
    )


def _numbered(labels: npt.NDArray[Any], classes: npt.NDArray[Any] | None, first: int) -> npt.NDArray[Any]:
    """Labels as numbers: those of classes, where the network has names for them."""
    if classes is None:
        if labels.dtype.kind not in "biuf":
            raise InvalidInput(
                f"labels must be numbers. Got {labels.dtype} ({labels.tolist()[0]!r:.40}); number the classes as in training."
            )
        return labels
    if labels.dtype.kind in "OUS" and classes.dtype.kind in "OUS":
        labels, classes = labels.astype(str), classes.astype(str)
    known = np.isin(labels, classes)
    if not known.all():
        row = int(np.argmin(known))
        raise InvalidInput(
            f"labels must be classes that the network was trained on ({', '.join(map(str, classes[:8]))}). "
            f"Got {labels[row].item()!r} in row {first + row}."
        )
    return np.asarray(np.searchsorted(classes, labels), dtype=np.int64)
