"""What a guard says: of new samples, and of itself on a test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import metrics
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput, UndefinedMetric
from terrafirma.policy.certificate import clopper_pearson_upper

__all__ = ["Evaluation", "Verdict", "evaluate"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What to think of n predictions: numpy arrays, or torch tensors on the device of the inputs where these were tensors.

    Attributes
    ----------
    prediction : (n,) class labels; for anything but a classifier the output itself, (n,) where it is one number
    output : (n, ...) as the network gave it
    unreliability : float64 (n,), higher = less reliable
    accepted : bool (n,)
    error_probability : float64 (n,), the calibrated probability that the prediction is wrong (or the expected error)

    """

    prediction: Any
    output: Any
    unreliability: Any
    accepted: Any
    error_probability: Any

    def __len__(self) -> int:
        return len(self.unreliability)

    def __repr__(self) -> str:
        accepted = int(self.accepted.sum())
        return f"<Verdict on {len(self)} predictions: {accepted} accepted, {len(self) - accepted} refused>"

    def in_framework_of(self, inputs: Any) -> Verdict:
        """As tensors on the device of the inputs, where these are tensors."""
        tensor = _first_tensor(inputs)
        if tensor is None:
            return self
        import torch

        def convert(value: npt.NDArray[Any]) -> Any:
            if value.dtype.kind not in "biuf":  # names of classes have no tensor
                return value
            narrow = tensor.device.type == "mps" and value.dtype == np.float64  # which has no such type
            return torch.from_numpy(value.astype(np.float32) if narrow else value).to(tensor.device)

        return replace(self, **{part.name: convert(getattr(self, part.name)) for part in fields(self)})


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """How a guard does on a test set.

    Attributes
    ----------
    n_samples : int
    error : float
        Mean error of all predictions.
    coverage : float
        Share accepted.
    risk, error_refused : float
        Mean error of the accepted and of the refused predictions; NaN where there is none.
    risk_interval : (low, high), optional
        95 % confidence interval of the risk; for errors of 0 and 1.
    promised_risk, promised_confidence : float
        What the policy promises.
    aucea : float
        Mean accuracy over all shares accepted, the most reliable first.
    aucea_chance : float
        That of a random order.
    auroc : float, optional
        Of telling wrong from right; None where errors are not 0 and 1, or all alike.
    unreliability, errors : float64 arrays (n,)

    """

    n_samples: int
    error: float
    coverage: float
    risk: float
    risk_interval: tuple[float, float] | None
    error_refused: float
    promised_risk: float
    promised_confidence: float
    aucea: float
    aucea_chance: float
    auroc: float | None
    unreliability: FloatArray
    errors: FloatArray

    def risk_at(self, coverage: float) -> float:
        """Mean error of this share of the predictions, the most reliable; those that tie with the last count as a share."""
        _check_share("coverage", coverage)
        curve = metrics.risk_coverage(self.unreliability, self.errors)
        return float(curve.risk[max(1, round(coverage * self.n_samples)) - 1])

    def coverage_at(self, risk: float) -> float:
        """The largest share of the most reliable predictions whose mean error is at most this."""
        _check_share("risk", risk)
        curve = metrics.risk_coverage(self.unreliability, self.errors)
        within = np.flatnonzero(curve.risk <= risk)
        return float(curve.coverage[within[-1]]) if len(within) else 0.0

    def __repr__(self) -> str:
        auroc = "" if self.auroc is None else f", AUROC for wrong ones {self.auroc:.3f}"
        aucea = f"AUCEA {self.aucea:.4f} (a random order: {self.aucea_chance:.4f})"
        return f"{self.n_samples} predictions, mean error {self.error:.4g}; {aucea}{auroc}.\n{self._decided()}"

    def _decided(self) -> str:
        promise = f"promised: at most {self.promised_risk:.4g} at {self.promised_confidence:.0%} confidence"
        if not self.coverage:
            return f"None accepted ({promise})."
        interval = ""
        if self.risk_interval is not None:
            interval = " (95 % interval {:.2g} to {:.2g})".format(*self.risk_interval)
        refused = f"; of the refused {self.error_refused:.4g}" if self.coverage < 1 else ""
        return f"{self.coverage:.1%} accepted, with mean error {self.risk:.4g}{interval}{refused}; {promise}."


def evaluate(
    unreliability: FloatArray, errors: FloatArray, accepted: npt.NDArray[np.bool_], risk: float, confidence: float
) -> Evaluation:
    """The figures of a test set."""
    binary = bool(np.isin(errors, (0, 1)).all())
    try:
        auroc = metrics.auroc(unreliability, errors == 1) if binary else None
    except UndefinedMetric:
        auroc = None
    taken = errors[accepted]
    return Evaluation(
        n_samples=len(errors),
        error=float(errors.mean()),
        coverage=float(accepted.mean()),
        risk=_mean(taken),
        risk_interval=_interval(taken) if binary and len(taken) else None,
        error_refused=_mean(errors[~accepted]),
        promised_risk=risk,
        promised_confidence=confidence,
        aucea=metrics.aucea(unreliability, errors),
        aucea_chance=metrics.aucea(np.zeros(len(errors)), errors),
        auroc=auroc,
        unreliability=unreliability,
        errors=errors,
    )


def _interval(wrong: FloatArray) -> tuple[float, float]:
    """Clopper and Pearson's, 95 %."""
    n, k = len(wrong), float(wrong.sum())
    return 1 - clopper_pearson_upper(n - k, n, 0.025), clopper_pearson_upper(k, n, 0.025)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidInput(f"{name} must lie in [0, 1]. Got {value!r}.")


def _mean(errors: FloatArray) -> float:
    return float(errors.mean()) if len(errors) else float("nan")


def _first_tensor(inputs: Any) -> Any:
    """The first torch tensor among some inputs; None where there is none."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple | list):
        return next((found for found in map(_first_tensor, inputs) if found is not None), None)
    return inputs if type(inputs).__module__.partition(".")[0] == "torch" and hasattr(inputs, "device") else None
