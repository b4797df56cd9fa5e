"""The last linear layer of a network: as it was recorded, or found again from features and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import solve

from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import matrix_of

__all__ = ["head_of"]

MOST_OFF = 1e-3  # of the outputs' spread: what float32 rounding may leave
CHECKED = 1000  # samples that a head is checked on, at most
RIDGE = 1e-10  # of the mean variance: for units that never vary


def head_of(train: Recorded, by: str) -> tuple[FloatArray, FloatArray]:
    """``W`` (C, units) and ``b`` (C,) with ``outputs = features @ W.T + b``.

    Where no head was recorded: by least squares on some samples, checked on others; units that never vary get no weight.
    """
    features, outputs = matrix_of(train, "features", by), matrix_of(train, "outputs", by)
    if train.head is not None:
        W, b = (np.asarray(part, dtype=np.float64) for part in train.head)
        fits = W.shape == (outputs.shape[1], features.shape[1]) and b.shape == W.shape[:1]
    else:
        W, b = _least_squares(features[::2], outputs[::2])
        fits = True
    # one that was found is checked on samples that took no part, half of them: odd steps from 1 on
    rows = slice(0 if train.head is not None else 1, None, max(1, len(features) // CHECKED) | 1)
    x, y = (part[rows].astype(np.float64) for part in (features, outputs))
    off = np.abs(x @ W.T + b - y).max() if fits and len(x) else np.inf
    if not off <= MOST_OFF * max(float(np.ptp(outputs)), float(np.abs(outputs).max()), 1e-30):
        raise InvalidInput(
            f"The score {by} needs the features that the last linear layer maps to the outputs. Got others, or too few samples "
            "to find that layer; record with features=True the last layer before the outputs."
        )
    return W, b


def _least_squares(features: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """By normal equations, on samples enough for the layer to be found."""
    rows = slice(None, None, -(-len(features) // (2 * features.shape[1] + 64)))
    x, y = features[rows].astype(np.float64), outputs[rows].astype(np.float64)
    centre, middle = x.mean(axis=0), y.mean(axis=0)
    x -= centre
    product = x.T @ x
    product[np.diag_indices_from(product)] += RIDGE * np.trace(product) / len(product) or 1.0
    W = solve(product, x.T @ (y - middle), assume_a="pos").T
    return W, middle - W @ centre
