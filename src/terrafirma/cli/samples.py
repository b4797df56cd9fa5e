"""Samples in files, read a batch at a time: ``.npz``, ``.npy``, ``.parquet``, and recordings (``.safetensors``)."""

from __future__ import annotations

import contextlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from terrafirma.capture.batches import Batch, Batches
from terrafirma.errors import BadFile, InvalidInput, TerrafirmaError, require
from terrafirma.recorded import Recorded

__all__ = ["IDS", "INPUTS", "LABELS", "Samples", "read_samples", "take"]

INPUTS = ("X", "x", "inputs", "images", "data")
LABELS = ("y", "labels", "label", "targets", "target")
IDS = ("id", "ids", "index", "__index_level_0__")  # the last is what pandas calls its index
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Samples(Batches):
    """Batches of a file, to go through as often as needed, and the id of each sample where the file has them."""

    ids: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return self.n_samples or 0


def read_samples(path: Path, batch_size: int, *, labelled: bool) -> Samples | Recorded:
    """The samples of a file, with labels or without; only names and shapes are read now, and ids."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give the path of a file of samples.")
    if path.suffix == ".safetensors":
        recorded = Recorded.load(path)
        if not len(recorded):
            raise InvalidInput(f"{path} must hold at least one sample. Got none.")
        return recorded
    if path.suffix not in TABLES:
        raise InvalidInput(
            f"A file of samples must end in {', '.join(TABLES)} or .safetensors. Got {path}; save it as one."
        )
    table = TABLES[path.suffix](path)
    inputs, labels = _inputs(path, table), _labels(path, table) if labelled else None
    id_name = next((name for name in IDS if name in table.rows), None)
    rows = {name: table.rows[name] for name in (*inputs, labels, id_name) if name is not None}
    n = rows[inputs[0]]
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in rows.items())
        raise InvalidInput(f"{path} must hold one row for each sample in every array. Got {shown}; pair them anew.")
    if not n:
        raise InvalidInput(f"{path} must hold at least one sample. Got none.")
    ids = None
    if id_name is not None:
        ids = np.concatenate([chunk[id_name] for chunk in table.chunks([id_name], 65_536)])
    return Samples(_Source(table, inputs, labels, batch_size), n, ids)


def take(samples: Samples | Recorded, rows: Sequence[int]) -> Any:
    """The inputs of some samples, in this order."""
    for row in rows:
        if not 0 <= row < len(samples):
            raise InvalidInput(f"row must lie in 0 to {len(samples) - 1}. Got {row}; rows count from 0.")
    if isinstance(samples, Recorded):
        return samples[np.array(rows)]
    found: dict[int, Any] = {}
    first = 0
    for batch in samples:
        here = [row for row in rows if first <= row < first + batch.n]
        found |= {row: _pick(batch.inputs, row - first) for row in here}
        first += batch.n
        if len(found) == len(set(rows)):
            break
    parts = [found[row] for row in rows]
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)


def _pick(inputs: Any, row: int) -> Any:
    if isinstance(inputs, dict):
        return {name: _pick(array, row) for name, array in inputs.items()}
    return inputs[row : row + 1]


def _labels(path: Path, table: _Table) -> str:
    """The name of the labels."""
    found = [name for name in LABELS if name in table.rows]
    if len(found) != 1:
        raise InvalidInput(
            f"{path} must hold labels under one of the names {', '.join(LABELS)}. Got {', '.join(table.rows)}; rename them."
        )
    return found[0]


def _inputs(path: Path, table: _Table) -> list[str]:
    """The names of the inputs: all but labels and ids."""
    found = [name for name in table.rows if name not in LABELS + IDS]
    if not found:
        raise InvalidInput(
            f"{path} must hold inputs, under one of the names {', '.join(INPUTS)} or those of the network's inputs. "
            f"Got {', '.join(table.rows) or 'no array'}; add them."
        )
    return found


@dataclass(frozen=True)
class _Source:
    """The batches of a table; it starts anew each time."""

    table: _Table
    inputs: list[str]
    labels: str | None
    batch_size: int

    def __iter__(self) -> Iterator[Batch]:
        alone = self.inputs[0] if len(self.inputs) == 1 and self.inputs[0] in INPUTS else None
        names = self.inputs if self.labels is None else [*self.inputs, self.labels]
        for chunk in self.table.chunks(names, self.batch_size):
            labels = None if self.labels is None else chunk[self.labels]
            inputs = chunk[alone] if alone else {name: chunk[name] for name in self.inputs}
            yield Batch(inputs, labels, len(chunk[self.inputs[0]]))


class _Table(Protocol):
    """A file of named arrays; ``rows`` has the number of rows of each."""

    rows: dict[str, int]

    def chunks(self, names: Sequence[str], rows: int) -> Iterator[Arrays]:
        """The rows of some arrays, so many at a time."""
        ...


class _Npz:
    """Arrays in a zip, which cannot be mapped into memory: read as streams, side by side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {}
        with _whole(path), zipfile.ZipFile(path) as file:
            for name in file.namelist():
                with file.open(name) as stream:
                    self.rows[name.removesuffix(".npy")] = _header(path, name, stream)[0][0]

    def chunks(self, names: Sequence[str], rows: int) -> Iterator[Arrays]:
        with _whole(self.path), zipfile.ZipFile(self.path) as file, contextlib.ExitStack() as stack:
            streams = [stack.enter_context(file.open(f"{name}.npy")) for name in names]
            parts = [_rows(self.path, name, stream, rows) for name, stream in zip(names, streams, strict=True)]
            for arrays in zip(*parts, strict=True):
                yield dict(zip(names, arrays, strict=True))


