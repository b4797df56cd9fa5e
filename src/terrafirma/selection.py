"""The choice among hyperparameters, one for all scores: by a metric on validation data, and on nothing else.

Implements a:algo. What is compared are whole candidates; how each came by its unreliability is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt

from terrafirma import metrics
from terrafirma.core._checks import check_metric_value
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

__all__ = ["Choice", "Metric", "choose", "metric_function"]

LOWER_IS_BETTER = (metrics.aurc, metrics.e_aurc, metrics.augrc, metrics.fpr_at_tpr)
Metric = Callable[..., float]
T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """The best candidate, and the metric of each in turn."""

    best: T
    metrics: list[float]


def choose(
    candidates: Iterable[tuple[T, FloatArray, npt.NDArray[Any]]],
    metric: str | Metric = "aucea",
    thresholds: int | None = None,
) -> Choice[T]:
    """The candidate whose unreliability ranks the validation errors best; of equals, the first.

    ``candidates`` are anything, its unreliability and the errors to rank; only the best so far is kept.
    """
    measure = metric_function(metric, thresholds)
    best: list[T] = []
    found: list[float] = []
    for candidate, unreliability, errors in candidates:
        value = measure(unreliability, errors)
        if not found or value > max(found):
            best = [candidate]
        found.append(value)
    return Choice(best[0], found)


def metric_function(metric: str | Metric, thresholds: int | None) -> Callable[[FloatArray, npt.NDArray[Any]], float]:
    """A function of (unreliability, errors) that grows with quality, for a name or a function of the user's."""
    if callable(metric):
        if metric in LOWER_IS_BETTER:
            raise InvalidInput(
                f"metric must grow with quality. Got {metric.__name__}, which falls; "
                f"use lambda u, e: -metrics.{metric.__name__}(u, e)."
            )
        if thresholds is not None:
            raise InvalidInput("thresholds belongs to the named metrics. Got it with a function; leave it out.")
        return lambda unreliability, errors: check_metric_value(_called(metric, unreliability, errors))
    named: dict[str, Metric] = {"aucea": metrics.aucea, "auroc": metrics.auroc}
    if not isinstance(metric, str) or metric not in named:
        raise InvalidInput(f"metric must be 'aucea', 'auroc' or a function. Got {metric!r}.")
    function = named[metric]
    return lambda unreliability, errors: function(unreliability, errors, thresholds=thresholds)


def _called(metric: Metric, unreliability: FloatArray, errors: FloatArray) -> Any:
    try:
        return metric(unreliability, errors)
    except Exception as error:
        error.add_note("select calls metric(unreliability, errors), in this order; wrap functions that take another.")
        raise
