"""What a network did on a set of samples: all that scores, policies and guards ever see of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import storage
from terrafirma.core._checks import as_array, check_errors, check_positive
from terrafirma.core.patterns import FloatArray, IntArray, PackedPatterns, as_patterns
from terrafirma.errors import BadFile, InvalidInput

__all__ = [
    "ClippedError",
    "ErrorFunction",
    "Recorded",
    "Source",
    "check_no_nan",
    "errors_of",
    "is_classification",
    "why_no_errors",
]

KIND = "Recorded"
ErrorFunction = Callable[[npt.NDArray[Any], npt.NDArray[Any]], Any]
BY_ROW = ("outputs", "features", "labels", "errors", "inputs")  # arrays with one row each sample
FIELDS = frozenset({"patterns", *BY_ROW, "layers", "stochastic", "head"})
WHERE = {
    "errors": "labels, or errors",
    "layers": "features=True",
    "features": "features=True",
    "head": "features=True, of the layer before the last",
    "inputs": "inputs=True",
    "stochastic": "dropout=0.5, or several",
}


@dataclass(frozen=True)
class ClippedError:
    """The error of a regression: ``min(|output - label| / scale, 1)``, averaged over the outputs of a sample.

    ``scale`` is the absolute error that counts as wholly wrong.

    >>> ClippedError(scale=2.0)(np.array([1.0, 5.0]), np.array([2.0, 0.0]))
    array([0.5, 1. ])
    """

    scale: float

    def __post_init__(self) -> None:
        check_positive("scale", self.scale, "the absolute error that counts as wholly wrong")

    def __call__(self, outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> FloatArray:
        """Errors (n,) of a batch."""
        rows = len(outputs)
        if outputs.size != labels.size or len(labels) != rows:
            raise InvalidInput(
                f"outputs and labels must hold as many numbers. Got shapes {outputs.shape} and {labels.shape}; "
                "give error= a function that knows what they mean."
            )
        apart = np.abs(outputs.reshape(rows, -1).astype(np.float64) - labels.reshape(rows, -1))
        return np.asarray(np.minimum(apart / self.scale, 1.0).mean(axis=1))


@dataclass(frozen=True)
class Source:
    """Where a recording comes from: fingerprints are equal for equal weights and for equal samples in equal order."""

    model: str
    model_fingerprint: str
    data_fingerprint: str
    reduce: str = "none"


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a network did on n samples. Every field may be missing; whoever needs one says so.

    Attributes
    ----------
    patterns : PackedPatterns
        Activation patterns; a bool array (n, M) is packed. Several layers are concatenated in the order in which they ran.
    outputs : array (n, C), or (n, ...) for anything but a classifier
    features : float array (n, units)
        What the last of the layers with features gives.
    labels : array (n,)
        Classes from 0, or whatever the network should have given.
    errors : float64 array (n,)
        In [0, 1]; where there are integer labels and outputs of several classes, by default whether the largest output is
        another than the label's.
    layers : dict of name to float array (n, units)
        Features by layer, in the order in which they ran; these need not be the layers that patterns are of.
    stochastic : dict of dropout probability to array (passes, n, C)
    inputs : array (n, ...)
    head : (W, b)
        The last linear layer: ``outputs = features @ W.T + b``.
    layer_names, widths : tuples
        The layers that patterns are of, and their shares of a pattern.
    source : Source
        Fingerprints of model and data.

    Examples
    --------
    >>> rec = Recorded(outputs=np.array([[2.0, 1.0], [0.5, 3.0]]), labels=np.array([0, 0]))
    >>> rec.errors, rec.predictions
    (array([0., 1.]), array([0, 1]))

    """

    patterns: PackedPatterns | None = None
    outputs: npt.NDArray[Any] | None = None
    features: npt.NDArray[Any] | None = None
    labels: npt.NDArray[Any] | None = None
    errors: FloatArray | None = None
    layers: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    stochastic: Mapping[float, npt.NDArray[Any]] = field(default_factory=dict)
    inputs: npt.NDArray[Any] | None = None
    head: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None
    layer_names: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    source: Source | None = None

    def __post_init__(self) -> None:
        if self.patterns is not None:
            self._set("patterns", as_patterns(self.patterns, name="patterns"))
            self._set("widths", tuple(self.widths) or (self.patterns.n_units,))
        for name in BY_ROW:
            if getattr(self, name) is not None:
                self._set(name, as_array(getattr(self, name), name))
        self._set("layers", {name: as_array(value, f"layers[{name!r}]") for name, value in self.layers.items()})
        self._set("stochastic", {float(p): as_array(value, f"stochastic[{p}]") for p, value in self.stochastic.items()})
        self._set("layer_names", tuple(self.layer_names))
        self._check_rows()
        self._check_layers()
        if self.head is not None:
            self._set("head", _checked_head(self.head))
        if self.outputs is not None:
            check_no_nan(self.outputs, 0, "outputs")
        if self.errors is None and self.is_classification:
            self._set("errors", errors_of(self.outputs, self.labels))
        elif self.errors is not None:
            self._set("errors", check_errors(self.errors, len(self)))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _rows(self) -> dict[str, int]:
        """Rows by name, of every field that has them."""
        own = {name: getattr(self, name) for name in ("patterns", *BY_ROW)}
        several = {f"layers[{name!r}]": value for name, value in self.layers.items()}
        rows = {name: len(value) for name, value in (own | several).items() if value is not None}
        for p, value in self.stochastic.items():
            if value.ndim < 3:
                raise InvalidInput(
                    f"stochastic must hold arrays of shape (passes, n, C). Got {value.shape} at probability {p}; stack passes."
                )
        return rows | {f"stochastic[{p}]": np.shape(value)[1] for p, value in self.stochastic.items()}

    def _check_rows(self) -> None:
        rows = self._rows()
        if not rows:
            raise InvalidInput("Recorded must have at least one field. Got none; give patterns, outputs or labels.")
        if len(set(rows.values())) > 1:
            raise InvalidInput(
                f"All fields must have one row for each sample. Got {', '.join(f'{n} {name}' for name, n in rows.items())}."
            )

    def _check_layers(self) -> None:
        if self.patterns is not None and sum(self.widths) != self.patterns.n_units:
            raise InvalidInput(
                f"widths must sum to the {self.patterns.n_units} units of a pattern. Got {self.widths}; leave them out."
            )
        names, widths = self.layer_names, self.widths
        if len(set(names)) < len(names) or (names and widths and len(names) != len(widths)):
            raise InvalidInput(
                f"layer_names must differ, one for each of the widths {widths}. Got {names}; leave them out."
            )

    def __len__(self) -> int:
        return next(iter(self._rows().values()))

    @property
    def is_classification(self) -> bool:
        """Whether labels are classes and outputs have a column for each."""
        return self.labels is not None and self.outputs is not None and is_classification(self.outputs, self.labels)

    @property
    def predictions(self) -> IntArray:
        """The class with the largest output, of each sample."""
        outputs = self.need("outputs", by="predictions")
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise InvalidInput(
                f"predictions needs outputs (n, classes). Got shape {outputs.shape}; use outputs themselves."
            )
        return np.asarray(outputs.argmax(axis=1))

    def need(self, *names: str, by: str) -> Any:
        """The value of a field, or a tuple of several; raise where one is lacking. ``by`` is who asks."""
        values = {name: getattr(self, name) for name in names}
        lacking = [
            name for name, value in values.items() if value is None or (isinstance(value, Mapping) and not value)
        ]
        if lacking:
            if lacking == ["errors"] and self.labels is not None and self.outputs is not None:
                raise InvalidInput(f"{by} needs an error for each sample. {why_no_errors(self)}")
            how = ", ".join(WHERE.get(name, name) for name in lacking)
            raise InvalidInput(f"{by} needs {', '.join(lacking)}, which were not recorded. Record again with {how}.")
        return next(iter(values.values())) if len(values) == 1 else tuple(values.values())

    def __getitem__(self, rows: int | slice | npt.NDArray[Any]) -> Recorded:
        """Some of the samples; the source stays that of the whole."""
        rows = np.array([rows]) if isinstance(rows, int | np.integer) else rows
        parts = {name: getattr(self, name)[rows] for name in ("patterns", *BY_ROW) if getattr(self, name) is not None}
        parts["layers"] = {name: value[rows] for name, value in self.layers.items()}
        parts["stochastic"] = {p: value[:, rows] for p, value in self.stochastic.items()}
        for name, value in self.layers.items():
            if value is self.features:  # once is enough
                parts["features"] = parts["layers"][name]
        return replace(self, **parts)

    def only(self, names: Iterable[str]) -> Recorded:
        """These fields, those of them that there are, and the source."""
        kept = {name: getattr(self, name) for name in names if name in FIELDS}
        if "patterns" in kept:
            kept |= {"layer_names": self.layer_names, "widths": self.widths}
        return Recorded(**kept, source=self.source)

    def __repr__(self) -> str:
        rows = {name for name in ("patterns", *BY_ROW) if getattr(self, name) is not None}
        units = "" if self.patterns is None else f" of {self.patterns.n_units} units"
        layers = f" ({', '.join(self.layer_names)})" if self.layer_names else ""
        names = [
            f"patterns{units}{layers}" if name == "patterns" else name for name in ("patterns", *BY_ROW) if name in rows
        ]
        wrong = "" if self.errors is None or not len(self) else f"; mean error {self.errors.mean():.4g}"
        more = [f"features of {len(self.layers)} layers"] * (len(self.layers) > 1)
        more += [f"{len(value)} passes with dropout {p}" for p, value in self.stochastic.items()]
        also = "".join(f"; {part}" for part in [", ".join(more), "head" * (self.head is not None)] if part)
        return f"<Recorded {len(self)} samples: {', '.join(names)}{wrong}{also}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file (safetensors with a JSON header)."""
        arrays, settings = self.to_arrays()
        storage.write_arrays(path, KIND, arrays, settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recorded:
        """Read what ``save`` wrote."""
        arrays, settings = storage.read_arrays(path, KIND)
        try:
            return cls.from_arrays(arrays, settings)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise BadFile(f"{Path(path)} does not hold a whole Recorded ({error!r:.200}). Record it again.") from error

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that a file needs: arrays, and settings that JSON holds."""
        arrays = {name: getattr(self, name) for name in BY_ROW if getattr(self, name) is not None}
        settings: dict[str, Any] = {"layer_names": list(self.layer_names), "widths": list(self.widths)}
        settings["layers"] = list(self.layers)  # a file keeps no order
        settings["features"] = next((name for name, value in self.layers.items() if value is self.features), None)
        if settings["features"] is not None:
            del arrays["features"]  # once is enough
        arrays |= {f"layers/{name}": value for name, value in self.layers.items()}
        arrays |= {f"stochastic/{p!r}": np.moveaxis(value, 1, 0) for p, value in self.stochastic.items()}  # as captured
        if self.patterns is not None:
            arrays["words"] = self.patterns.words
            settings["n_units"] = self.patterns.n_units
        if self.head is not None:
            arrays["head/W"], arrays["head/b"] = self.head
        if self.source is not None:
            settings["source"] = {part.name: getattr(self.source, part.name) for part in fields(self.source)}
        return arrays, settings

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]], settings: dict[str, Any]) -> Recorded:
        """What ``to_arrays`` gave, or an error of any kind where it is not whole."""

        def under(prefix: str) -> dict[str, npt.NDArray[Any]]:
            return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}

        layers, names = under("layers/"), tuple(settings["layer_names"])
        layers = {name: layers[name] for name in settings.get("layers", layers)}
        same = settings.get("features", names[-1] if names else None)
        if same in layers:
            arrays = {"features": layers[same]} | arrays
        return cls(
            patterns=PackedPatterns(arrays["words"], settings["n_units"]) if "words" in arrays else None,
            layers=layers,
            stochastic={float(p): np.moveaxis(value, 1, 0) for p, value in under("stochastic/").items()},
            head=(arrays["head/W"], arrays["head/b"]) if "head/W" in arrays else None,
            layer_names=names,
            widths=tuple(settings["widths"]),
            source=Source(**settings["source"]) if "source" in settings else None,
            **{name: arrays[name] for name in BY_ROW if name in arrays},
        )


def _checked_head(head: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    parts = [as_array(part, "head") for part in head] if isinstance(head, tuple | list) else []
    shapes = [part.shape for part in parts]
    if len(parts) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
        raise InvalidInput(
            f"head must be (W, b) of shapes (C, units) and (C,). Got {shapes or type(head).__name__}; "
            "in torch: (layer.weight, layer.bias)."
        )
    return parts[0], parts[1]


def check_no_nan(outputs: npt.NDArray[Any], first: int, name: str) -> None:
    """Raise where outputs are no numbers; ``first`` is the number of the first row."""
    if outputs.dtype.kind not in "fc" or not np.isnan(outputs).any():
        return
    bad = np.isnan(outputs.reshape(len(outputs), -1)).any(axis=1)
    raise InvalidInput(
        f"{name} must be numbers. Got NaN in row {first + int(bad.argmax())} ({bad.sum()} of {len(bad)} rows); look for NaN in "
        "the inputs or an overflow in the network."
    )


def is_classification(outputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> bool:
    """Whether labels are integers, one each sample, and outputs have a column for each of several classes."""
    return labels.dtype.kind in "biu" and labels.ndim == 1 and outputs.ndim == 2 and outputs.shape[1] > 1


def errors_of(outputs: Any, labels: Any, error: ErrorFunction | None = None, first: int = 0) -> FloatArray:
    """The error of each sample: by default 1 where the largest output is another than the label's, else 0.

    ``error`` sees outputs of the labels' shape, where they hold as many numbers. ``first`` is the number of the first row, for
    messages.
    """
    rows = len(outputs)
    if error is not None:
        seen = [np.asarray(outputs).view(), np.asarray(labels).view()]
        if seen[0].size == seen[1].size:
            seen[0] = seen[0].reshape(seen[1].shape)
        for view in seen:
            view.setflags(write=False)  # they are the user's own
        found = as_array(error(*seen), "errors")
        found = found.reshape(rows) if found.size == rows else found
        return check_errors(found, rows, name="What error returns", first=first)
    check_no_nan(outputs, first, "outputs")
    bad = np.flatnonzero((labels < 0) | (labels >= outputs.shape[1]))
    if len(bad):
        raise InvalidInput(
            f"labels must be classes from 0 to {outputs.shape[1] - 1}, one for each output of the network. "
            f"Got {labels[bad[0]]} in row {first + bad[0]}; number them as in training."
        )
    return np.asarray(outputs.argmax(axis=1) != labels, dtype=np.float64)


def why_no_errors(recorded: Recorded) -> str:
    """What is missing for errors to be known, and the next step for what was given instead."""
    labels, outputs = recorded.labels, recorded.outputs
    if labels is None:
        return "Got no labels; give pairs, as in fit((X, y), (X_val, y_val))."
    given = f"Got labels {labels.dtype} of shape {labels.shape}"
    if outputs is not None:
        given += f" beside outputs of shape {outputs.shape}"
    if labels.ndim == 2 and labels.shape[1] == 1:
        return f"{given}; use y.ravel()."
    if labels.ndim == 2 and outputs is not None and labels.shape == outputs.shape and np.isin(labels, (0, 1)).all():
        return f"{given}; where these are classes, use y.argmax(axis=1)."
    if outputs is not None and outputs.size == len(outputs) and np.isin(labels, (0, 1)).all():
        return f"{given}; for one logit, error=lambda output, y: (output > 0) != y."
    if labels.dtype.kind == "f" and labels.ndim == 1 and (labels == np.round(labels)).all():
        return f"{given}; where these are classes, use y.astype(int), else error=, such as ClippedError(scale=...)."
    return f"{given}; for anything but classes give error=, such as ClippedError(scale=...)."