class _Npy:
    """One array, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _whole(path), path.open("rb") as stream:
            self.rows = {INPUTS[0]: _header(path, INPUTS[0], stream)[0][0]}

    def chunks(self, names: Sequence[str], rows: int) -> Iterator[Arrays]:
        with _whole(self.path):
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        for first in range(0, len(array), rows):
            yield {names[0]: np.asarray(array[first : first + rows])}


class _Parquet:
    """A table whose inputs are one column of lists, or all columns of numbers but labels and ids."""

    INPUT: ClassVar[str] = INPUTS[0]

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            schema, n = file.schema_arrow, file.metadata.num_rows
        self.columns = [name for name in schema.names if name not in LABELS + IDS]
        for name in self.columns:
            if not _fits(schema.field(name).type, alone=len(self.columns) == 1):
                raise InvalidInput(
                    f"Inputs of {path} must be one column of lists of numbers, or columns of numbers. Got {name} of type "
                    f"{schema.field(name).type}; leave it out."
                )
        others = [name for name in schema.names if name not in self.columns]
        self.rows = dict.fromkeys([*([self.INPUT] if self.columns else []), *others], n)

    def chunks(self, names: Sequence[str], rows: int) -> Iterator[Arrays]:
        others = [name for name in names if name != self.INPUT]
        columns = self.columns if self.INPUT in names else []
        with self._open() as file:
            for part in file.iter_batches(rows, columns=[*columns, *others]):
                chunk = {name: _array(self.path, name, part.column(name)) for name in (*columns, *others)}
                inputs = [chunk.pop(name) for name in columns]
                if inputs:
                    chunk[self.INPUT] = inputs[0] if inputs[0].ndim > 1 else np.column_stack(inputs)
                yield chunk

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        parquet = require("pyarrow.parquet", extra="parquet")
        with _whole(self.path), parquet.ParquetFile(self.path, pre_buffer=False) as file:  # else all of it is in memory
            yield file


MALFORMED = (ValueError, TypeError, SyntaxError, tokenize.TokenError)  # what headers of arrays may be
TABLES: dict[str, type[_Npz | _Npy | _Parquet]] = {".npz": _Npz, ".npy": _Npy, ".parquet": _Parquet}


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Whatever a reader says of a file that is not whole becomes one error."""
    try:
        yield
    except TerrafirmaError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, *MALFORMED, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # one of the system's, not of what is in the file
            raise
        raise BadFile(
            f"{path} is not a whole {path.suffix} file ({error!s:.200}). It is truncated or of another kind; save it again."
        ) from error


def _header(path: Path, name: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and type of the array that begins here."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    sound = all(type(size) is int and size >= 0 for size in shape)
    if dtype.kind not in "biufUS" or not shape or not sound:
        raise InvalidInput(
            f"Arrays of {path} must be plain numbers or text, with a row for each sample. Got {name} of {dtype} and shape "
            f"{shape}; convert it, or leave it out."
        )
    return shape, fortran, dtype


def _rows(path: Path, name: str, stream: IO[bytes], rows: int) -> Iterator[npt.NDArray[Any]]:
    """The array in a stream, so many rows at a time."""
    shape, fortran, dtype = _header(path, name, stream)
    if fortran:  # its first row ends where the array does
        whole = np.ndarray(shape, dtype, stream.read(), order="F")
        yield from (whole[first : first + rows] for first in range(0, shape[0], rows))
        return
    for first in range(0, shape[0], rows):
        part = (min(rows, shape[0] - first), *shape[1:])
        size = math.prod(part) * dtype.itemsize
        data = stream.read(size)
        if len(data) < size:
            raise EOFError(f"{name} ends after {first} rows of {shape[0]}")
        yield np.ndarray(part, dtype, data)


def _fits(kind: Any, *, alone: bool) -> bool:
    """Whether a column of this type can be inputs."""
    types = require("pyarrow.types", extra="parquet")
    while alone and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _array(path: Path, name: str, column: Any) -> npt.NDArray[Any]:
    """A column as an array; one of lists has an axis more for each level."""
    shape = [len(column)]
    while True:
        if column.null_count:
            raise InvalidInput(
                f"{path} must have a value in every row. Got {column.null_count} nulls in {name}; fill them."
            )
        if not hasattr(column, "flatten") or not hasattr(column.type, "value_type"):
            return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
        lengths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise InvalidInput(
                f"Lists of {path} must be equally long. Got {lengths[0]} to {lengths[-1]} in {name}; pad them."
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
