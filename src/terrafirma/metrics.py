"""How well an unreliability tells wrong predictions from right ones.

Implements section app:metrics. of the paper, twice:

- *exact* (the default): by ranks; tied rows count as if in random order, so their order never matters;
- *as published* (``thresholds=1000``): accept where ``u <= t`` for t in -inf, 1001 equal steps from the least to the
  greatest finite u, +inf; trapezoid rule; precision 0/0 = 0. Kept to reproduce published numbers: it flatters and punishes
  by the shape of a score's distribution (see ``docs/deviations.md``).

Two kinds of truth: ``wrong`` is bool (a misclassified or an out-of-distribution sample), ``errors`` lie in [0, 1].
Lower is better for ``aurc``, ``e_aurc``, ``augrc`` and ``fpr_at_tpr``, higher for the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrafirma.core._checks import as_array, check_count, check_errors, check_metric_value, check_scores, check_share
from terrafirma.core.patterns import BoolArray, FloatArray, IntArray
from terrafirma.errors import InvalidInput, UndefinedMetric

__all__ = [
    "Interval",
    "RiskCoverage",
    "Roc",
    "aucea",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "bootstrap",
    "e_aurc",
    "fpr_at_tpr",
    "risk_coverage",
    "roc",
]

ORDER = (
    "the unreliability comes first; for a classifier's errors use prediction != label, else scale them by the largest"
)
MOST_DRAWS = 100  # of a bootstrap, for each sample asked for


@dataclass(frozen=True, eq=False)
class Roc:
    """Receiver operating characteristic; a row is refused where its unreliability is >= the threshold.

    Attributes
    ----------
    false_alarms : float64 array (k,)
        Share of right rows refused, rising from 0 to 1.
    hits : float64 array (k,)
        Share of wrong rows refused, rising from 0 to 1.
    thresholds : float64 array (k,)
        +inf, then the distinct scores, falling.

    """

    false_alarms: FloatArray
    hits: FloatArray
    thresholds: FloatArray

    def __repr__(self) -> str:
        return f"Roc({len(self.thresholds)} points)"


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Risk of the k most reliable rows, for k = 1..n; tied rows in random order.

    Attributes
    ----------
    coverage : float64 array (n,)
        k / n.
    risk : float64 array (n,)
        Expected mean error of the k most reliable.
    thresholds : float64 array (n,)
        The k-th smallest unreliability: accepting u <= threshold accepts at least k.

    """

    coverage: FloatArray
    risk: FloatArray
    thresholds: FloatArray

    def __repr__(self) -> str:
        return f"RiskCoverage({len(self.risk)} points, risk {self.risk[-1]:.4g} where all are accepted)"


@dataclass(frozen=True)
class Interval:
    """A metric with its bootstrap confidence interval."""

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def auroc(unreliability: Any, wrong: Any, *, thresholds: int | None = None) -> float:
    """Chance that a random wrong row is less reliable than a random right one; ties count half.

    >>> auroc([0.1, 0.2, 0.3, 0.3], [False, False, False, True])
    0.8333333333333334
    """
    u, wrong = _scores_and_wrong(unreliability, wrong)
    if thresholds is not None:
        accepted, accepted_errors = _published_counts(u, wrong.astype(np.float64), thresholds)
        false_rate = accepted_errors / wrong.sum()
        true_rate = (accepted - accepted_errors) / (~wrong).sum()
        return float(np.trapezoid(true_rate, false_rate))
    values, place = np.unique(u, return_inverse=True)
    n_wrong = np.bincount(place, weights=wrong, minlength=len(values))
    n_right = np.bincount(place, weights=~wrong, minlength=len(values))
    right_below = np.cumsum(n_right) - n_right
    return float((n_wrong * (right_below + 0.5 * n_right)).sum() / (n_wrong.sum() * n_right.sum()))


