"""Scores of a classifier's outputs alone: maximum response, entropy, margin.

Each takes logits (n, C) and returns float64 (n,), higher = less reliable. Written so that saturated softmaxes do not tie:
what is left beside the largest probability is summed from the other classes, never as 1 - max.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import entr, logsumexp

from terrafirma.core._checks import as_array
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

__all__ = ["entropy", "margin", "max_response"]


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
    values = as_array(logits, "logits")
    if values.dtype.kind not in "fiu" or values.ndim != 2 or values.shape[1] < 2:
        raise InvalidInput(
            f"logits must be numbers of shape (n, classes), at least two classes. Got {values.dtype} of shape {values.shape}."
        )
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise InvalidInput("logits must be finite. Got NaN or infinity; look for an overflow in the network.")
    with np.errstate(over="ignore", under="ignore"):
        ordered = np.sort(values, axis=1)
        ordered -= ordered[:, -1:]
        return np.asarray(np.exp(ordered[:, :-1] - logsumexp(ordered, axis=1, keepdims=True)))
