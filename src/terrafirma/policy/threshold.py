"""Policies: accept a prediction where its unreliability is at most a threshold, else abstain."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array, check_count, check_positive, check_scores, check_share
from terrafirma.core.patterns import BoolArray, FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.policy._common import Arrays, Settings, Stored, scores_and_errors
from terrafirma.policy.certificate import certify, is_binary, risk_upper, why_nothing

__all__ = ["GroupPolicy", "Policy"]

LOWEST = -float(np.finfo(np.float64).max)  # as a threshold it accepts -inf, whereas a threshold of -inf accepts nothing
RISK = "the largest mean error of accepted predictions to allow"
CONFIDENCE = "the probability with which the promise holds"


@dataclass(frozen=True, repr=False)
class Policy(Stored):
    """Accept a prediction where its unreliability is at most a threshold, else abstain.

    Attributes
    ----------
    threshold : float
        Accepted where u <= threshold; -inf accepts nothing, and u = +inf is never accepted.
    n_samples, n_accepted : int
        Calibration samples, and how many of them are accepted.
    promise : str
        What holds for new samples like those of the calibration.
    risk_bound : float
        Upper limit of the accepted predictions' mean error, at most ``risk``; 1 where no risk is promised.
    risk, confidence : float, optional
        What ``calibrate`` was asked for.
    errors_accepted : float, optional
        Summed error of the accepted calibration samples.
    reason : str
        Why nothing is accepted, and what would help; empty otherwise.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> u = rng.random(5000)
    >>> policy = Policy.calibrate(u, errors=rng.random(5000) < 0.3 * u**4, risk=0.02)
    >>> policy.accept([0.1, 0.5, 0.9])
    array([ True,  True, False])

    """

    threshold: float
    n_samples: int
    n_accepted: int
    promise: str
    risk_bound: float = 1.0
    risk: float | None = None
    confidence: float | None = None
    errors_accepted: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        n = check_count("n_samples", self.n_samples, least=1)
        _check_within("n_accepted", check_count("n_accepted", self.n_accepted, least=0), 0, n)
        _check_within("threshold", self.threshold, -math.inf, -LOWEST)
        _check_within("risk_bound", self.risk_bound, 0, 1)
        if self.errors_accepted is not None:
            _check_within("errors_accepted", self.errors_accepted, 0, self.n_accepted)
        for name, meaning in (("risk", RISK), ("confidence", CONFIDENCE)):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name), meaning)
        if (self.threshold == -math.inf) != (self.n_accepted == 0):
            raise InvalidInput(
                f"threshold must be -inf just where nothing is accepted. Got {self.threshold} with {self.n_accepted} "
                "accepted; let calibrate choose it."
            )
        if not (isinstance(self.promise, str) and isinstance(self.reason, str)):
            raise InvalidInput(f"promise and reason must be text. Got {self.promise!r:.40} and {self.reason!r:.40}.")

    @overload
    @classmethod
    def calibrate(
        cls, unreliability: Any, errors: Any, risk: float = ..., confidence: float = ..., groups: None = None
    ) -> Policy: ...

    @overload
    @classmethod
    def calibrate(
        cls, unreliability: Any, errors: Any, risk: float = ..., confidence: float = ..., *, groups: Any
    ) -> GroupPolicy: ...

    @classmethod
    def calibrate(
        cls, unreliability: Any, errors: Any, risk: float = 0.02, confidence: float = 0.95, groups: Any = None
    ) -> Policy | GroupPolicy:
        """The largest coverage found whose risk is certified: the mean error of accepted predictions is at most ``risk``.

        Parameters
        ----------
        unreliability, errors : array (n,)
            Of samples drawn as those to come, and used for nothing before; errors in [0, 1], for a classifier
            ``prediction != label``.
        risk, confidence : float
            The promise holds with probability ``confidence`` over the draw of these samples.
        groups : array (n,), optional
            Of integers or strings, such as the predicted class: each group gets a threshold and a promise of its own.

        """
        if groups is not None:
            return _calibrate_groups(unreliability, errors, risk, confidence, groups)
        u, errors = scores_and_errors(unreliability, errors)
        risk, confidence = check_share("risk", risk, RISK), check_share("confidence", confidence, CONFIDENCE)
        # tied rows in an order that does not depend on their errors, whatever the order in which they came
        order = np.lexsort([np.random.default_rng(0).permutation(len(u)), u])
        u, errors = u[order], errors[order]
        whole = u < np.append(u[1:], np.inf)
        accepted, level = certify(errors, whole, risk, 1 - confidence)
        promise = (
            f"at most {100 * risk:g} % of accepted predictions are wrong"
            if is_binary(errors)
            else f"the mean error of accepted predictions is at most {risk:g}"
        )
        return cls(
            _threshold(u, accepted),
            len(u),
            accepted,
            promise=f"with {100 * confidence:g} % confidence, {promise}",
            risk_bound=min(risk, risk_upper(errors, accepted, level)) if accepted else 0.0,
            risk=risk,
            confidence=confidence,
            errors_accepted=float(errors[:accepted].sum()),
            reason="" if accepted else why_nothing(errors, whole, risk, 1 - confidence),
        )

    @classmethod
    def at_coverage(cls, unreliability: Any, coverage: float) -> Policy:
        """Accept at least this share of in-distribution samples: the conformal quantile, with its n + 1.

        A new sample drawn as these is accepted with probability >= coverage, over the draw of both.
        """
        coverage = check_share("coverage", coverage, "the share of in-distribution samples to accept")
        return cls._quantile(
            unreliability, 1 - coverage, f"a new sample is accepted with probability at least {100 * coverage:g} %"
        )

    @classmethod
    def at_false_alarm(cls, unreliability: Any, rate: float) -> Policy:
        """Refuse at most this share of in-distribution samples: the same quantile, as detectors of OOD state it."""
        rate = check_share("rate", rate, "the share of in-distribution samples to refuse at most")
        return cls._quantile(
            unreliability, rate, f"a new in-distribution sample is refused with probability at most {100 * rate:g} %"
        )

    @classmethod
    def min_cost(
        cls,
        unreliability: Any,
        errors: Any,
        *,
        wrong: float,
        abstain: float,
        unreliability_ood: Any = None,
        ood: float | None = None,
        ood_share: float | None = None,
    ) -> Policy:
        """The threshold of least mean cost on these samples; nothing is promised about others.

        Parameters
        ----------
        unreliability, errors : array (n,)
            As for ``calibrate``.
        wrong, abstain : float
            Cost of a wrong answer (of error 1) and of no answer.
        unreliability_ood, ood, ood_share : array (m,), float, float, optional
            Out-of-distribution samples, the cost of accepting one, and their assumed share in use.

        """
        u, errors = scores_and_errors(unreliability, errors)
        wrong = check_positive("wrong", wrong, "the cost of a wrong answer")
        abstain = check_positive("abstain", abstain, "the cost of no answer")
        order = np.lexsort([errors, u])
        u, errors = u[order], errors[order]
        candidates = np.append(0, 1 + np.flatnonzero(u < np.append(u[1:], np.inf)))  # how many rows to accept
        cost = wrong * np.append(0.0, np.cumsum(errors))[candidates] / len(u) + abstain * (1 - candidates / len(u))
        given = [value is not None for value in (unreliability_ood, ood, ood_share)]
        if any(given) != all(given):
            raise InvalidInput(
                f"unreliability_ood, ood and ood_share must be given together. Got {sum(given)} of 3; add the others."
            )
        if unreliability_ood is not None:
            ood = check_positive("ood", ood, "the cost of accepting an out-of-distribution sample")
            share = check_share("ood_share", ood_share, "the assumed share of out-of-distribution samples")
            u_ood = np.sort(check_scores(unreliability_ood, "unreliability_ood"))
            thresholds = np.append(-np.inf, u)[candidates]
            taken = np.searchsorted(u_ood, thresholds, side="right") / len(u_ood) * (candidates > 0)
            cost = (1 - share) * cost + share * (ood * taken + abstain * (1 - taken))
        best = int(np.flatnonzero(cost == cost.min())[-1])
        accepted = int(candidates[best])
        return cls(
            _threshold(u, accepted),
            len(u),
            accepted,
            promise=f"the least mean cost on the calibration samples is {cost[best]:.4g}; nothing is promised on others",
            errors_accepted=float(errors[:accepted].sum()),
            reason="" if accepted else f"To abstain always costs {abstain:g}, and every threshold costs more.",
        )

    @property
    def coverage(self) -> float:
        """Share of the calibration samples that is accepted."""
        return self.n_accepted / self.n_samples

    def accept(self, unreliability: Any) -> BoolArray:
        """Whether to accept each prediction, bool (n,)."""
        u = check_scores(unreliability, may_be_empty=True)
        return (u <= self.threshold) & (self.threshold > -math.inf)

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Its arrays and settings, for a file."""
        settings = asdict(self)
        return {"threshold": np.array([settings.pop("threshold")])}, settings

    @classmethod
    def from_arrays(cls, arrays: Arrays, settings: Settings) -> Self:
        """What ``to_arrays`` took apart, checked anew."""
        return cls(arrays["threshold"].item(), **settings)

    def __str__(self) -> str:
        if not self.n_accepted:
            return f"accepts nothing: {self.reason}"
        share = f"{self.n_accepted} of {self.n_samples} calibration samples ({100 * self.coverage:.1f} %)"
        return f"accepts unreliability <= {self.threshold:.6g}, {share}; {self.promise}"

    def __repr__(self) -> str:
        return f"<Policy {self}>"

    @classmethod
    def _quantile(cls, unreliability: Any, rate: float, promise: str) -> Policy:
        u = np.sort(check_scores(unreliability))
        refused = math.floor((len(u) + 1) * rate + 1e-9)  # of n + 1; 0.07 * 100 is 7, whatever floats make of it
        if not refused:
            raise InvalidInput(
                f"A share of {rate:g} refused at most needs at least {math.ceil(1 / rate - 1e-9) - 1} samples. "
                f"Got {len(u)}; give it more, or ask for less."
            )
        threshold = u[len(u) - refused]
        if threshold == np.inf:
            raise InvalidInput(
                f"unreliability must be below +inf for more rows to accept that many. Got {np.sum(u == np.inf)} of "
                f"{len(u)} at +inf, which is never accepted; ask for less."
            )
        accepted = int(np.searchsorted(u, threshold, side="right"))
        return cls(_threshold(u, accepted), len(u), accepted, promise)


