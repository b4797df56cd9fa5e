"""The linear regions of a ReLU network of two inputs, as exact polygons.

Implements eq:regions. for fully connected networks on a square. Layer by layer, the square is cut along the lines on
which a unit changes sign: within a region of the layers so far the network is affine, so that each unit of the next layer
cuts it along one straight line at most. What remains are convex polygons, each with its activation pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terrafirma.core.patterns import BoolArray, FloatArray

__all__ = ["LinearRegion", "linear_regions"]

SLIVER = 1e-12  # relative area below which a cut leaves nothing but rounding


@dataclass(frozen=True, eq=False)
class LinearRegion:
    """One linear region.

    Attributes
    ----------
    corners : float64 array (k, 2)
        The corners of the convex polygon, in order.
    pattern : bool array (M,)
        The units active inside, of all layers in the order in which they run.

    """

    corners: FloatArray
    pattern: BoolArray


@dataclass(frozen=True, eq=False)
class _Piece:
    """A region of the layers so far, and the affine map x -> A x + b that they compute there."""

    corners: FloatArray
    pattern: list[bool]
    A: FloatArray
    b: FloatArray


def linear_regions(
    weights: Sequence[FloatArray], biases: Sequence[FloatArray], *, low: float, high: float
) -> list[LinearRegion]:
    """The linear regions on the square [low, high]^2.

    Parameters
    ----------
    weights : arrays (inputs, units)
        Of the hidden ReLU layers, the first with two inputs.
    biases : arrays (units,)

    """
    square = np.array([[low, low], [high, low], [high, high], [low, high]])
    pieces = [_Piece(square, [], np.eye(2), np.zeros(2))]
    smallest = SLIVER * (high - low) ** 2
    for W, bias in zip(weights, biases, strict=True):
        pieces = [cut for piece in pieces for cut in _cut_by_layer(piece, W, bias, smallest)]
    return [LinearRegion(piece.corners, np.array(piece.pattern)) for piece in pieces]


def _cut_by_layer(piece: _Piece, W: FloatArray, bias: FloatArray, smallest: float) -> list[_Piece]:
    """All regions of the next layer inside one region of the layers so far."""
    A, b = W.T @ piece.A, W.T @ piece.b + bias  # pre-activations, affine in the input
    cells: list[tuple[FloatArray, list[bool]]] = [(piece.corners, [])]
    for a, offset in zip(A, b, strict=True):
        cells = [half for corners, active in cells for half in _cut_by_unit(corners, active, a, offset, smallest)]
    return [
        _Piece(corners, piece.pattern + active, A * np.array(active)[:, None], b * np.array(active))
        for corners, active in cells
    ]


def _cut_by_unit(
    corners: FloatArray, active: list[bool], a: FloatArray, offset: float, smallest: float
) -> list[tuple[FloatArray, list[bool]]]:
    """The part of a polygon where ``a x + offset`` is positive and the part where it is not."""
    values = corners @ a + offset
    if (values > 0).all() or (values <= 0).all():
        return [(corners, [*active, bool(values[0] > 0)])]
    halves = [(_clip(corners, values), [*active, True]), (_clip(corners, -values), [*active, False])]
    kept = [(half, pattern) for half, pattern in halves if _area(half) > smallest]
    # where a half is no more than rounding, the whole polygon is the larger half's
    return kept if len(kept) == 2 else [(corners, max(halves, key=lambda half: _area(half[0]))[1])]


def _clip(corners: FloatArray, values: FloatArray) -> FloatArray:
    """The part of a convex polygon on which an affine function, known at the corners, is >= 0."""
    out = []
    for i in range(len(corners)):
        j = (i + 1) % len(corners)
        if values[i] >= 0:
            out.append(corners[i])
        if (values[i] > 0 and values[j] < 0) or (values[i] < 0 and values[j] > 0):
            t = values[i] / (values[i] - values[j])
            out.append(corners[i] + t * (corners[j] - corners[i]))
    return np.array(out).reshape(-1, 2)


def _area(corners: FloatArray) -> float:
    x, y = corners[:, 0], corners[:, 1]
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2
