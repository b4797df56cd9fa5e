"""The paper's first picture: an MLP on half moons, shattered into its linear regions.

Implements f:two_moons. Settings as published (5000 points, noise .05, 2-32-32-2, SGD .1, 8 epochs of batches of 100, all
64 units as pattern), but for one: the published run chose rho on a validation set that it forgot to standardise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from terrafirma.capture.sklearn import hidden_activations
from terrafirma.core.patterns import BoolArray, FloatArray, IntArray
from terrafirma.experiments.linear_regions import LinearRegion, linear_regions
from terrafirma.scores.subfunction_search import Selection, select

__all__ = ["RHOS", "HalfMoons", "run"]

RHOS = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
N_TRAIN, N_VAL, NOISE = 5000, 1000, 0.05
EPOCHS = 8
EXTENT = 6.0  # the pictures show [-6, 6]^2
GRID = 241  # points along an edge of the surface


@dataclass(frozen=True, eq=False)
class HalfMoons:
    """Everything that the four panels show.

    Attributes
    ----------
    points, labels : float64 array (n, 2) and int64 array (n,)
        The training set, standardised.
    errors : bool array (n,)
        Training points that the network gets wrong.
    regions : list of LinearRegion
        All linear regions on the square, exactly.
    log_bounds : float64 array (regions,)
        The bound of each.
    axis, surface : float64 arrays (k,) and (k, k)
        The bound on a grid; ``surface[i, j]`` at (axis[j], axis[i]).
    selection : Selection
    accuracy : float
        On the validation set.

    """

    points: FloatArray
    labels: IntArray
    errors: BoolArray
    regions: list[LinearRegion]
    log_bounds: FloatArray
    axis: FloatArray
    surface: FloatArray
    selection: Selection
    accuracy: float


def run(seed: int = 0, advance: Callable[[], None] = lambda: None) -> HalfMoons:
    """Train the network, select rho and delta, and score every region; ``advance`` is called after each of ``STEPS``."""
    from sklearn.datasets import make_moons
    from sklearn.neural_network import MLPClassifier

    points, labels = make_moons(N_TRAIN, noise=NOISE, random_state=seed)
    val_points, val_labels = make_moons(N_VAL, noise=NOISE, random_state=seed + 1)
    mean, std = points.mean(axis=0), points.std(axis=0)
    points, val_points = (points - mean) / std, (val_points - mean) / std
    mlp = MLPClassifier((32, 32), solver="sgd", learning_rate_init=0.1, batch_size=100, random_state=seed)
    for _ in range(EPOCHS):
        mlp.partial_fit(points, labels, classes=[0, 1])
        advance()

    def patterns(x: FloatArray) -> FloatArray:
        return np.hstack(hidden_activations(mlp, x))

    errors = mlp.predict(points) != labels
    val_errors = mlp.predict(val_points) != val_labels
    selection = select(patterns(points), errors, patterns(val_points), val_errors, rhos=RHOS)
    advance()
    regions = linear_regions(mlp.coefs_[:-1], mlp.intercepts_[:-1], low=-EXTENT, high=EXTENT)
    advance()
    axis = np.linspace(-EXTENT, EXTENT, GRID)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    surface = selection.best.unreliability(patterns(grid)).reshape(GRID, GRID)
    log_bounds = selection.best.unreliability(np.array([region.pattern for region in regions]))
    advance()
    accuracy = float(1 - val_errors.mean())
    return HalfMoons(points, labels, errors, regions, log_bounds, axis, surface, selection, accuracy)


STEPS = EPOCHS + 3