@dataclass(frozen=True, repr=False)
class GroupPolicy(Stored):
    """A policy for each group, such as each predicted class; a group that calibration did not see is refused.

    Each group's promise holds on its own with the confidence asked for. To have all G hold at once with confidence c,
    calibrate with ``confidence=1 - (1 - c) / G``.
    """

    labels: tuple[int | str, ...]
    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        fit = len(self.labels) == len(self.policies) == len(set(self.labels)) > 0
        if not fit or not all(isinstance(policy, Policy) for policy in self.policies):
            raise InvalidInput(
                f"labels must differ and go with one Policy each. Got {len(self.labels)} labels and "
                f"{len(self.policies)} policies; calibrate with groups=."
            )

    def __getitem__(self, label: int | str) -> Policy:
        return self.policies[self.labels.index(label)]

    @property
    def coverage(self) -> float:
        """Share of the calibration samples that is accepted, over all groups."""
        return sum(p.n_accepted for p in self.policies) / sum(p.n_samples for p in self.policies)

    def accept(self, unreliability: Any, groups: Any) -> BoolArray:
        """Whether to accept each prediction by the policy of its group, bool (n,)."""
        u = check_scores(unreliability, may_be_empty=True)
        groups = _checked_groups(groups, len(u))
        accepted = np.zeros(len(u), dtype=np.bool_)
        for label, policy in zip(self.labels, self.policies, strict=True):
            rows = groups == label
            accepted[rows] = policy.accept(u[rows])
        return accepted

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """Its arrays and settings, for a file."""
        parts = [policy.to_arrays() for policy in self.policies]
        thresholds = np.concatenate([arrays["threshold"] for arrays, _ in parts])
        return {"thresholds": thresholds}, {"labels": list(self.labels), "policies": [part for _, part in parts]}

    @classmethod
    def from_arrays(cls, arrays: Arrays, settings: Settings) -> Self:
        """What ``to_arrays`` took apart, checked anew."""
        parts = zip(arrays["thresholds"], settings["policies"], strict=True)
        return cls(tuple(settings["labels"]), tuple(Policy(threshold.item(), **part) for threshold, part in parts))

    def __str__(self) -> str:
        return "\n".join(f"group {label}: {policy}" for label, policy in zip(self.labels, self.policies, strict=True))

    def __repr__(self) -> str:
        return f"<GroupPolicy of {len(self.labels)} groups, accepts {100 * self.coverage:.1f} % of calibration samples>"


def _threshold(u: FloatArray, accepted: int) -> float:
    """The threshold that accepts just the first rows of sorted ``u``."""
    return max(float(u[accepted - 1]), LOWEST) if accepted else -math.inf


def _calibrate_groups(unreliability: Any, errors: Any, risk: float, confidence: float, groups: Any) -> GroupPolicy:
    u, errors = scores_and_errors(unreliability, errors)
    groups = _checked_groups(groups, len(u))
    labels = np.unique(groups)
    rows = [groups == label for label in labels]
    return GroupPolicy(
        tuple(labels.tolist()), tuple(Policy.calibrate(u[row], errors[row], risk, confidence) for row in rows)
    )


def _checked_groups(groups: Any, n: int) -> npt.NDArray[Any]:
    labels = as_array(groups, "groups")
    if labels.dtype.kind not in "biuU" or labels.shape != (n,):
        raise InvalidInput(
            f"groups must be integers or strings of shape ({n},), one for each row. Got {labels.dtype} of shape "
            f"{labels.shape}; for predicted classes use argmax."
        )
    return labels


def _check_within(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless ``value`` is a number from ``low`` to ``high``."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidInput(
            f"{name} must be a number from {low:g} to {high:g}. Got {value!r:.80}; let calibrate find it."
        )
