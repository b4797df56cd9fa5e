"""The subfunction bound with rho and delta chosen on validation data.

Implements a:algo. Distances do not depend on rho and delta: each pair is compared for the whole grid, not for each setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array, check_delta, check_errors
from terrafirma.core._threads import row_ranges
from terrafirma.core.bound import KernelSums, Smoother, bound_terms, log_relative_bound
from terrafirma.core.normalizers import Normalizers, normalize
from terrafirma.core.patterns import FloatArray, PackedPatterns, as_patterns
from terrafirma.core.regions import RegionTable
from terrafirma.core.sums import CHUNK_BYTES, distance_histograms
from terrafirma.core.weighting import Gaussian
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score
from terrafirma.scores.subfunction import SubfunctionBound, training_table
from terrafirma.selection import Metric, choose, metric_function

__all__ = ["DELTAS", "Selection", "Subfunction", "default_rhos", "select", "select_for"]

DELTAS = (0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # the paper's grid
N_RHOS = 9
RHO_ROWS = 1000  # validation rows whose distances set the default grid


@dataclass(frozen=True, eq=False)
class Selection:
    """The outcome of a search.

    Attributes
    ----------
    best : SubfunctionBound
        Fitted, with the best rho and delta.
    table : record array
        One row for each (rho, delta), in the order of the search, with fields ``rho``, ``delta`` and ``metric``.
    chance : float, optional
        The metric of a random order, for the metrics that go by name: what the best must beat to be worth anything.

    """

    best: SubfunctionBound
    table: np.recarray[Any, Any]
    chance: float | None = None

    @property
    def metric(self) -> float:
        """The validation metric of the best."""
        return float(self.table.metric.max())

    def __repr__(self) -> str:
        chance = "" if self.chance is None else f" (a random order: {self.chance:.4f})"
        return f"<Selection best={self.best!r}, metric {self.metric:.4f}{chance}, {len(self.table)} settings tried>"


class Subfunction(Score):
    """The log of the bound on the smooth error, as a score of recordings.

    ``rho`` and ``delta`` that are given are kept. ``bound_`` is the fitted ``SubfunctionBound``, ``selection_`` the search.
    """

    name: ClassVar[str] = "subfunction"
    paper: ClassVar[str] = "Ji et al., CoLLAs 2022"
    cost: ClassVar[str] = "fit a scan of wrong x all regions; a query a scan of the regions"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rho": (), "delta": DELTAS}
    needs = frozenset({"patterns", "errors"})
    bound_: SubfunctionBound
    selection_: Selection | None

    def __init__(self, rho: float | None = None, delta: float | None = None) -> None:
        self.rho = rho
        self.delta = delta

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        if self.rho is not None:
            Gaussian(self.rho)
        if self.delta is not None:
            check_delta(self.delta)

    def fit(self, train: Recorded, validation: Recorded | None = None) -> Self:
        """Learn the populated regions; choose rho and delta on validation data."""
        self.check()
        self.check_needs(train, "train", self.needs)
        table = training_table(train.patterns, train.errors)
        if self.rho is not None and self.delta is not None:
            selection, bound = None, SubfunctionBound(self.rho, self.delta).fit_table(table)
        elif validation is None:
            raise InvalidInput(
                "validation must be given to choose rho and delta. Got none; or give both, as in "
                "get('subfunction', rho=16.0, delta=0.001)."
            )
        else:
            self.check_needs(validation, "validation", self.needs)
            rhos, deltas = ([value] if value is not None else None for value in (self.rho, self.delta))
            selection = select_for(table, validation.patterns, validation.errors, rhos, deltas)
            bound = selection.best
        self.selection_, self.bound_ = selection, bound
        self.settings_ = {"rho": bound.rho, "delta": bound.delta}
        return self

    def learns_on(self, validation: Recorded) -> bool:
        """Whether there is anything to choose."""
        return self.rho is None or self.delta is None

    def score(self, recorded: Recorded) -> FloatArray:
        """The log of the bound."""
        return self.bound_.unreliability(recorded.patterns)

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that a file needs: that of the fitted bound."""
        self.check_fitted("save")
        arrays, settings = self.bound_.to_arrays()
        return arrays, {"name": self.name, "parameters": self.parameters(), "bound": settings}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any], model: Any = None
    ) -> Self:
        """A fitted score of what ``to_arrays`` gave; without the search."""
        score = cls(**settings["parameters"])
        score.bound_ = SubfunctionBound.from_arrays(arrays, settings["bound"])
        score.selection_ = None
        score.settings_ = {"rho": score.bound_.rho, "delta": score.bound_.delta}
        return score


