"""What a guard has learned, all of it, in one place: replaced as a whole, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from terrafirma.capture.dropout import Dropout, checked_dropout
from terrafirma.capture.network import Reduction
from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput, NotFitted
from terrafirma.policy import ErrorProbability, Policy
from terrafirma.recorded import Recorded
from terrafirma.scores.subfunction import SubfunctionBound

__all__ = ["AnyScore", "Samples", "Selected", "State", "Wanted", "unreliability_of"]

PASSES = 10  # at each dropout probability


class AnyScore(Protocol):
    """Any unreliability score over recordings: higher = less reliable.

    One that works on features says so by an attribute: ``needs = {"features"}``.
    """

    def fit(self, train: Recorded, validation: Recorded, /) -> Any:
        """Learn from what the network did on training data; choose hyperparameters on validation data."""
        ...

    def unreliability(self, recorded: Recorded, /) -> FloatArray:
        """One number for each sample."""
        ...


@dataclass(frozen=True, eq=False)
class Samples:
    """The training samples behind a table, one by one.

    Attributes
    ----------
    ids : int64 array (N,)
        The number of each sample, counted from the first that ever came; what was forgotten leaves gaps.
    errors : float64 array (N,)
    labels : array (N, ...), optional
    seen : int
        Samples that ever came: the number of the next one.

    """

    ids: IntArray
    errors: FloatArray
    labels: npt.NDArray[Any] | None
    seen: int

    @classmethod
    def first(cls, recorded: Recorded) -> Samples:
        """The samples of a first fit."""
        errors, labels = np.array(recorded.need("errors", by="fit")), recorded.labels
        return cls(np.arange(len(recorded)), errors, None if labels is None else labels.copy(), len(recorded))

    def and_(self, recorded: Recorded) -> Samples:
        """These and the samples of another recording."""
        labels = None
        if self.labels is not None and recorded.labels is not None:
            if self.labels.shape[1:] != recorded.labels.shape[1:]:
                raise InvalidInput(
                    f"labels must have the shape of those before. Got {recorded.labels.shape}, and {self.labels.shape} before."
                )
            labels = np.concatenate([self.labels, recorded.labels])
        return Samples(
            np.concatenate([self.ids, self.seen + np.arange(len(recorded))]),
            np.concatenate([self.errors, np.asarray(recorded.errors)]),
            labels,
            self.seen + len(recorded),
        )

    def rows_without(self, ids: IntArray) -> IntArray:
        """The rows that stay when some samples are forgotten."""
        unknown = ids[~np.isin(ids, self.ids)]
        if len(unknown):
            raise InvalidInput(
                f"rows must be numbers of training samples that are still there, from 0 to {self.seen - 1}. "
                f"Got {unknown[0]} ({len(unknown)} such in all)."
            )
        kept = np.flatnonzero(~np.isin(self.ids, ids))
        if not len(kept):
            raise InvalidInput(f"At least one training sample must stay. Got all {len(self.ids)} to forget; fit anew.")
        return kept

    def __getitem__(self, rows: IntArray) -> Samples:
        labels = None if self.labels is None else self.labels[rows]
        return Samples(self.ids[rows], self.errors[rows], labels, self.seen)


@dataclass(frozen=True)
class Selected:
    """How the hyperparameters were found: the metric of the best, of a random order, and on how many samples.

    ``halved``: these are one half of the validation set, whose other half calibrates.
    """

    metric: float
    chance: float
    n_samples: int
    mean_error: float
    halved: bool


@dataclass(frozen=True, eq=False, repr=False)
class State:
    """Everything that ``Guard.fit`` learned.

    Attributes
    ----------
    score : SubfunctionBound or another fitted score
    network : (name, fingerprint), optional
        Of the network that was recorded.
    classes : array, optional
        Class labels by output column, where the network knows them.
    samples : Samples
    calibration : Recorded
        Kept, so that the policy can be found again when training data comes or goes.
    policy : Policy, optional
        None while it is stale: the score has changed since it was calibrated.
    fingerprints : dict of str to str
        Of the data sets of the fit, where they were recorded here.
    history : tuple of str
        What was done.

    """

    score: SubfunctionBound | AnyScore
    layer_names: tuple[str, ...]
    widths: tuple[int, ...]
    reduce: Reduction
    network: tuple[str, str] | None
    classes: npt.NDArray[Any] | None
    samples: Samples
    calibration: Recorded
    risk: float
    confidence: float
    fingerprints: Mapping[str, str]
    history: tuple[str, ...]
    selected: Selected | None = None
    policy: Policy | None = None
    error_probability: ErrorProbability | None = None

    @property
    def bound(self) -> SubfunctionBound:
        """The score, where it is the subfunction bound: what can explain, add, forget and be exported."""
        if not isinstance(self.score, SubfunctionBound):
            raise InvalidInput(
                f"This needs the subfunction bound. Got a guard with {type(self.score).__name__}; "
                "leave score out of Guard(...)."
            )
        return self.score

    @property
    def table(self) -> RegionTable:
        """The populated regions of the training data."""
        return self.bound.regions_

    @property
    def live(self) -> tuple[Policy, ErrorProbability]:
        """The policy and the error probability of the present score; an error while they are stale."""
        if self.policy is None or self.error_probability is None:
            raise NotFitted(
                "The policy is stale: training data came or went since it was calibrated. Call recalibrate() before predict."
            )
        return self.policy, self.error_probability

    def calibrated(self, risk: float | None = None, confidence: float | None = None) -> State:
        """With the policy and the error probability of the present score."""
        risk = self.risk if risk is None else risk
        confidence = self.confidence if confidence is None else confidence
        unreliability, errors = (
            unreliability_of(self.score, self.calibration),
            self.calibration.need("errors", by="calibrate"),
        )
        return replace(
            self,
            risk=risk,
            confidence=confidence,
            policy=Policy.calibrate(unreliability, errors, risk=risk, confidence=confidence),
            error_probability=ErrorProbability.fit(unreliability, errors),
        )

    def with_table(self, table: RegionTable, samples: Samples, event: str) -> State:
        """With other training data, and the policy stale."""
        old = self.bound
        score = SubfunctionBound(old.rho, old.delta, old.weighting).fit_table(table)
        return replace(
            self, score=score, samples=samples, history=(*self.history, event), policy=None, error_probability=None
        )


def unreliability_of(score: SubfunctionBound | AnyScore, recorded: Recorded) -> FloatArray:
    """The score of each sample of a recording."""
    if isinstance(score, SubfunctionBound):
        return score.unreliability(recorded.need("patterns", by="The subfunction bound"))
    return score.unreliability(recorded)


@dataclass(frozen=True)
class Wanted:
    """What to record of a network: layers and their reduction, and what a score needs beside patterns and outputs."""

    layers: Sequence[str] | None
    reduce: Reduction
    features: bool
    inputs: bool
    dropout: Dropout | None
    outputs: bool

    @classmethod
    def by(cls, score: SubfunctionBound | AnyScore | None, layers: Sequence[str] | None, reduce: Reduction) -> Wanted:
        """What this score needs of these layers."""
        needs: frozenset[str] = frozenset(getattr(score, "needs", ()))
        return cls(
            layers=layers,
            reduce=reduce,
            features=not needs.isdisjoint({"features", "layers"}),
            inputs="inputs" in needs,
            dropout=checked_dropout(getattr(score, "dropouts", ()), PASSES, seed=0),
            outputs=not (score is None or isinstance(score, SubfunctionBound)),
        )

    def to_train(self, score: SubfunctionBound | AnyScore | None) -> Wanted:
        """What this score needs of the training data: no passes with dropout, and inputs only if it learns from them."""
        needs = getattr(score, "train_needs", getattr(score, "needs", ()))
        return replace(self, dropout=None, inputs="inputs" in needs)
