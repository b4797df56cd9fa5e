"""What a guard learns once everything is recorded: the first time, and when training data comes or goes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from terrafirma import metrics
from terrafirma.core._checks import as_array
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput
from terrafirma.guard.state import AnyScore, Samples, Selected, State
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score
from terrafirma.scores.subfunction import SubfunctionBound
from terrafirma.scores.subfunction_search import Subfunction, select_for

__all__ = ["check_fits", "kept_for_calibration", "learn", "recalibrated", "with_more", "without"]

BOUND = "The subfunction bound"


def learn(
    score: SubfunctionBound | AnyScore | None,
    train: Recorded,
    validation: Recorded,
    calibrate_on: Callable[[SubfunctionBound | AnyScore], Recorded] | None,
    **more: Any,
) -> State:
    """The state of a first fit; ``more`` holds risk, confidence and what else a ``State`` has to know.

    ``calibrate_on`` gives the calibration data once the score is fitted, which knows what has to be recorded; without it, half
    of the validation data calibrates.
    """
    fingerprints: dict[str, str] = {}

    def check(name: str, recorded: Recorded) -> None:
        check_fits(name, recorded, train)
        _check_new(name, recorded, fingerprints)

    check("train", train)
    check("validation", validation)
    fitted, selected, rest = _fitted(score, train, validation, halve=calibrate_on is None)
    if calibrate_on is not None:
        rest = calibrate_on(fitted)
        check("calibration", rest)
    return State(
        score=fitted,
        selected=selected,
        layer_names=train.layer_names,
        widths=train.widths,
        network=_network(train),
        samples=Samples.first(train),
        calibration=kept_for_calibration(fitted, rest),
        fingerprints=fingerprints,
        history=(f"fit on {len(train)} samples",),
        **more,
    ).calibrated()


def check_fits(name: str, recorded: Recorded, train: Recorded | State) -> None:
    """Raise where a recording is of another network, or of other layers, than the training data's."""
    if recorded.layer_names and train.layer_names and recorded.layer_names != train.layer_names:
        difference = f"layers {', '.join(recorded.layer_names)} instead of {', '.join(train.layer_names)}"
    elif recorded.source and (known := _network(train)) and recorded.source.model_fingerprint != known[1]:
        mark = recorded.source.model_fingerprint
        difference = f"network {recorded.source.model} {mark[:12]} instead of {known[0]} {known[1][:12]}"
    elif recorded.widths and train.widths and sum(recorded.widths) != sum(train.widths):
        difference = f"{sum(recorded.widths)} units instead of {sum(train.widths)}"
    else:
        return
    raise InvalidInput(f"{name} must be recorded as the training data was. Got {difference}; record both alike.")


def _network(train: Recorded | State) -> tuple[str, str] | None:
    """Name and fingerprint of the network that was recorded."""
    if isinstance(train, State):
        return train.network
    return None if train.source is None else (train.source.model, train.source.model_fingerprint)


def _check_new(name: str, recorded: Recorded, fingerprints: dict[str, str]) -> None:
    """Raise where these samples were used for something else; note them."""
    if recorded.source is None:
        return
    mark = recorded.source.data_fingerprint
    for other, fingerprint in fingerprints.items():
        if fingerprint == mark:
            raise InvalidInput(
                f"{name} must be other samples than {other}: what was used once says nothing new. Got the same; hold some out."
            )
    fingerprints[name] = mark


def with_more(state: State, more: Recorded) -> State:
    """The state with more training data, its table that of a fit on all; the policy is stale."""
    check_fits("data", more, state)
    fingerprints = dict(state.fingerprints)
    _check_new(f"addition {len(state.history)}", more, fingerprints)
    samples = state.samples.and_(more)
    merged = state.table.merge(_table(more))
    # errors are summed anew, sample by sample: the sum of two sums may round otherwise
    table = merged.of_samples(np.arange(len(samples.ids)), samples.errors)
    return replace(state.with_table(table, samples, f"added {len(more)} samples"), fingerprints=fingerprints)


def without(state: State, rows: Any) -> State:
    """The state without some training samples, its table that of a fit on the others; the policy is stale."""
    table, ids = state.table, as_array(rows, "rows")
    ids = ids if ids.size else ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise InvalidInput(f"rows must be numbers of training samples. Got {ids.dtype}; use np.flatnonzero of a mask.")
    kept = state.samples.rows_without(np.unique(ids))
    samples = state.samples[kept]
    event = f"forgot {len(state.samples.ids) - len(kept)} samples"
    return state.with_table(table.of_samples(kept, samples.errors), samples, event)


def kept_for_calibration(score: SubfunctionBound | AnyScore, calibration: Recorded) -> Recorded:
    """What a later calibration needs of a recording."""
    if isinstance(score, SubfunctionBound):
        patterns, errors = calibration.need("patterns", "errors", by=BOUND)
        return Recorded(patterns=PackedPatterns(patterns.words.copy(), patterns.n_units), errors=errors.copy())
    if isinstance(score, Score):
        passes = {p: value for p, value in calibration.stochastic.items() if p in score.dropouts}
        kept = replace(calibration, stochastic=passes).only(score.needs | score.helped_by | {"errors"})
        return kept[np.arange(len(kept))]  # a copy
    return calibration


def recalibrated(state: State, calibration: Recorded) -> State:
    """The state with other calibration data; its policy is that of before."""
    check_fits("calibration", calibration, state)
    fingerprints = {name: mark for name, mark in state.fingerprints.items() if name != "calibration"}
    _check_new("calibration", calibration, fingerprints)
    kept = kept_for_calibration(state.score, calibration)
    event = f"calibrated on {len(calibration)} other samples"
    return replace(state, calibration=kept, fingerprints=fingerprints, history=(*state.history, event))


def _fitted(
    score: SubfunctionBound | AnyScore | None, train: Recorded, validation: Recorded, *, halve: bool
) -> tuple[SubfunctionBound | AnyScore, Selected | None, Recorded]:
    """The fitted score, how it was selected, and the part of the validation set that this did not see."""
    if isinstance(score, SubfunctionBound):
        return SubfunctionBound(score.rho, score.delta, score.weighting).fit_table(_table(train)), None, validation
    if isinstance(score, Score) and not score.learns_on(validation):
        return copy.copy(score).fit(train, validation), None, validation
    choosing, rest = _halves(validation) if halve else (validation, validation)
    if score is not None and not isinstance(score, Subfunction):
        # the user's own stays as it is, should anything fail
        score = copy.copy(score) if isinstance(score, Score) else copy.deepcopy(score)
        fitted = score.fit(train, choosing) or score
        errors = choosing.need("errors", by="fit")
        ranked, chance = (metrics.aucea(u, errors) for u in (fitted.unreliability(choosing), np.zeros(len(errors))))
        return fitted, Selected(ranked, chance, len(choosing), float(errors.mean()), halved=halve), rest
    patterns, errors = choosing.need("patterns", "errors", by=BOUND)
    given = (None, None) if score is None else (score.rho, score.delta)
    rhos, deltas = (None if value is None else [value] for value in given)
    found = select_for(_table(train), patterns, errors, rhos, deltas)
    selected = Selected(found.metric, found.chance or 0.0, len(choosing), float(errors.mean()), halved=halve)
    return found.best, selected, rest


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
