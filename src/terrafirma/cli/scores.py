"""The verdict on each sample of a file, part by part, and the files that they are written to."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.capture.batches import Batches
from terrafirma.capture.progress import progress_bar
from terrafirma.cli.output import plain
from terrafirma.cli.samples import Samples
from terrafirma.errors import InvalidInput, require
from terrafirma.recorded import Recorded
from terrafirma.storage import replacing

if TYPE_CHECKING:
    from terrafirma.guard.guard import Guard
    from terrafirma.guard.verdict import Verdict

__all__ = ["Scores", "check_ending", "records", "write"]

BATCHES = 64  # scored at a time: all that is in memory, beside one batch of inputs, are their patterns and outputs
ROWS = 8192  # the same, of a recording
Columns = dict[str, npt.NDArray[Any]]


class Scores:
    """Columns of verdicts, a part at a time and in the order of the samples; afterwards, how many were accepted."""

    def __init__(self, guard: Guard, data: Samples | Recorded) -> None:
        self.guard, self.data = guard, data
        self.n_accepted = 0

    def __iter__(self) -> Iterator[Columns]:
        self.n_accepted = first = 0
        ids = None if isinstance(self.data, Recorded) else self.data.ids
        with progress_bar("scoring", len(self.data)) as advance:
            for verdict in self._verdicts():
                self.n_accepted += int(verdict.accepted.sum())
                yield _columns(verdict, first, ids)
                first += len(verdict)
                advance(len(verdict))

    def _verdicts(self) -> Iterator[Verdict]:
        if isinstance(self.data, Recorded):
            for first in range(0, len(self.data), ROWS):
                yield self.guard.predict(self.data[first : first + ROWS])
            return
        stream, seen = iter(self.data), 0
        while seen < len(self.data):
            verdict = self.guard.predict(Batches(islice(stream, BATCHES), None))
            seen += len(verdict)
            yield verdict


def _columns(verdict: Verdict, first: int, ids: npt.NDArray[Any] | None) -> Columns:
    rows = np.arange(first, first + len(verdict))
    prediction = np.asarray(verdict.prediction).reshape(len(rows), -1)
    many = prediction.shape[1] > 1
    return {
        "row": rows,
        **({} if ids is None else {"id": ids[rows]}),
        **{f"prediction_{j}" if many else "prediction": prediction[:, j] for j in range(prediction.shape[1])},
        "unreliability": verdict.unreliability,
        "error_probability": verdict.error_probability,
        "accepted": verdict.accepted,
    }


def check_ending(path: Path) -> None:
    """Raise unless there is a format for files of this name."""
    if path.suffix not in WRITERS:
        raise InvalidInput(f"A file of scores must end in {', '.join(WRITERS)}. Got {path}; rename it.")
    if path.suffix == ".parquet":
        require("pyarrow", extra="parquet")


def write(path: Path, parts: Iterable[Columns]) -> None:
    """Write columns to a file, as they come; it is there as a whole, or not at all."""
    check_ending(path)
    with replacing(path) as temporary:
        WRITERS[path.suffix](temporary, parts)


def _write_parquet(path: Path, parts: Iterable[Columns]) -> None:
    pyarrow, parquet = require("pyarrow", extra="parquet"), require("pyarrow.parquet", extra="parquet")
    with contextlib.ExitStack() as stack:
        writer = None
        for columns in parts:
            table = pyarrow.table(columns)
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def _write_csv(path: Path, parts: Iterable[Columns]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, columns in enumerate(parts):
            if number == 0:
                writer.writerow(columns)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def _write_json(path: Path, parts: Iterable[Columns]) -> None:
    """One array of objects, a line for each."""
    with path.open("w", encoding="utf-8") as file:
        before = "[\n"
        for columns in parts:
            for record in records(columns):
                file.write(f"{before}{json.dumps(record, allow_nan=False)}")
                before = ",\n"
        file.write("\n]\n")


def records(columns: Columns) -> Iterator[dict[str, Any]]:
    """The rows as JSON knows them."""
    for values in zip(*(column.tolist() for column in columns.values()), strict=True):
        yield plain(dict(zip(columns, values, strict=True)))


WRITERS = {".parquet": _write_parquet, ".csv": _write_csv, ".json": _write_json}
