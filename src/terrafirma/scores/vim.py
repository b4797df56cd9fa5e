"""Virtual logit matching: what of the features lies outside the training data's main subspace, as one more logit."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from terrafirma.core._checks import check_count
from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import ROWS, Score, matrix_of
from terrafirma.scores.gaussian import symmetric_factors
from terrafirma.scores.head import head_of
from terrafirma.scores.logits import check_logits

__all__ = ["Vim"]

NO_WEIGHT = 1e-6  # of the head's largest singular value, and of the features' size: less is rounding of float32
MANY = 10_000  # samples
NO_VARIANCE = 1e-10  # of the largest variance


class Vim(Score):
    """``alpha * residual - log sum exp(logits)``; the residual is the length of the features outside a subspace.

    ``dim``: of that subspace, by default 1000 for 2048 units or more, 512 for 768 or more, else half the units. Directions in
    which the training data never vary are always outside.
    """

    name: ClassVar[str] = "vim"
    paper: ClassVar[str] = "Wang et al., CVPR 2022"
    cost: ClassVar[str] = "fit O(N d^2 + d^3); a query O(d^2)"
    needs = frozenset({"features", "outputs"})
    origin_: FloatArray
    outside_: FloatArray  # (d, d - dim), orthonormal
    alpha_: float

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim

    def check(self) -> None:
        """Raise where ``dim`` is no dimension."""
        super().check()
        if self.dim is not None:
            check_count("dim", self.dim, least=1)

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find the subspace, and the weight that makes a residual as large as a logit."""
        features = matrix_of(train, "features", self.name)
        logits = check_logits(train.need("outputs", by=self.name))
        W, b = head_of(train, self.name)
        self.origin_ = -np.linalg.pinv(W, rcond=NO_WEIGHT) @ b
        blocks = row_ranges(len(features), ROWS)
        variances, axes = symmetric_factors((features[rows] - self.origin_ for rows in blocks), len(features))
        varying = int((variances > NO_VARIANCE * variances[-1]).sum())
        dim = min(self._dim(len(variances)), varying)
        self.outside_ = np.ascontiguousarray(axes[:, : len(variances) - dim])
        narrow = np.float32 if len(features) > MANY else np.float64  # digits enough for a mean of many
        outside: npt.NDArray[Any] = self.outside_.astype(narrow)
        lengths = [np.linalg.norm((features[rows] - self.origin_).astype(narrow) @ outside, axis=1) for rows in blocks]
        residual = np.mean(np.concatenate(lengths), dtype=np.float64)
        size = float(np.sqrt(variances.sum()))
        largest = abs(float(logits.max(axis=1).mean()))  # a bias may shift all logits below 0
        self.alpha_ = largest / (max(float(residual), NO_WEIGHT * size) or 1.0)

    def score(self, recorded: Recorded) -> FloatArray:
        """The virtual logit less the energy of the others."""
        features = matrix_of(recorded, "features", self.name, len(self.origin_))
        logits = check_logits(recorded.need("outputs", by=self.name))
        return np.asarray(self.alpha_ * self._residual(features) - logsumexp(logits, axis=1))

    def _residual(self, features: FloatArray) -> FloatArray:
        return np.asarray(np.linalg.norm((features - self.origin_) @ self.outside_, axis=1))

    def _dim(self, units: int) -> int:
        if self.dim is None:
            return 1000 if units >= 2048 else 512 if units >= 768 else units // 2
        if self.dim >= units:
            raise InvalidInput(
                f"dim must be less than the {units} units of the features. Got {self.dim}; a residual needs some left."
            )
        return int(self.dim)
