"""Relative Mahalanobis distance: how much farther a sample is from its class than from the data as a whole."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import matrix_of
from terrafirma.scores.gaussian import TiedGaussian, fit_tied
from terrafirma.scores.mahalanobis import Mahalanobis

__all__ = ["RelativeMahalanobis"]


class RelativeMahalanobis(Mahalanobis):
    """The squared distance to the nearest class less that to the mean of all, by the covariance of all."""

    name: ClassVar[str] = "relative_mahalanobis"
    paper: ClassVar[str] = "Ren et al., arXiv 2106.09022, 2021"
    all_: dict[str, FloatArray]

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find both Gaussians."""
        super().learn(train, validation)
        features = matrix_of(train, "features", self.name)
        self.all_ = dict(vars(fit_tied(features, np.zeros(len(features), dtype=np.int64))))

    def score(self, recorded: Recorded) -> FloatArray:
        """The difference of the squared distances."""
        features = matrix_of(recorded, "features", self.name, len(self.all_["centre"]))
        return super().score(recorded) - TiedGaussian(**self.all_).nearest(features)
