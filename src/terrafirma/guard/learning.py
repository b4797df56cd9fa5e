"""What a guard learns once everything is recorded: the first time, and when training data comes or goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from terrafirma.core._checks import as_array
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput
from terrafirma.guard.state import Samples, Score, Selected, State
from terrafirma.recorded import Recorded
from terrafirma.scores.subfunction import SubfunctionBound
from terrafirma.selection import select_for

__all__ = ["kept_for_calibration", "learn", "with_more", "without"]

BOUND = "The subfunction bound"


def learn(
    score: SubfunctionBound | Score | None,
    train: Recorded,
    validation: Recorded,
    calibration: Recorded | None,
    **promise: Any,
) -> State:
    """The state of a first fit; ``promise`` holds risk, confidence and what else a ``State`` has to know."""
    fitted, selected, rest = _fitted(score, train, validation, share=calibration is None)
    named = {"train": train, "validation": validation, "calibration": calibration}
    return State(
        score=fitted,
        selected=selected,
        layer_names=train.layer_names,
        widths=train.widths,
        classifies=train.is_classification,
        samples=Samples.first(train),
        calibration=kept_for_calibration(fitted, rest if calibration is None else calibration),
        fingerprints={name: data.source.data_fingerprint for name, data in named.items() if data and data.source},
        history=(f"fit on {len(train)} samples",),
        **promise,
    ).calibrated()


def with_more(state: State, more: Recorded) -> State:
    """The state with more training data, its table that of a fit on all; the policy is stale."""
    samples = state.samples.and_(more)
    merged = state.table.merge(_table(more))
    # errors are summed anew, sample by sample: the sum of two sums may round otherwise
    table = merged.of_samples(np.arange(len(samples.ids)), samples.errors)
    return state.with_table(table, samples, f"added {len(more)} samples")


def without(state: State, rows: Any) -> State:
    """The state without some training samples, its table that of a fit on the others; the policy is stale."""
    table, ids = state.table, as_array(rows, "rows")
    if ids.dtype.kind not in "iu":
        raise InvalidInput(f"rows must be numbers of training samples. Got {ids.dtype}; use np.flatnonzero of a mask.")
    kept = state.samples.rows_without(np.unique(ids))
    samples = state.samples[kept]
    event = f"forgot {len(state.samples.ids) - len(kept)} samples"
    return state.with_table(table.of_samples(kept, samples.errors), samples, event)


def kept_for_calibration(score: SubfunctionBound | Score, calibration: Recorded) -> Recorded:
    """What a later calibration needs of a recording."""
    if isinstance(score, SubfunctionBound):
        patterns, errors = calibration.need("patterns", "errors", by=BOUND)
        return Recorded(patterns=patterns, errors=errors)
    return calibration


def _fitted(
    score: SubfunctionBound | Score | None, train: Recorded, validation: Recorded, *, share: bool
) -> tuple[SubfunctionBound | Score, Selected | None, Recorded]:
    """The fitted score, how it was selected, and the part of the validation set that this did not see."""
    if isinstance(score, SubfunctionBound):
        return SubfunctionBound(score.rho, score.delta, score.weighting).fit_table(_table(train)), None, validation
    choosing, rest = _halves(validation) if share else (validation, validation)
    if score is not None:
        return score.fit(train, choosing) or score, None, rest
    patterns, errors = choosing.need("patterns", "errors", by=BOUND)
    found = select_for(_table(train), patterns, errors)
    return found.best, Selected(found.metric, found.chance or 0.0, len(choosing), float(errors.mean())), rest


def _table(train: Recorded) -> RegionTable:
    patterns, errors = train.need("patterns", "errors", by=BOUND)
    return RegionTable.build(patterns, errors, keep_samples=True)


def _halves(validation: Recorded) -> tuple[Recorded, Recorded]:
    """Two random halves, the same each time: what selection sees must not calibrate."""
    n = len(validation)
    if n < 2:
        raise InvalidInput(
            f"validation must have at least 2 samples, to be cut into halves. Got {n}; give calibration=, too."
        )
    order = np.random.default_rng(0).permutation(n)
    return validation[np.sort(order[: n // 2])], validation[np.sort(order[n // 2 :])]
