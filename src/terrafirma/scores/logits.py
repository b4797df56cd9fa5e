"""Scores of a classifier's outputs: the functions, and what the classes around them share.

Each function takes logits (n, C) and returns float64 (n,), higher = less reliable. Written so that saturated softmaxes do
not tie, up to gaps of 745 between logits: what is left beside the largest probability is summed from the other classes,
never as 1 - max.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array, check_share
from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import ROWS, Score, matrix_of
from terrafirma.scores.head import head_of

__all__ = [
    "LogitScore",
    "Odds",
    "PublishedLogitScore",
    "by_block",
    "check_logits",
    "entropy",
    "margin",
    "max_response",
    "published_softmax",
]

BLOCK = 512  # rows
LEAST = np.finfo(np.float64).min  # of the log of odds: finite, so that times 0 it is 0
REACT_VALUES = 1 << 24  # activations that decide where ReAct clips, from evenly spaced samples


class LogitScore(Score):
    """What scores of logits share: ReAct (Sun et al., NeurIPS 2021), which clips the last layer's features before its head.

    ``react``: the share of the training data's activations that stays as it is, 0.9 in the paper; None leaves all.
    """

    cost = "fit none; a query O(C)"
    needs = frozenset({"outputs"})
    rows = 1 << 20  # formulas take them block by block
    clip_: float
    head_weights_: FloatArray
    head_bias_: FloatArray

    def __init__(self, react: float | None = None) -> None:
        self.react = react
        if react is not None:
            self.needs = self.needs | {"features"}
            self.rows = ROWS  # for the product with the head

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """The unreliability of logits (n, C)."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.react is not None:
            check_share("react", self.react, "the share of activations that ReAct leaves as they are; 0.9 in its paper")

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find where to clip."""
        _warn_of_probabilities(train.outputs, self.name)
        if self.react is None:
            return
        features = matrix_of(train, "features", self.name)
        self.head_weights_, self.head_bias_ = head_of(train, self.name)
        step = -(-features.size // REACT_VALUES)
        self.clip_ = float(np.quantile(features[::step], self.react))

    def logits(self, recorded: Recorded) -> FloatArray:
        """The logits of some samples; with ReAct, those of the clipped features."""
        if self.react is None:
            outputs: FloatArray = recorded.need("outputs", by=f"The score {self.name}")
            return outputs  # checked where they are used
        features = matrix_of(recorded, "features", self.name, self.head_weights_.shape[1])
        return check_logits(np.minimum(features, self.clip_) @ self.head_weights_.T + self.head_bias_)

    def score(self, recorded: Recorded) -> FloatArray:
        """The unreliability of the logits."""
        return self.of_logits(self.logits(recorded))


class PublishedLogitScore(LogitScore):
    """A score of logits that the paper tabulates: ``variant="published"`` is how its numbers were made."""

    def __init__(self, variant: str | None = None, react: float | None = None) -> None:
        super().__init__(react)
        self.variant = variant


def max_response(logits: Any) -> FloatArray:
    """``1 - p_1``, the probability of all classes but the predicted one.

    >>> max_response([[100.0, 0.0], [50.0, 0.0]])
    array([3.72007598e-44, 1.92874985e-22])
    """

    def formula(values: FloatArray) -> FloatArray:
        odds = Odds.of(values)
        return np.asarray(odds.rest / (1 + odds.rest))

    return by_block(formula, logits)


def entropy(logits: Any) -> FloatArray:
    """``-sum p log p``.

    >>> entropy([[0.0, 0.0]])
    array([0.69314718])
    """

    def formula(values: FloatArray) -> FloatArray:
        odds = Odds.of(values)
        return np.asarray(np.log1p(odds.rest) - (odds.others * odds.logs).sum(axis=1) / (1 + odds.rest))

    return by_block(formula, logits)


def margin(logits: Any) -> FloatArray:
    """``1 - (p_1 - p_2) = 2 p_2 + p_3 + ...``, for the two most probable classes.

    >>> margin([[0.0, 0.0], [0.0, 100.0]])
    array([1.00000000e+00, 7.44015195e-44])
    """

    def formula(values: FloatArray) -> FloatArray:
        odds = Odds.of(values)
        return np.asarray((odds.rest + odds.others.max(axis=1)) / (1 + odds.rest))

    return by_block(formula, logits)


class Odds(NamedTuple):
    """Each class against the most probable one, which is left out: nothing cancels, however sure the softmax is.

    ``largest`` logit (n,); ``logs`` of the odds (n, C); the odds ``others`` (n, C), 0 for the most probable class; and their
    sum ``rest`` (n,): the most probable class has ``1 / (1 + rest)``.
    """

    largest: FloatArray
    logs: FloatArray
    others: FloatArray
    rest: FloatArray

    @classmethod
    def of(cls, values: FloatArray) -> Odds:
        """Of logits (n, C)."""
        top = values.argmax(axis=1)
        rows = np.arange(len(values))
        largest = values[rows, top]
        with np.errstate(over="ignore"):
            logs = np.maximum(values - largest[:, None], LEAST)
        others = np.exp(logs)
        others[rows, top] = 0
        return cls(largest, logs, others, others.sum(axis=1))


def _warn_of_probabilities(outputs: npt.NDArray[Any] | None, name: str) -> None:
    """Warn where outputs have been through a softmax already."""
    some = None if outputs is None else outputs[:1000]
    if (
        some is None
        or some.ndim != 2
        or some.shape[1] < 2
        or not len(some)
        or some.dtype.kind != "f"
        or not (some >= 0).all()
    ):
        return
    if np.allclose(some.sum(axis=1), 1, atol=1e-3):
        warnings.warn(
            f"Outputs look like probabilities, and the score {name} takes logits. Record the network without its softmax, or "
            "hand in np.log(outputs).",
            stacklevel=4,
        )


def by_block(formula: Callable[[FloatArray], FloatArray], logits: Any) -> FloatArray:
    """A formula of logits, for some rows at a time: what it needs for these stays in the cache."""
    values = as_array(logits, "logits")
    found = np.empty(len(values) if values.ndim else 0)
    check_logits(values[:0] if values.ndim else values)
    for rows in row_ranges(len(found), BLOCK):
        found[rows] = formula(check_logits(values[rows], rows.start))
    return found


def published_softmax(logits: Any) -> npt.NDArray[np.float32]:
    """Probabilities in single precision, as the paper's numbers were made with: saturated ones tie at 1."""
    values = check_logits(logits).astype(np.float32)
    exponentials = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities: npt.NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def check_logits(logits: Any, first: int = 0) -> FloatArray:
    """Logits as finite float64 (n, C), of at least two classes; ``first`` is the number of the first row, for messages."""
    values = as_array(logits, "logits")
    if values.dtype.kind not in "fiu" or values.ndim != 2 or values.shape[1] < 2:
        raise InvalidInput(
            f"logits must be numbers of shape (n, classes), at least two classes. Got {values.dtype} of shape {values.shape}."
        )
    values = values.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(values.sum())  # the sum of the largest floats, say
    if suspicious and not np.isfinite(values).all():
        row = first + int(np.argmin(np.isfinite(values).all(axis=1)))
        raise InvalidInput(
            f"logits must be finite. Got NaN or infinity in row {row}; look for an overflow in the network."
        )
    return values
