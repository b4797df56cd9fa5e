"""What a capture has so far, on disk: a capture that was killed goes on where it stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from terrafirma import storage
from terrafirma.capture.growing import GrowingArrays
from terrafirma.errors import InvalidInput

__all__ = ["Parts", "Widths"]

KIND = "part of a Recorded"
SECONDS = 2.0  # between parts: a kill loses no more than this, or one batch
Arrays = dict[str, npt.NDArray[Any]]
Widths = tuple[
    str, int | None, int | None
]  # a layer's name, the width of its pattern and of its features, if they are kept
DIGITS = 12  # of a row's number in a file's name


class Parts:
    """A folder beside the file to be, with one file for every few seconds of work.

    Parameters
    ----------
    folder : Path
    settings : dict
        What is captured from which network; parts of another capture are refused.

    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self._data_fingerprint = ""
        self._written = 0
        self._last = time.monotonic()

    @classmethod
    def beside(cls, path: Path, settings: dict[str, Any]) -> Parts:
        """The parts of a file that does not exist yet."""
        if path.exists():
            raise InvalidInput(f"path must not exist yet. Got {path}; read it with Recorded.load, or delete it.")
        if not path.parent.is_dir():
            raise InvalidInput(f"path must lie in a folder that exists. Got {path}.")
        return cls(path.with_name(path.name + ".parts"), settings)

    def restore(self, grown: GrowingArrays, complete: Callable[[Arrays], Arrays]) -> list[Widths]:
        """Give back what an earlier run got: the rows, and names and widths of their layers.

        ``complete`` adds the errors, which parts leave out: a function that finds them has no fingerprint.
        """
        layers: list[Widths] = []
        for file in sorted(self.folder.glob("*.safetensors")):
            arrays, about = storage.read_arrays(file, KIND)
            if about["settings"] != self.settings or about["first"] != grown.n:
                raise InvalidInput(
                    f"{self.folder} must hold parts of this very capture. It was begun with another network, other layers or "
                    "other settings; delete the folder to start anew."
                )
            grown.add(about["rows"], complete(arrays))
            layers = [(name, pattern, features) for name, pattern, features in about["layers"]]
            self._data_fingerprint = about["data_fingerprint"]
        self._written = grown.n
        return layers

    def check_data(self, data_fingerprint: str) -> None:
        """Raise unless the first rows of the data are those that were restored."""
        if data_fingerprint != self._data_fingerprint:
            raise self.other_data()

    def other_data(self) -> InvalidInput:
        """The error for data that is not what the parts were made of."""
        return InvalidInput(
            f"{self.folder} must hold parts of these very data. It was begun with other samples, another order or "
            "other batches; delete the folder to start anew."
        )

    def keep(self, grown: GrowingArrays, layers: list[Widths], data_fingerprint: str) -> None:
        """Write the rows that are new, when it is time."""
        if time.monotonic() - self._last < SECONDS:
            return
        about = {
            "settings": self.settings,
            "first": self._written,
            "rows": grown.n - self._written,
            "layers": layers,
            "data_fingerprint": data_fingerprint,
        }
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{self._written:0{DIGITS}d}.safetensors"
        arrays = {name: rows for name, rows in grown.rows(self._written).items() if name != "errors"}
        storage.write_arrays(file, KIND, arrays, about)
        self._written = grown.n
        self._last = time.monotonic()

    def remove(self) -> None:
        """Delete the parts, once the whole is written."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
