"""Deep nearest neighbours: how far the features of a sample, as a direction, lie from those of the training samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import check_count
from terrafirma.core.patterns import FloatArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, matrix_of
from terrafirma.scores.neighbours import Points, nearest, unit_rows

__all__ = ["Knn"]


class Knn(Score):
    """The distance to the ``k``-th nearest training sample (the furthest, where there are fewer), all of length 1.

    Features that are all 0 have no direction and stay 0: 1 from every direction, 0 from each other.
    """

    name: ClassVar[str] = "knn"
    paper: ClassVar[str] = "Sun et al., ICML 2022"
    cost: ClassVar[str] = "fit O(Nd); a query O(Nd), as a matrix product"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"k": (50, 1, 5, 10, 20, 100, 200)}
    needs = frozenset({"features"})
    k_: int
    train_: dict[str, npt.NDArray[Any]]

    def __init__(self, k: int | None = None) -> None:
        self.k = k

    def check(self) -> None:
        """Raise where ``k`` is no count."""
        super().check()
        if self.k is not None:
            check_count("k", self.k, least=1)

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Keep the directions."""
        self.train_ = Points.of(unit_rows(matrix_of(train, "features", self.name))).arrays()

    def trials(self, train: Recorded, validation: Recorded | None) -> Iterator[tuple[Self, FloatArray]]:
        """Every ``k``, out of one search for the largest."""
        self.learn(train, validation)
        learned, settings = self.train_, self.open_settings(train)
        found = None
        if validation is not None and len(settings) > 1:
            found = self._distances(validation, max(setting["k"] for setting in settings))
        for setting in settings:
            trial = self.with_setting(setting)
            trial.train_ = learned
            yield trial, np.zeros(0) if found is None else found[:, min(setting["k"], found.shape[1]) - 1]

    def score(self, recorded: Recorded) -> FloatArray:
        """The distance to the ``k``-th nearest."""
        return self._distances(recorded, self.k_)[:, -1]

    def _distances(self, recorded: Recorded, k: int) -> FloatArray:
        points = Points(**self.train_)
        features = matrix_of(recorded, "features", self.name, points.rows.shape[1])
        return nearest(unit_rows(features, points.rows.dtype), points, min(k, len(points.rows)))
