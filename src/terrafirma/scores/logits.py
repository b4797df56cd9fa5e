"""Scores of a classifier's outputs: the functions, and what the classes around them share.

Each function takes logits (n, C) and returns float64 (n,), higher = less reliable. Written so that saturated softmaxes do
not tie, up to gaps of 745 between logits: what is left beside the largest probability is summed from the other classes,
never as 1 - max.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import entr, logsumexp

from terrafirma.core._checks import as_array, check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, matrix_of
from terrafirma.scores.head import head_of

__all__ = ["LogitScore", "check_logits", "entropy", "margin", "max_response", "published_softmax"]

REACT_VALUES = 1 << 24  # activations that decide where ReAct clips, from evenly spaced samples


class LogitScore(Score):
    """What scores of logits share: ReAct (Sun et al., NeurIPS 2021), which clips the last layer's features before its head.

    ``react``: the share of the training data's activations that stays as it is, 0.9 in the paper; None leaves all.
    """

    cost = "fit none; a query O(C)"
    needs = frozenset({"outputs"})
    clip_: float
    head_weights_: FloatArray
    head_bias_: FloatArray

    def __init__(self, react: float | None = None) -> None:
        self.react = react
        if react is not None:
            self.needs = self.needs | {"features"}

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
        if self.react is None:
            return
        features = matrix_of(train, "features", self.name)
        self.head_weights_, self.head_bias_ = head_of(train, self.name)
        step = -(-features.size // REACT_VALUES)
        self.clip_ = float(np.quantile(features[::step], self.react))

    def logits(self, recorded: Recorded) -> FloatArray:
        """The logits of some samples; with ReAct, those of the clipped features."""
        if self.react is None:
            return check_logits(recorded.need("outputs", by=f"The score {self.name}"))
        features = matrix_of(recorded, "features", self.name, self.head_weights_.shape[1])
        return check_logits(np.minimum(features, self.clip_) @ self.head_weights_.T + self.head_bias_)

    def score(self, recorded: Recorded) -> FloatArray:
        """The unreliability of the logits."""
        return self.of_logits(self.logits(recorded))


def max_response(logits: Any) -> FloatArray:
    """``1 - p_1``, the probability of all classes but the predicted one.

    >>> max_response([[100.0, 0.0], [50.0, 0.0]])
    array([3.72007598e-44, 1.92874985e-22])
    """
    return np.asarray(_others(logits).sum(axis=1))


def entropy(logits: Any) -> FloatArray:
    """``-sum p log p``.

    >>> entropy([[0.0, 0.0]])
    array([0.69314718])
    """
    others = _others(logits)
    rest = np.minimum(others.sum(axis=1), 1.0)
    return np.asarray(entr(others).sum(axis=1) - (1.0 - rest) * np.log1p(-rest))


def margin(logits: Any) -> FloatArray:
    """``1 - (p_1 - p_2) = 2 p_2 + p_3 + ...``, for the two most probable classes.

    >>> margin([[0.0, 0.0], [0.0, 100.0]])
    array([1.00000000e+00, 7.44015195e-44])
    """
    others = _others(logits)
    return np.asarray(others.sum(axis=1) + others[:, -1])


def _others(logits: Any) -> FloatArray:
    """Probabilities of all classes but the most probable, rising, so that sums run from the small to the large."""
    values = check_logits(logits)
    with np.errstate(over="ignore", under="ignore"):
        ordered = np.sort(values, axis=1)
        ordered -= ordered[:, -1:]
        return np.asarray(np.exp(ordered[:, :-1] - logsumexp(ordered, axis=1, keepdims=True)))


def published_softmax(logits: Any) -> npt.NDArray[np.float32]:
    """Probabilities in single precision, as the paper's numbers were made with: saturated ones tie at 1."""
    values = check_logits(logits).astype(np.float32)
    exponentials = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities: npt.NDArray[np.float32] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def check_logits(logits: Any) -> FloatArray:
    """Logits as finite float64 (n, C), of at least two classes."""
    values = as_array(logits, "logits")
    if values.dtype.kind not in "fiu" or values.ndim != 2 or values.shape[1] < 2:
        raise InvalidInput(
            f"logits must be numbers of shape (n, classes), at least two classes. Got {values.dtype} of shape {values.shape}."
        )
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values).all(axis=1)))
        raise InvalidInput(
            f"logits must be finite. Got NaN or infinity in row {row}; look for an overflow in the network."
        )
    return values
