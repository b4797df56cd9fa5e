"""What every score is: a few facts, what it learns, and a number for each sample.

A score sees nothing but ``Recorded``. Hyperparameters that are given are kept; those left at None are chosen among the
values of ``grid`` by AUCEA on the validation data's errors, by one function for all scores; of equals the first one wins,
which is the default of the score's paper.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from terrafirma import storage
from terrafirma.core._checks import as_array
from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import BadFile, InvalidInput, NotFitted
from terrafirma.recorded import Recorded
from terrafirma.selection import choose

__all__ = ["ROWS", "Score", "check_moves", "classes_of", "matrix_of"]

KIND = "Score"
ROWS = 2048  # samples scored at a time: what a score needs for them is all that it holds beside what it learned
ONLY_TO_LEARN = {"labels", "errors"}  # never of the samples to score
NOT_RECORDED = {"gradients"}  # needs of a network, not of a recording


class Score:
    """An unreliability of predictions: higher = less reliable.

    A subclass says what it is, stores its hyperparameters under their names in ``__init__``, and writes ``score`` and, where
    there is anything to learn, ``learn``. While these run, the value in use of each hyperparameter ``k`` of the grid is
    ``self.k_``; whatever ``learn`` sets ends in ``_``, too, and is all that a file holds: arrays, dicts of arrays, numbers,
    text.

    Class attributes
    ----------------
    name, paper : str
        What ``scores.get`` knows it by, and where it is from.
    needs : frozenset of str
        Fields of ``Recorded``; ``labels`` of the training data alone. ``gradients``: a network, ``model=``.
    cost : str
        What a fit and a query cost, in words.
    grid : dict of name to values
        Where to search for a hyperparameter; the first value is the paper's.

    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    needs: frozenset[str] = frozenset()
    helped_by: ClassVar[frozenset[str]] = frozenset()  # fields that it takes where they were recorded
    rows: int = ROWS
    uses_validation: ClassVar[bool] = False  # to learn, beside choosing hyperparameters
    settings_: dict[str, Any]

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        if getattr(self, "variant", None) not in (None, "published"):
            raise InvalidInput(
                "variant must be None (done right) or 'published' (as in the paper's numbers). "
                f"Got {vars(self)['variant']!r:.80}."
            )

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Learn, with the hyperparameters ``self.NAME_``."""

    def score(self, recorded: Recorded) -> FloatArray:
        """The unreliability of some samples, float64 (n,)."""
        raise NotImplementedError

    def trials(self, train: Recorded, validation: Recorded | None) -> Iterator[tuple[Self, FloatArray]]:
        """The score with each setting in turn, fitted, and its unreliability on the validation data, if there are several.

        One that can do all settings at once does so here.
        """
        settings = self.open_settings(train if validation is None else validation)
        for setting in settings:
            trial = self.with_setting(setting)
            trial.learn(train, validation)
            if validation is None or len(settings) == 1:
                yield trial, np.zeros(0)
            else:
                yield trial, trial.unreliability(validation)

    # ------------------------------------------------------------------------------------- what users call

    def fit(self, train: Recorded, validation: Recorded | None = None) -> Self:
        """Learn from what the network did on its training data; choose what was left open on validation data.

        Without validation data what was left open takes the value of the score's paper.
        """
        self.check()
        self.check_needs(train, "train", self.train_needs)
        if validation is not None:
            self.check_needs(validation, "validation", self.needs - ONLY_TO_LEARN)
        trials = self.trials(train, validation)
        if validation is None or len(self.open_settings(validation)) == 1:
            best, _ = next(trials)
        else:
            best = choose((trial, u, trial.selection_errors(validation)) for trial, u in trials).best
        for name in self._fitted():
            delattr(self, name)
        vars(self).update(best._fitted())
        return self

    def unreliability(self, recorded: Recorded) -> FloatArray:
        """One number for each sample, float64 (n,): higher = less reliable."""
        self.check_fitted("unreliability")
        self.check_needs(recorded, "recorded", self.needs - ONLY_TO_LEARN)
        ranges = row_ranges(len(recorded), self.rows)
        parts = [self.score(recorded[rows] if len(ranges) > 1 else recorded) for rows in ranges]
        found = np.concatenate([np.zeros(0), *map(np.ravel, parts)])
        if found.shape != (len(recorded),) or any(np.ndim(part) != 1 for part in parts):
            raise InvalidInput(
                f"The score {self.name} must return one number for each of the {len(recorded)} samples. Got shape "
                f"{np.shape(parts[0])}; return an array (n,)."
            )
        if not np.isfinite(found).all():
            row = int(np.argmin(np.isfinite(found)))
            raise InvalidInput(
                f"The score {self.name} must be a finite number. Got {found[row]} in row {row}; look for an overflow in what "
                "was recorded."
            )
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted score to a file (safetensors with a JSON header); ``terrafirma.scores.load`` reads it."""
        storage.write_arrays(path, KIND, *self.to_arrays())

    # ------------------------------------------------------------------------------------------- for guards

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that a file needs: arrays, and settings that JSON holds."""
        self.check_fitted("save")
        arrays: dict[str, npt.NDArray[Any]] = {}
        learned: dict[str, Any] = {}
        for name, value in self._fitted().items():
            if isinstance(value, np.ndarray):
                arrays[name] = value
            elif isinstance(value, Mapping) and value and all(isinstance(part, np.ndarray) for part in value.values()):
                arrays |= {f"{name}/{key}": part for key, part in value.items()}
            else:
                learned[name] = self._plain(name, value)
        # the network is code, which no file of ours holds
        given = {name: self._plain(name, value) for name, value in self.parameters().items() if name != "model"}
        about = {"name": self.name, "parameters": given, "learned": learned}
        return arrays, about | {"with_model": getattr(self, "model", None) is not None}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any], model: Any = None
    ) -> Self:
        """A fitted score of what ``to_arrays`` gave; ``model``: the network, where it was given one."""
        parameters = dict(settings["parameters"])
        if settings["with_model"] and model is None:
            raise InvalidInput(
                f"The score {cls.name} must be given the network that it takes gradients of. Load it with model=."
            )
        score = cls(**parameters | ({"model": model} if settings["with_model"] else {}))
        score.check()
        vars(score).update(settings["learned"])
        for name, value in arrays.items():
            own, nested, key = name.partition("/")
            if not own.endswith("_"):
                raise BadFile(f"The score {cls.name} learns nothing called {own!r:.80}. Save it again.")
            if nested:
                vars(score).setdefault(own, {})[key] = value
            else:
                setattr(score, own, value)
        return score

    def unfitted(self) -> Self:
        """A copy that has learned nothing."""
        return type(self)(**self.parameters())

    @classmethod
    def parameter_names(cls) -> list[str]:
        """What ``__init__`` takes."""
        return [name for name in inspect.signature(cls).parameters if name != "self"]

    def parameters(self) -> dict[str, Any]:
        """The hyperparameters as they were given."""
        return {name: getattr(self, name) for name in self.parameter_names()}

    # ---------------------------------------------------------------------------------------- for subclasses

    def open_settings(self, recorded: Recorded) -> list[dict[str, Any]]:  # a grid may depend on it
        """Every combination of the grid's values for what was left open; at least one."""
        names = list(self.grid)
        values = [self.grid[name] if getattr(self, name) is None else (getattr(self, name),) for name in names]
        return [dict(zip(names, setting, strict=True)) for setting in itertools.product(*values)]

    def with_setting(self, setting: Mapping[str, Any]) -> Self:
        """A copy that has learned nothing and uses these values."""
        trial = copy.copy(self)
        for name in trial._fitted():
            delattr(trial, name)
        for name, value in setting.items():
            setattr(trial, f"{name}_", value)
        trial.settings_ = dict(setting)
        return trial

    def check_fitted(self, method: str) -> None:
        """Raise unless ``fit`` was called."""
        if not hasattr(self, "settings_"):
            raise NotFitted(f"The score {self.name} is not fitted. Call fit(train, validation) before {method}.")

    def check_needs(self, recorded: Any, role: str, fields: frozenset[str]) -> None:
        """Raise unless this is a recording with these fields; ``role`` is what the caller calls it."""
        if not isinstance(recorded, Recorded):
            raise InvalidInput(
                f"{role} must be a Recorded, as terrafirma.record gives. Got {type(recorded).__name__}; "
                "for arrays use Recorded(outputs=..., features=..., labels=...)."
            )
        if role != "recorded" and not len(recorded):
            raise InvalidInput(f"{role} must have at least one sample. Got none.")
        if fields - NOT_RECORDED:
            recorded.need(*sorted(fields - NOT_RECORDED), by=f"The score {self.name}")

    def selection_errors(self, validation: Recorded) -> FloatArray:
        """The errors that hyperparameters are chosen by."""
        errors: FloatArray = validation.need(
            "errors", by=f"Choosing {' and '.join(self.grid)} of the score {self.name}"
        )
        return errors

    def _fitted(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name.endswith("_")}

    @property
    def train_needs(self) -> frozenset[str]:
        """What it needs of the training data: nothing, if it learns nothing."""
        return frozenset() if type(self).learn is Score.learn else self.needs

    def learns_on(self, validation: Recorded) -> bool:
        """Whether validation data changes it: there is something to choose, or to learn."""
        return self.uses_validation or len(self.open_settings(validation)) > 1

    @property
    def dropouts(self) -> tuple[float, ...]:
        """The dropout probabilities whose stochastic passes it needs; of a fitted score, the one in use."""
        return ()

    def _plain(self, name: str, value: Any) -> Any:
        """A value as JSON holds it."""
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return {str(key): self._plain(name, part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(name, part) for part in value]
        if isinstance(value, bool | int | float | str | None):
            return value
        raise InvalidInput(
            f"The score {self.name} must hold arrays, dicts of arrays, numbers, text and lists of these to be saved. "
            f"Got {name}, a {type(value).__name__}; make it one of them."
        )

    @property
    def label(self) -> str:
        """The name, and the hyperparameters that were given other values than by default."""
        defaults = {name: _shown(value.default) for name, value in inspect.signature(type(self)).parameters.items()}
        given = {name: _shown(value) for name, value in self.parameters().items()}
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value != defaults[name])
        return f"{self.name}({shown})" if shown else self.name

    def __repr__(self) -> str:
        chosen = {name: value for name, value in getattr(self, "settings_", {}).items() if getattr(self, name) is None}
        fitted = f" fitted{''.join(f', {name} {value}' for name, value in chosen.items())}"
        return f"<score {self.label}{fitted if hasattr(self, 'settings_') else ''}>"


