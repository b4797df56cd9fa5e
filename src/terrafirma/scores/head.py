"""The last linear layer of a network: as it was recorded, or found again from features and outputs."""

from __future__ import annotations

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import matrix_of

__all__ = ["head_of"]

MOST_OFF = 1e-3  # of the outputs' spread: what float32 rounding may leave


def head_of(train: Recorded, by: str) -> tuple[FloatArray, FloatArray]:
    """``W`` (C, units) and ``b`` (C,) with ``outputs = features @ W.T + b``.

    Where no head was recorded: by least squares, which finds it wherever the features go; units that never vary get no weight.
    """
    features, outputs = matrix_of(train, "features", by), matrix_of(train, "outputs", by)
    rows = slice(None, None, -(-len(features) // (8 * features.shape[1] + 64)))  # enough to find it
    x, y = features[rows].astype(np.float64), outputs[rows].astype(np.float64)
    if train.head is not None:
        W, b = (np.asarray(part, dtype=np.float64) for part in train.head)
        fits = W.shape == (outputs.shape[1], features.shape[1]) and b.shape == W.shape[:1]
    else:
        centre = x.mean(axis=0)
        W = np.linalg.lstsq(x - centre, y - y.mean(axis=0), rcond=None)[0].T
        b, fits = y.mean(axis=0) - W @ centre, True
    off = np.abs(x @ W.T + b - y).max() if fits else np.inf
    if not off <= MOST_OFF * max(float(np.ptp(y)), float(np.abs(y).max()), 1e-30):
        raise InvalidInput(
            f"The score {by} needs the features that the last linear layer maps to the outputs. Got others; record with "
            "features=True the last layer before the outputs."
        )
    return W, b