def aucea(unreliability: Any, errors: Any, *, thresholds: int | None = None) -> float:
    """Area under coverage against effective accuracy: mean over k of the accuracy of the k most reliable rows.

    >>> round(aucea([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1]), 4)  # (1 + 1 + 2/3 + 2/4) / 4
    0.7917
    """
    if thresholds is None:
        return 1.0 - aurc(unreliability, errors)
    u, errors = _scores_and_errors(unreliability, errors)
    accepted, accepted_errors = _published_counts(u, errors, thresholds)
    precision = np.divide(accepted - accepted_errors, accepted, out=np.zeros_like(accepted), where=accepted > 0)
    return float(np.trapezoid(precision, accepted / len(u)))


def aurc(unreliability: Any, errors: Any) -> float:
    """Area under the risk-coverage curve: mean over k of the risk of the k most reliable rows."""
    return float(risk_coverage(unreliability, errors).risk.mean())


def e_aurc(unreliability: Any, errors: Any) -> float:
    """``aurc`` in excess of that of the best possible ranking of these errors."""
    u, errors = _scores_and_errors(unreliability, errors)
    return aurc(u, errors) - aurc(errors, errors)


def augrc(unreliability: Any, errors: Any) -> float:
    """Area under the generalised risk-coverage curve: risk times coverage, the chance of an error that is accepted.

    Traub et al., 2024. Trapezoid rule, which makes it equal to ``(1 - auroc) a (1 - a) + (1 - a)^2 / 2`` for 0-1 errors
    and accuracy a.
    """
    curve = risk_coverage(unreliability, errors)
    joint = np.concatenate([[0.0], curve.risk * curve.coverage])
    return float(np.trapezoid(joint, dx=1.0 / len(curve.risk)))


def aupr(unreliability: Any, wrong: Any) -> float:
    """Average precision at finding wrong rows among the least reliable."""
    curve, n_wrong, n_right = _roc_counts(unreliability, wrong)
    refused_wrong, refused = curve.hits * n_wrong, curve.hits * n_wrong + curve.false_alarms * n_right
    return float((np.diff(curve.hits) * refused_wrong[1:] / refused[1:]).sum())


def fpr_at_tpr(unreliability: Any, wrong: Any, *, tpr: float = 0.95) -> float:
    """Share of right rows refused at the highest threshold that refuses at least ``tpr`` of the wrong ones."""
    if not (np.isscalar(tpr) and tpr == 1):
        tpr = check_share("tpr", tpr, "the share of wrong rows to refuse, which may also be 1")
    curve = roc(unreliability, wrong)
    return float(curve.false_alarms[np.argmax(curve.hits >= tpr)])


def roc(unreliability: Any, wrong: Any) -> Roc:
    """The receiver operating characteristic, a point for each distinct score."""
    return _roc_counts(unreliability, wrong)[0]


def risk_coverage(unreliability: Any, errors: Any) -> RiskCoverage:
    """The risk-coverage curve, a point for each number of accepted rows."""
    u, errors = _scores_and_errors(unreliability, errors)
    order = np.lexsort([errors, u])  # errors too, so that sums within a tie do not depend on the order of rows
    u, errors = u[order], errors[order]
    starts = np.flatnonzero(np.concatenate([[True], u[1:] != u[:-1]]))
    sizes = np.diff(starts, append=len(u))
    expected = np.repeat(np.add.reduceat(errors, starts) / sizes, sizes)
    k = np.arange(1, len(u) + 1)
    return RiskCoverage(k / len(u), np.cumsum(expected) / k, u)


