"""Gaussians of features, one for each class, with one covariance for all: how far a sample is from the nearest.

The covariance is factorised once, to coordinates in which it is the identity; distances there are those of points. With far
fewer samples than features, only the samples' span gets coordinates of its own; all directions beside it weigh the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.scores.base import ROWS

__all__ = ["TiedGaussian", "fit_tied", "symmetric_factors"]

RIVALS = 3  # classes that rounding might confuse, measured exactly
LEAST = 1e-6  # of the mean variance: less of it, and a direction counts as having that much
ROUNDING = 1e-24  # of all variance: less of it within the classes is rounding


@dataclass(frozen=True, eq=False)
class TiedGaussian:
    """Class means that share one covariance, as a file may hold them.

    Attributes
    ----------
    centre : array (d,)
        The mean of all samples, taken off first, so that data far from 0 lose no digits.
    whitening : array (d, k)
        From centred features to coordinates in which the covariance is the identity.
    means : array (classes, k)
        Of the classes that occur, in these coordinates.
    rest : array (1,)
        One over the variance of the directions beside the columns of ``whitening``; 0 where there are none.

    """

    centre: FloatArray
    whitening: FloatArray
    means: FloatArray
    rest: FloatArray

    def nearest(self, features: npt.NDArray[Any]) -> FloatArray:
        """Squared Mahalanobis distance (n,) to the nearest class mean."""
        with np.errstate(over="ignore", invalid="ignore"):  # whoever asks looks for what is not finite
            centred = features - self.centre
            points = centred @ self.whitening
            near = (self.means**2).sum(axis=1) - 2 * points @ self.means.T
            nearest = np.argpartition(near, min(RIVALS, near.shape[1]) - 1, axis=1)[:, :RIVALS]
            # by differences: squares far apart cancel
            found = np.min([((points - self.means[c]) ** 2).sum(axis=1) for c in nearest.T], axis=0)
            if self.rest.any():
                beside = centred - (points / (self.whitening**2).sum(axis=0)) @ self.whitening.T
                found += self.rest * (beside**2).sum(axis=1)
        return np.asarray(found)


def fit_tied(features: npt.NDArray[Any], labels: npt.NDArray[np.integer[Any]]) -> TiedGaussian:
    """Learn from features (n, d) and labels (n,); labels all equal give one mean and the covariance of everything.

    Directions with less than 1e-6 of the mean variance count as having that much: what never varied is far, yet finite. Where
    no class varies at all, the covariance is the identity.
    """
    n, d = features.shape
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    centre, offsets = _means(features, classes, counts)
    basis = np.linalg.qr((features - centre).T)[0] if 2 * n < d else None  # any that spans the samples

    means = centre + offsets

    def within(rows: slice) -> FloatArray:
        apart = features[rows] - means[classes[rows]]
        return np.asarray(apart if basis is None else apart @ basis)

    variances, axes = symmetric_factors(map(within, row_ranges(n, ROWS)), n)
    mean_within = float(variances.sum()) / d
    mean_between = float((counts @ offsets**2).sum()) / (n * d)
    if mean_within <= ROUNDING * mean_between:
        variances, least = np.ones_like(variances), 1.0
    else:
        least = LEAST * mean_within
    whitening = axes / np.sqrt(np.maximum(variances, least))
    whitening = whitening if basis is None else basis @ whitening
    rest = np.array([0.0 if basis is None else 1 / least])
    return TiedGaussian(centre, whitening, offsets @ whitening, rest)


def symmetric_factors(blocks: Iterable[FloatArray], n: int) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues, rising and none below 0, and eigenvectors of ``X.T @ X / n``, where blocks of rows make up X."""
    product: FloatArray | float = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks:
            product = product + block.T @ block
    if not np.isfinite(product).all():
        raise InvalidInput("features must have squares that are finite. Got some beyond 1e150; scale them.")
    values, vectors = np.linalg.eigh(np.asarray(product) / n)
    return np.maximum(values, 0.0), vectors


def _means(
    features: npt.NDArray[Any], classes: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]
) -> tuple[FloatArray, FloatArray]:
    """The mean of all samples, and how far those of the classes are from it."""
    first = features[0].astype(np.float64)  # summed from there, for the digits
    sums = np.zeros((len(counts), features.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in row_ranges(len(features), ROWS):
            mine = classes[rows]
            of_class = csr_array((np.ones(len(mine)), (mine, np.arange(len(mine)))), shape=(len(counts), len(mine)))
            sums += of_class @ (features[rows] - first)
        mean = sums.sum(axis=0) / len(features)
        return first + mean, sums / counts[:, None] - mean