def _shown(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return repr(value) if isinstance(value, str | int | float | bool | tuple | list | None) else type(value).__name__


def check_moves(name: str, epsilon: float | None, model: Any) -> None:
    """Raise where inputs are to be moved and there is no network to say where to."""
    if epsilon and model is None:
        raise InvalidInput(
            f"epsilon moves inputs along gradients, for which the score {name} needs the torch module. Got epsilon {epsilon} "
            "alone; give model=, too."
        )


def matrix_of(recorded: Recorded, field: str, by: str, width: int | None = None) -> npt.NDArray[Any]:
    """A field as a matrix of finite floats (n, units), axes beyond the second flattened; float32 stays as it is."""
    values = as_array(recorded.need(field, by=by), field)
    if values.dtype.kind not in "biuf" or values.ndim < 2:
        raise InvalidInput(
            f"{field} must be numbers of shape (n, units). Got {values.dtype} of shape {values.shape}; {by} needs a matrix."
        )
    values = values.reshape(len(values), -1)
    if not values.shape[1]:
        raise InvalidInput(f"{field} must have at least one column. Got none; {by} needs some.")
    values = values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)
    if width is not None and values.shape[1] != width:
        raise InvalidInput(
            f"{field} must have {width} columns, as the training data. Got {values.shape[1]}; record both alike."
        )
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise InvalidInput(
            f"{field} must be finite. Got NaN or infinity in row {int(np.argmin(finite))}; look for an overflow in the network."
        )
    return values


def classes_of(train: Recorded, by: str, width: int | None = None) -> npt.NDArray[np.int64]:
    """The labels of training data, as classes from 0; a class may be absent. ``width``: how many there are, if that matters."""
    labels = as_array(train.need("labels", by=by), "labels")
    if labels.ndim != 1 or labels.dtype.kind not in "biu" or (len(labels) and labels.min() < 0):
        raise InvalidInput(
            f"labels must be classes from 0, one for each sample. Got {labels.dtype} of shape {labels.shape}; "
            f"{by} needs classes."
        )
    if width is not None and len(labels) and labels.max() >= width:
        raise InvalidInput(
            f"labels must be below {width}, the number of outputs. Got {labels.max()} in row {int(labels.argmax())}; "
            "number them as in training."
        )
    return labels.astype(np.int64)
