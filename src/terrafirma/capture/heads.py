"""The last linear layer of a network, found by what it does: it maps the features to the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["find_head", "fitting"]

Array = npt.NDArray[Any]
ROWS = 64  # to try weights on
MOST_OFF = 1e-4  # of the outputs' spread
ROUNDINGS = 8  # of numbers of their size
SINGLE = 2.0**-23  # what is recorded is rounded to float32


def find_head(
    features: Array, outputs: Array, weights: Iterable[Array], biases: Sequence[Array], precision: float = SINGLE
) -> tuple[Array, Array] | None:
    """``W`` (C, units) and ``b`` (C,) among these with ``outputs = features @ W.T + b``; None if there are none.

    The first weights that fit are taken, with the bias that fits best; no bias at all is tried, too. ``precision``: the
    distance from 1 to the next number as the network rounds.
    """
    rows = slice(None, None, -(-len(features) // ROWS) or 1)
    x, y = features[rows].astype(np.float64), outputs[rows].astype(np.float64)
    if outputs.ndim != 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    rounding = ROUNDINGS * max(precision, SINGLE)
    most = MOST_OFF * float(np.ptp(y, axis=0).max(initial=0)) + rounding * float(np.abs(y).max(initial=0))
    for W in map(_plain, weights):
        rest = y - x @ W.T.astype(np.float64)
        tried = [*map(_plain, biases), np.zeros(len(W), W.dtype)]
        off = [float(np.abs(rest - b).max(initial=0)) for b in tried]
        best = int(np.argmin(off))
        if off[best] <= most:
            return W, tried[best]
    return None


def fitting(arrays: Iterable[Any], n_features: int, n_outputs: int) -> tuple[list[Any], list[Any]]:
    """Those of the arrays, or tensors, that may be weights, as (C, units), also where they are (units, C), and biases (C,).

    The kernel of a convolution that sees one position, or all of them, counts as well.
    """
    weights, biases = [], []
    for array in arrays:
        shape = tuple(array.shape)
        if len(shape) > 1 and shape[0] == n_outputs and math.prod(shape) == n_outputs * n_features:
            weights.append(array.reshape(n_outputs, n_features))
        if shape == (n_features, n_outputs):
            weights.append(array.T)
        if math.prod(shape) == n_outputs:
            biases.append(array.reshape(n_outputs))
    return weights, biases


def _plain(array: Array) -> Array:
    """In float32 unless it is in float64: half precision has no place in a recording."""
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)
