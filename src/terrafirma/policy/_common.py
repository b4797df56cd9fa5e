"""What the policies share: checks of their input, and how they are stored."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy.typing as npt

from terrafirma import storage
from terrafirma.core._checks import check_errors, check_scores
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import BadFile

__all__ = ["Arrays", "Settings", "Stored", "scores_and_errors"]

REMEDY = "the unreliability comes first; for a classifier's errors use prediction != label"
Arrays = Mapping[str, npt.NDArray[Any]]
Settings = Mapping[str, Any]


class Stored(ABC):
    """Saved as arrays and settings in one file, never by pickle."""

    @abstractmethod
    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """What ``from_arrays`` takes: named arrays, and settings that JSON holds."""

    @classmethod
    @abstractmethod
    def from_arrays(cls, arrays: Arrays, settings: Settings) -> Self:
        """The object that ``to_arrays`` took apart; all of it is checked again."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file (safetensors with a JSON header)."""
        storage.write_arrays(path, type(self).__name__, *self.to_arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote; it decides as before, to the last bit."""
        arrays, settings = storage.read_arrays(path, cls.__name__)
        try:
            return cls.from_arrays(arrays, settings)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise BadFile(f"{path} does not hold a whole {cls.__name__} ({error!r:.200}). Save it again.") from error


def scores_and_errors(unreliability: Any, errors: Any) -> tuple[FloatArray, FloatArray]:
    """Both as float64 (n,), checked."""
    u = check_scores(unreliability)
    return u, check_errors(errors, len(u), remedy=REMEDY)