def select(
    X_train: Any,
    errors_train: Any,
    X_val: Any,
    errors_val: Any,
    rhos: Sequence[float] | None = None,
    deltas: Sequence[float] | None = None,
    metric: str | Metric = "aucea",
    thresholds: int | None = None,
) -> Selection:
    """Fit on training data for the rho and delta that rank the validation errors best.

    Parameters
    ----------
    X_train, X_val : array (n, M) or PackedPatterns
    errors_train, errors_val : array (n,)
        Errors in [0, 1].
    rhos : sequence of float, optional
        By default nine from the median nearest to the median distance of validation to training patterns; where the
        smallest of these wins, also narrower ones down to one bit.
    deltas : sequence of float, optional
        By default the paper's eleven.
    metric : "aucea", "auroc" or a function of (unreliability, errors), higher = better
    thresholds : int, optional
        1000 for the metric as published; exact by default.

    Of equal entries the first one wins. Out-of-distribution data has no place here.

    """
    metric_function(metric, thresholds)  # rather now than after the work
    table = training_table(X_train, errors_train, "_train")
    return select_for(table, X_val, errors_val, rhos, deltas, metric, thresholds)


def select_for(
    table: RegionTable,
    X_val: Any,
    errors_val: Any,
    rhos: Sequence[float] | None = None,
    deltas: Sequence[float] | None = None,
    metric: str | Metric = "aucea",
    thresholds: int | None = None,
) -> Selection:
    """``select`` for training data that is a table already."""
    measure = metric_function(metric, thresholds)
    val = as_patterns(X_val, n_units=table.n_units, name="X_val")
    errors = check_errors(errors_val, len(val), name="errors_val")
    errors.setflags(write=False)  # a metric of the user's must not change what the next setting sees
    if len(val) == 0:
        raise InvalidInput("X_val must have at least one row to select on. Got none.")
    rhos = None if rhos is None else _grid("rhos", rhos)
    deltas = DELTAS if deltas is None else _grid("deltas", deltas)
    for delta in deltas:
        check_delta(delta)

    ranked = log_relative_bound if isinstance(metric, str) else _log_bound
    tried: list[_Setting] = []

    def candidates(widths: Sequence[float]) -> Iterator[tuple[_Setting, FloatArray, FloatArray]]:
        """All settings of these widths, summed together."""
        weightings = [Gaussian(rho) for rho in widths]
        norms = normalize(table, weightings)
        sums = Smoother.prepare(table, weightings, norms).sums(val)
        for rho, norm, at_rho in zip(widths, norms, sums, strict=True):
            for delta in deltas:
                tried.append(_Setting(rho, delta, norm))
                yield tried[-1], ranked(at_rho, delta, table.n_samples), errors

    best, values = choose(candidates(default_rhos(val, table) if rhos is None else rhos), metric, thresholds)
    # the edge has won: look beyond it
    if rhos is None and 1 < best.rho == tried[0].rho:
        narrower = choose(candidates(_narrower(best.rho)), metric, thresholds)
        best = narrower.best if max(narrower.metrics) > max(values) else best
        values += narrower.metrics
    rows = [(setting.rho, setting.delta, value) for setting, value in zip(tried, values, strict=True)]
    grid = np.rec.array(rows, dtype=[(name, np.float64) for name in ("rho", "delta", "metric")])
    chance = measure(np.zeros(len(val)), errors) if isinstance(metric, str) and thresholds is None else None
    return Selection(SubfunctionBound.from_parts(best.rho, best.delta, table, best.norm), grid, chance)


def _log_bound(sums: KernelSums, delta: float, N: int) -> FloatArray:
    return bound_terms(sums, delta, N).log_bound


class _Setting(NamedTuple):
    rho: float
    delta: float
    norm: Normalizers


def _narrower(rho: float) -> tuple[float, ...]:
    """Widths below ``rho`` down to one bit, each 1 / sqrt(2) of the one before."""
    steps = math.ceil(2 * math.log2(rho))
    return tuple(max(rho * 2 ** (-step / 2), 1.0) for step in range(1, steps + 1))


def default_rhos(val: PackedPatterns, table: RegionTable) -> tuple[float, ...]:
    """Nine widths in geometric steps, from the median nearest to the median distance of validation to training patterns.

    Distances of at most 1000 validation rows, evenly spaced, decide.
    """
    sample = val[:: -(-len(val) // RHO_ROWS)]
    nearest = np.empty(len(sample))
    by_distance = np.zeros(table.n_units + 1)
    for rows in row_ranges(len(sample), max(1, CHUNK_BYTES // by_distance.nbytes)):
        histograms = distance_histograms(sample[rows], table.panels, table.panel_counts)
        nearest[rows] = (histograms > 0).argmax(axis=1)
        by_distance += histograms.sum(axis=0)
    cumulated = np.cumsum(by_distance)
    median = np.searchsorted(cumulated, cumulated[-1] / 2)
    low = max(float(np.median(nearest)), 1.0)
    return tuple(np.geomspace(low, median, N_RHOS).tolist()) if median > low else (low,)


def _grid(name: str, values: Sequence[float]) -> tuple[Any, ...]:
    many = isinstance(values, Iterable) and getattr(values, "ndim", 1) > 0
    grid = tuple(as_array(list(values) if many else [values], name).ravel().tolist())
    if not grid:
        raise InvalidInput(f"{name} must have at least one value to try. Got none; leave it out for the default grid.")
    return grid
