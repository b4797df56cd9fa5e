"""Rows that arrive batch by batch, in one array that never exists twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.errors import InvalidInput

__all__ = ["GrowingArrays"]

START_BYTES = 64 << 20  # above the size from which the C library maps memory of its own for an array


class GrowingArrays:
    """Named arrays to which rows are added, all the same number at a time.

    Where the number of rows is known beforehand each array is made at once. Else it starts with more room than it may need,
    which costs nothing until it is written to, and grows by a thirty-second; so large an array is moved without a copy.
    """

    def __init__(self, expected: int | None = None) -> None:
        self.n = 0
        self._expected = expected
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def add(self, n: int, rows: dict[str, npt.NDArray[Any]]) -> None:
        """Add n rows to each array."""
        if self.n and rows.keys() != self._arrays.keys():
            raise InvalidInput(
                f"Every batch must bring the same parts. Got {', '.join(sorted(rows))} from row {self.n} on, and "
                f"{', '.join(sorted(self._arrays))} before; give labels with all batches or with none."
            )
        for name, values in rows.items():
            whole = self._room(name, values)
            if values.shape[1:] != whole.shape[1:]:
                raise InvalidInput(
                    f"{name} must have one shape in all batches. Got {values.shape[1:]} from row {self.n} on, and "
                    f"{whole.shape[1:]} before; pad the inputs to one size, or pool maps with reduce='any'."
                )
            if not np.can_cast(values.dtype, whole.dtype, "safe"):
                raise InvalidInput(
                    f"{name} must have one type in all batches. Got {values.dtype} from row {self.n} on, and {whole.dtype} "
                    "before; convert them."
                )
            whole[self.n : self.n + n] = values
        self.n += n

    def _room(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array of this name, with room for these rows."""
        needed = self.n + len(values)
        if name not in self._arrays:
            rows = self._expected or START_BYTES // max(1, values[:1].nbytes)
            self._arrays[name] = np.empty((max(rows, needed), *values.shape[1:]), values.dtype)
        array = self._arrays[name]
        if len(array) < needed:
            array.resize((max(needed, len(array) + len(array) // 32), *array.shape[1:]), refcheck=False)
        return array

    def rows(self, first: int) -> dict[str, npt.NDArray[Any]]:
        """The rows from ``first`` on."""
        return {name: array[first : self.n] for name, array in self._arrays.items()}

    def finish(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays, without the room that was not used."""
        for array in self._arrays.values():
            if len(array) > self.n:
                array.resize((self.n, *array.shape[1:]), refcheck=False)
        return self._arrays
