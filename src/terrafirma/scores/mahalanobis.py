"""Mahalanobis distance: how far the last layer's features are from those of the nearest class."""

from __future__ import annotations

from typing import ClassVar

from terrafirma.core.patterns import FloatArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, classes_of, matrix_of
from terrafirma.scores.gaussian import TiedGaussian, fit_tied

__all__ = ["Mahalanobis"]


class Mahalanobis(Score):
    """Squared distance to the nearest class mean, by the covariance that the classes share; of the last layer alone."""

    name: ClassVar[str] = "mahalanobis"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2018"
    cost: ClassVar[str] = "fit O(N d^2 + d^3); a query O(d^2 + C d)"
    needs = frozenset({"features", "labels"})
    classes_: dict[str, FloatArray]  # the parts of a TiedGaussian

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find the class means and their covariance."""
        self.classes_ = dict(vars(fit_tied(matrix_of(train, "features", self.name), classes_of(train, self.name))))

    def score(self, recorded: Recorded) -> FloatArray:
        """The squared distance."""
        width = len(self.classes_["centre"])
        return TiedGaussian(**self.classes_).nearest(matrix_of(recorded, "features", self.name, width))
