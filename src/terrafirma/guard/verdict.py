"""What a guard says: of new samples, and of itself on a test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import metrics
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import UndefinedMetric

__all__ = ["Evaluation", "Verdict", "evaluate"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What to think of n predictions: numpy arrays, or torch tensors on the device of the inputs where these were tensors.

    Attributes
    ----------
    prediction : (n,) class labels; for anything but a classifier the output itself
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


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How a guard does on a test set.

    Attributes
    ----------
    n_samples : int
    mean_error, mean_error_accepted, mean_error_refused : float
        Of all; of the accepted and of the refused predictions, NaN where there is none.
    coverage : float
        Share accepted.
    risk, confidence : float
        What the policy promises.
    aucea : float
    auroc : float, optional
        Of telling wrong from right; None where errors are not 0 and 1, or all alike.
    unreliability, errors : float64 arrays (n,)

    """

    n_samples: int
    mean_error: float
    mean_error_accepted: float
    mean_error_refused: float
    coverage: float
    risk: float
    confidence: float
    aucea: float
    auroc: float | None
    unreliability: FloatArray
    errors: FloatArray

    def risk_at(self, coverage: float) -> float:
        """Mean error of this share of the predictions, the most reliable; those that tie with the last count as a share."""
        curve = metrics.risk_coverage(self.unreliability, self.errors)
        return float(curve.risk[max(1, round(coverage * self.n_samples)) - 1])

    def coverage_at(self, risk: float) -> float:
        """The largest share of the most reliable predictions whose mean error is at most this."""
        curve = metrics.risk_coverage(self.unreliability, self.errors)
        within = np.flatnonzero(curve.risk <= risk)
        return float(curve.coverage[within[-1]]) if len(within) else 0.0

    def __str__(self) -> str:
        auroc = "" if self.auroc is None else f", AUROC for wrong ones {self.auroc:.3f}"
        promise = f"promised: at most {self.risk:.4g} at {self.confidence:.0%} confidence"
        accepted = f"{self.coverage:.1%} accepted, with mean error {self.mean_error_accepted:.4g} ({promise})"
        refused = f"of the refused {self.mean_error_refused:.4g}"
        decided = {0.0: "None accepted.", 1.0: f"{accepted}."}.get(self.coverage, f"{accepted}; {refused}.")
        return (
            f"{self.n_samples} predictions, mean error {self.mean_error:.4g}; AUCEA {self.aucea:.4f}{auroc}.\n{decided}"
        )


def evaluate(
    unreliability: FloatArray, errors: FloatArray, accepted: npt.NDArray[np.bool_], risk: float, confidence: float
) -> Evaluation:
    """The figures of a test set."""
    try:
        auroc = metrics.auroc(unreliability, errors == 1) if np.isin(errors, (0, 1)).all() else None
    except UndefinedMetric:
        auroc = None
    return Evaluation(
        n_samples=len(errors),
        mean_error=float(errors.mean()),
        mean_error_accepted=_mean(errors[accepted]),
        mean_error_refused=_mean(errors[~accepted]),
        coverage=float(accepted.mean()),
        risk=risk,
        confidence=confidence,
        aucea=metrics.aucea(unreliability, errors),
        auroc=auroc,
        unreliability=unreliability,
        errors=errors,
    )


def _mean(errors: FloatArray) -> float:
    return float(errors.mean()) if len(errors) else float("nan")


def _first_tensor(inputs: Any) -> Any:
    """The first torch tensor among some inputs; None where there is none."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple | list):
        return next((found for found in map(_first_tensor, inputs) if found is not None), None)
    return inputs if type(inputs).__module__.partition(".")[0] == "torch" and hasattr(inputs, "device") else None
