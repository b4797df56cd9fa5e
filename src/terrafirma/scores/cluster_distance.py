"""Cluster distance: how little the features of a sample point where those of training samples do, and how short they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import check_count
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, matrix_of
from terrafirma.scores.neighbours import Points, nearest, unit_rows

__all__ = ["ClusterDistance"]

MOST_CLUSTERED = 10_000  # evenly spaced samples tell the centres of some hundred clusters well enough


class ClusterDistance(Score):
    """``-(largest cosine to any centre) |features|``.

    By this definition long features are reliable: of two samples in the same direction, the one further out counts as *more*
    reliable, however far from all training samples it is. Features that are all 0 have cosine 0 to everything.

    ``clusters``: ``"all"``, every training sample being a centre of its own, or a number, for k-means of the directions of at
    most 10 000 of them.
    ``variant="published"``: ``"all"``, as the paper's numbers were made.
    """

    name: ClassVar[str] = "cluster_distance"
    paper: ClassVar[str] = "Tack et al., NeurIPS 2020"
    cost: ClassVar[str] = "fit k-means of N directions; a query O(Nd), or O(d) for each cluster"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clusters": ("all", 10, 100)}
    needs = frozenset({"features"})
    clusters_: str | int
    centres_: dict[str, npt.NDArray[Any]]

    def __init__(self, clusters: str | int | None = None, variant: str | None = None) -> None:
        self.clusters = clusters
        self.variant = variant

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if isinstance(self.clusters, str) and self.clusters != "all":
            raise InvalidInput(f"clusters must be 'all' or an integer of at least 1. Got {self.clusters!r:.80}.")
        if self.clusters is not None and not isinstance(self.clusters, str):
            check_count("clusters", self.clusters, least=1)
        if self.variant == "published" and self.clusters not in (None, "all"):
            raise InvalidInput(
                f"clusters must be 'all' in the variant 'published'. Got {self.clusters!r:.80}; leave it out."
            )

    def open_settings(self, train: Recorded) -> list[dict[str, Any]]:
        """As published, every sample is a centre."""
        return [{"clusters": "all"}] if self.variant == "published" else super().open_settings(train)

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find the centres' directions."""
        directions = unit_rows(matrix_of(train, "features", self.name))
        directions = directions[directions.any(axis=1)]
        if self.clusters_ != "all" and len(directions):
            few = directions[:: -(-len(directions) // MOST_CLUSTERED)]
            directions = unit_rows(_means(few, int(self.clusters_)))
            directions = directions[directions.any(axis=1)]  # opposite ones may cancel
        self.centres_ = Points.of(directions).arrays()

    def score(self, recorded: Recorded) -> FloatArray:
        """Minus the largest cosine, times the length."""
        centres = Points(**self.centres_)
        features = matrix_of(recorded, "features", self.name, centres.rows.shape[1])
        lengths = np.linalg.norm(features.astype(np.float64), axis=1)
        if not len(centres.rows):
            return np.zeros(len(features))
        apart = nearest(unit_rows(features, np.float64), centres, 1)[:, 0]
        return np.asarray((apart**2 / 2 - 1) * lengths)  # for unit vectors |a - b|^2 = 2 - 2 cos


def _means(directions: npt.NDArray[Any], clusters: int) -> npt.NDArray[np.float64]:
    """The centres of k-means, seeded; at most one for each sample."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of fewer distinct samples than clusters: some coincide
        means = KMeans(min(clusters, len(directions)), n_init=1, max_iter=100, random_state=0).fit(directions)
    return np.asarray(means.cluster_centers_, dtype=np.float64)
