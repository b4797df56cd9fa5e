"""Whatever users keep their samples in, as a stream of batches."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array
from terrafirma.errors import InvalidInput

__all__ = ["Batch", "Batches", "DataHash", "batches"]

LABEL_KEYS = ("labels", "label", "targets", "target", "y")
FORMS = "an array, (X, y), a dict of arrays, or a loader that yields (inputs, labels), dicts or arrays"
HASHED = 1024  # values of a sample that its fingerprint sees, evenly spaced


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs (an array, or a dict or tuple of arrays) of n samples, and their labels where there are any."""

    inputs: Any
    labels: npt.NDArray[Any] | None
    n: int


@dataclass(frozen=True, eq=False)
class Batches:
    """Batches to go through once or again, and the number of samples if it is known."""

    source: Iterable[Batch]
    n_samples: int | None

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.source)


def batches(data: Any, batch_size: int) -> Batches:
    """Batches of an array, ``(X, y)``, a dict of arrays, a torch ``Dataset``, or anything that yields batches."""
    if isinstance(data, Batches):
        return data
    if isinstance(data, str | bytes) or data is None:
        raise InvalidInput(f"data must be {FORMS}. Got {data!r:.80}.")
    if _is_pair_of_arrays(data) or _is_rows(data) or isinstance(data, Mapping):
        whole = _batch(data, "data")
        return Batches(_Slices(whole, batch_size), whole.n)
    if "torch" in sys.modules and isinstance(data, sys.modules["torch"].utils.data.Dataset):
        data = sys.modules["torch"].utils.data.DataLoader(data, batch_size=batch_size)
    if not isinstance(data, Iterable):
        raise InvalidInput(f"data must be {FORMS}. Got {type(data).__name__}.")
    data = _in_order(data)
    return Batches(_Loaded(data), _count(data))


@dataclass(frozen=True)
class _Slices:
    """The batches of arrays in memory, or mapped into it."""

    whole: Batch
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.whole.n, self.batch_size):
            rows = slice(start, min(start + self.batch_size, self.whole.n))
            labels = None if self.whole.labels is None else self.whole.labels[rows]
            yield Batch(_sliced(self.whole.inputs, rows), labels, rows.stop - rows.start)


@dataclass(frozen=True)
class _Loaded:
    """The batches of a loader."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Batch]:
        for number, item in enumerate(self.loader):
            batch = _batch(item, f"batch {number}")
            if batch.n:  # a filter may leave none
                yield batch


def _batch(item: Any, name: str) -> Batch:
    """Take apart what a loader gave, or whole arrays."""
    inputs, labels = item, None
    if isinstance(item, Mapping):
        key = next((key for key in LABEL_KEYS if key in item), None)
        labels = None if key is None else item[key]
        inputs = {other: value for other, value in item.items() if other != key}
    elif isinstance(item, tuple | list):
        if len(item) not in (1, 2):
            raise InvalidInput(
                f"{name} must be (inputs, labels). Got {len(item)} parts; make arrays of lists, and put several inputs into a "
                "dict or tuple of their own."
            )
        inputs, labels = item if len(item) == 2 else (item[0], None)
    leaves = _leaves(inputs)
    if not leaves or not all(_is_rows(leaf) for leaf in leaves):
        raise InvalidInput(f"{name} must be {FORMS}. Got inputs of type {type(inputs).__name__}.")
    n = _common_rows(leaves, name)
    if labels is not None:
        labels = as_array(labels, f"labels of {name}")
        if labels.ndim == 0 or len(labels) != n:
            raise InvalidInput(
                f"labels of {name} must have one row for each of its {n} samples. Got shape {labels.shape}; pair them anew."
            )
    return Batch(inputs, labels, n)


def _common_rows(leaves: list[Any], name: str) -> int:
    rows = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(rows)) > 1:
        raise InvalidInput(f"All inputs of {name} must have as many rows. Got {', '.join(map(str, rows))}.")
    return rows[0]


def _is_rows(value: Any) -> bool:
    """Whether this is an array, a tensor or a table with rows."""
    return len(getattr(value, "shape", ())) > 0 and hasattr(value, "__getitem__")


def _is_pair_of_arrays(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(_is_rows(leaf) for leaf in _leaves(data[0]))


def _leaves(inputs: Any) -> list[Any]:
    if isinstance(inputs, Mapping):
        return [leaf for value in inputs.values() for leaf in _leaves(value)]
    if isinstance(inputs, tuple | list):
        return [leaf for value in inputs for leaf in _leaves(value)]
    return [inputs]


def _sliced(inputs: Any, rows: slice) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _sliced(value, rows) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_sliced(value, rows) for value in inputs)
    return inputs[rows]


def _in_order(loader: Any) -> Any:
    """The same loader, reading its data set from first to last where it would shuffle: so rows have numbers to go by."""
    sampler, kind = type(getattr(loader, "sampler", None)).__name__, type(loader)
    if kind.__module__ != "torch.utils.data.dataloader":  # one of the user's own may do more than load
        return loader
    if sampler not in ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler") or loader.batch_size is None:
        return loader
    from torch.utils.data import DataLoader, Subset

    few = sampler == "SubsetRandomSampler"
    dataset = Subset(loader.dataset, sorted(loader.sampler.indices)) if few else loader.dataset
    kept = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
    )
    return DataLoader(dataset, loader.batch_size, **{name: getattr(loader, name) for name in kept})


def _count(loader: Any) -> int | None:
    """Samples of a loader that knows."""
    known = getattr(loader, "dataset", None)
    if isinstance(known, Sized) and not getattr(loader, "drop_last", False):
        sampler = getattr(loader, "sampler", None)
        return len(sampler) if isinstance(sampler, Sized) else len(known)
    return None


def _hashable(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A matrix of plain numbers, with a row for each sample; names as digests of their text."""
    if leaf.dtype.kind not in "biufc":
        texts = [hashlib.sha256(repr(row).encode()).digest() for row in leaf.tolist()]
        return np.frombuffer(b"".join(texts), np.uint8).reshape(len(leaf), -1)
    return leaf.reshape(len(leaf), math.prod(leaf.shape[1:]))


class DataHash:
    """A running fingerprint of samples and labels: the same however the samples are cut into batches."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def update(self, batch: Batch) -> None:
        """Add a batch."""
        for name, leaf in [*enumerate(_leaves(batch.inputs)), ("labels", batch.labels)]:
            if leaf is not None:
                rows = _hashable(as_array(leaf, "inputs"))
                running = self._hashes.setdefault(f"{name} {rows.dtype.str} {rows.shape[1]}", hashlib.sha256())
                running.update(rows[:, :: -(-rows.shape[1] // HASHED) or 1].tobytes())

    def hexdigest(self) -> str:
        """The fingerprint so far."""
        whole = hashlib.sha256()
        for name, running in sorted(self._hashes.items()):
            whole.update(f"{name} {running.hexdigest()}".encode())
        return whole.hexdigest()
