"""Why a prediction is as reliable as it is: the training samples around it, and the parts of its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import check_count
from terrafirma.core.patterns import IntArray, PackedPatterns, WordArray
from terrafirma.core.regions import RegionTable
from terrafirma.guard.state import Samples, State

__all__ = ["Explanation", "RegionShare", "distances", "explain"]


@dataclass(frozen=True, eq=False)
class RegionShare:
    """A populated region near a sample.

    Attributes
    ----------
    distance : int
        Bits in which the patterns differ.
    share : float
        Of the density at the sample, what this region brings.
    n_samples : int
    mean_error : float
        Of its training samples.
    labels : dict
        Training samples by label, most frequent first; empty where labels are unknown or not whole numbers.
    samples : int array
        Numbers of its training samples, as many as were asked for.

    """

    distance: int
    share: float
    n_samples: int
    mean_error: float
    labels: dict[Any, int]
    samples: IntArray

    def __str__(self) -> str:
        labels = ", ".join(f"{count} labelled {label}" for label, count in self.labels.items())
        ids = ", ".join(map(str, self.samples)) + (", ..." if len(self.samples) < self.n_samples else "")
        return (
            f"{self.share:6.1%}: {self.n_samples} sample{'s' if self.n_samples > 1 else ''} "
            f"{self.distance} bits away: {labels + '; ' if labels else ''}mean error {self.mean_error:.3g}; number {ids}"
        )


@dataclass(frozen=True, eq=False)
class Explanation:
    """One prediction and what its unreliability rests on.

    Attributes
    ----------
    prediction : class label, or the output of a regression
    unreliability : float
    accepted, threshold : bool and float, optional
        None while the policy is stale.
    nearest : int
        Bits to the nearest training sample.
    log_density, log_risk, log_gap : float
        The parts of the bound.
    risk_share : float
        Of the bound, what the errors of training samples bring; the gap brings the rest.
    regions : tuple of RegionShare
        Those that bring most of the density, most first.

    """

    prediction: Any
    unreliability: float
    accepted: bool | None
    threshold: float | None
    nearest: int
    log_density: float
    log_risk: float
    log_gap: float
    risk_share: float
    regions: tuple[RegionShare, ...]

    def __str__(self) -> str:
        limit = "the policy is stale" if self.threshold is None else f"the threshold is {self.threshold:.4g}"
        word = {None: "undecided", True: "accepted", False: "refused"}[self.accepted]
        shares = sum(region.share for region in self.regions)
        labels = {label for region in self.regions for label in region.labels}
        lines = [
            f"prediction {self.prediction}, unreliability {self.unreliability:.4g}: {word} ({limit})",
            f"  nearest training sample {self.nearest} bits away; log density {self.log_density:.4g}",
            f"  bound: log risk {self.log_risk:.4g} and log gap {self.log_gap:.4g}, the risk being {self.risk_share:.1%} of it",
            f"  {shares:.1%} of the density comes from",
            *(f"    {region}" for region in self.regions),
        ]
        if labels and self.prediction not in labels:
            lines.append(f"  none of these is labelled {self.prediction}")
        return "\n".join(lines)


def explain(
    state: State,
    patterns: PackedPatterns,
    predictions: npt.NDArray[Any] | None,
    classes: npt.NDArray[Any] | None,
    n: int,
) -> list[Explanation]:
    """One explanation for each pattern, with at most n regions and n samples of each."""
    n = check_count("n", n, least=1)
    terms = state.bound.terms(patterns)
    accepted = None if state.policy is None else state.policy.accept(terms.log_bound)
    log_counts = np.log(state.table.counts)
    (log_d,) = state.bound.smoother_.log_d
    out = []
    for row, words in enumerate(patterns.words):
        away = distances(state.table, words)
        log_mass = log_d[away] + log_counts
        order = np.lexsort([away, -log_mass])[:n]
        shares = np.exp(log_mass[order] - np.logaddexp.reduce(log_mass))
        regions = [
            _region(state.table, state.samples, int(region), int(away[region]), float(share), classes, n)
            for region, share in zip(order, shares, strict=True)
        ]
        out.append(
            Explanation(
                prediction=None if predictions is None else predictions[row].tolist(),
                unreliability=float(terms.log_bound[row]),
                accepted=None if accepted is None else bool(accepted[row]),
                threshold=None if state.policy is None else state.policy.threshold,
                nearest=int(away.min()),
                log_density=float(terms.log_density[row]),
                log_risk=float(terms.log_risk[row]),
                log_gap=float(terms.log_gap[row]),
                risk_share=float(np.exp(terms.log_risk[row] - terms.log_bound[row])),
                regions=tuple(regions),
            )
        )
    return out


def distances(table: RegionTable, words: WordArray) -> IntArray:
    """Bits in which one pattern (W,) differs from each region's."""
    step = 4096  # panels at a time: some MB
    parts = [
        np.bitwise_count(table.panels[start : start + step] ^ words[:, None]).sum(axis=1, dtype=np.int64).ravel()
        for start in range(0, len(table.panels), step)
    ]
    return np.concatenate(parts)[: len(table)]


def _region(
    table: RegionTable,
    samples: Samples,
    region: int,
    distance: int,
    share: float,
    classes: npt.NDArray[Any] | None,
    n: int,
) -> RegionShare:
    rows = np.flatnonzero(table.sample_region == region)
    labels: dict[Any, int] = {}
    if samples.labels is not None and samples.labels.ndim == 1 and samples.labels.dtype.kind in "biu":
        values, counts = np.unique(samples.labels[rows], return_counts=True)
        names = values if classes is None else classes[values.astype(np.intp)]
        labels = {names[i].item(): int(counts[i]) for i in np.argsort(-counts, kind="stable")}
    mean_error = float(table.error_sum[region] / table.counts[region])
    return RegionShare(distance, share, len(rows), mean_error, labels, samples.ids[rows[:n]])