def bootstrap(
    metric: Callable[[FloatArray, Any], float],
    unreliability: Any,
    truth: Any,
    *,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """A metric with its percentile bootstrap interval over rows.

    Draws on which the metric is not defined (no wrong row at all, say) are drawn again.

    >>> rng = np.random.default_rng(0)
    >>> wrong = rng.random(500) < 0.2
    >>> print(bootstrap(auroc, rng.normal(size=500) + wrong, wrong))
    0.765 [0.711, 0.817]
    """
    samples = check_count("samples", samples, least=1)
    confidence = check_share("confidence", confidence, "the share of such intervals that hold the true value")
    if not callable(metric):
        raise InvalidInput(f"metric must be a function such as metrics.auroc, and come first. Got {metric!r:.80}.")
    u = check_scores(unreliability)
    truth = as_array(truth, "truth")
    if truth.shape[:1] != u.shape:
        raise InvalidInput(f"truth must have {len(u)} rows, as unreliability. Got shape {truth.shape}.")
    value = check_metric_value(metric(u, truth))
    rng = np.random.default_rng(check_count("seed", seed, least=0))
    values: list[float] = []
    for _ in range(MOST_DRAWS * samples):
        rows = rng.integers(len(u), size=len(u))
        with contextlib.suppress(UndefinedMetric):
            values.append(check_metric_value(metric(u[rows], truth[rows])))
        if len(values) == samples:
            break
    else:
        raise UndefinedMetric(
            f"metric must be defined on most draws of {len(u)} rows. Got {len(values)} of {MOST_DRAWS * samples}; "
            "give it more rows."
        )
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high), confidence)


def _roc_counts(unreliability: Any, wrong: Any) -> tuple[Roc, int, int]:
    u, wrong = _scores_and_wrong(unreliability, wrong)
    values, place = np.unique(-u, return_inverse=True)
    hits = np.cumsum(np.bincount(place, weights=wrong, minlength=len(values)))
    alarms = np.cumsum(np.bincount(place, weights=~wrong, minlength=len(values)))
    n_wrong, n_right = int(wrong.sum()), int((~wrong).sum())
    curve = Roc(
        np.concatenate([[0.0], alarms / n_right]),
        np.concatenate([[0.0], hits / n_wrong]),
        np.concatenate([[np.inf], -values]),
    )
    return curve, n_wrong, n_right


def _published_counts(u: FloatArray, errors: FloatArray, thresholds: int) -> tuple[FloatArray, FloatArray]:
    """Rows accepted and their summed errors at each threshold of the published protocol."""
    thresholds = check_count("thresholds", thresholds, least=1)
    finite = u[np.isfinite(u)]
    if len(finite) == 0:
        raise UndefinedMetric("thresholds need at least one finite unreliability. Got none; leave thresholds=None.")
    steps = 2 * np.linspace(finite.min() / 2, finite.max() / 2, thresholds + 1)  # by halves, as the span may overflow
    order: IntArray = np.lexsort([errors, u])  # errors too: sums then do not depend on the order of rows
    accepted = np.searchsorted(u[order], np.concatenate([[-np.inf], steps, [np.inf]]), side="right")
    cumulated = np.concatenate([[0.0], np.cumsum(errors[order])])
    return accepted.astype(np.float64), cumulated[accepted]


def _scores_and_errors(unreliability: Any, errors: Any) -> tuple[FloatArray, FloatArray]:
    u = check_scores(unreliability)
    return u, check_errors(errors, len(u), remedy=ORDER)


def _scores_and_wrong(unreliability: Any, wrong: Any) -> tuple[FloatArray, BoolArray]:
    u = check_scores(unreliability)
    values = check_errors(wrong, len(u), name="wrong", remedy=ORDER)
    if not ((values == 0) | (values == 1)).all():
        row = int(np.argmax((values != 0) & (values != 1)))
        raise InvalidInput(
            f"wrong must be bool (or 0 and 1). Got {values[row]} in row {row}; compare errors to a level first, "
            "or take a metric that knows errors in [0, 1], such as aucea."
        )
    flags = values.astype(np.bool_)
    if flags.all() or not flags.any():
        raise UndefinedMetric(
            f"wrong must hold both wrong and right rows to compare them. Got {int(flags.sum())} wrong of {len(flags)}."
        )
    return u, flags
