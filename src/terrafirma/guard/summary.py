"""A guard in a few lines: what it watches, what it learned from, what it promises."""

from __future__ import annotations

from terrafirma.guard.state import AnyScore, Selected, State
from terrafirma.scores.base import Score
from terrafirma.scores.subfunction import SubfunctionBound

__all__ = ["summary"]


def summary(state: State, name: str) -> str:
    """The lines that ``fit`` prints; ``name`` is the network's."""
    widths = zip(state.layer_names, state.widths, strict=False)
    layers = ", ".join(f"{layer} ({width} units)" for layer, width in widths)
    samples, calibration = state.samples, state.calibration.need("errors", by="summary")
    regions = f" in {len(state.table)} regions" if isinstance(state.score, SubfunctionBound) else ""
    lines = [
        f"Guard of {name}{': ' if layers else ''}{layers}",
        f"  trained on   {len(samples.ids)} samples{regions}, mean error {samples.errors.mean():.4g}",
        f"  score        {_score(state)}",
        f"  policy       {'stale: call recalibrate()' if state.policy is None else state.policy}",
        f"               calibrated on {len(calibration)} samples{_half(state)}, mean error {calibration.mean():.4g}",
        *_warnings(state),
    ]
    return "\n".join(lines)


def _half(state: State) -> str:
    return " (the other half of validation)" if state.selected is not None and state.selected.halved else ""


def _warnings(state: State) -> list[str]:
    """What a user must not overlook."""
    found = state.selected
    if found is not None and found.mean_error > 0 and found.metric <= found.chance:
        return ["  warning      this ranks errors no better than a random order does: record other layers (layers=...)"]
    return []


def _other(score: AnyScore, found: Selected | None) -> str:
    """Another score than the bound: its name, what was chosen, and how well it ranks."""
    name = repr(score) if isinstance(score, Score) else type(score).__name__
    if found is None or found.mean_error == 0:
        return name
    half = " (half of validation)" if found.halved else ""
    return f"{name}: on {found.n_samples} samples{half}, AUCEA {found.metric:.4f} (a random order: {found.chance:.4f})"


def _score(state: State) -> str:
    score, found = state.score, state.selected
    if not isinstance(score, SubfunctionBound):
        return _other(score, found)
    width = f"rho {score.rho:.4g} bits" if score.weighting is None else repr(score.weighting)
    kind = f"{width}, delta {score.delta:g}"
    if found is None:
        return kind
    if found.mean_error == 0:
        return f"{kind}: the first of the grid, for none of the {found.n_samples} samples to select on is wrong"
    half = " (half of validation)" if found.halved else ""
    chance = f"a random order: {found.chance:.4f}"
    return f"{kind}: best of the grid on {found.n_samples} samples{half}, AUCEA {found.metric:.4f} ({chance})"
