"""Maximum response of a calibrated network: logits divided by the temperature that fits the validation labels best."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from terrafirma.core.patterns import FloatArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import classes_of
from terrafirma.scores.logits import LogitScore, check_logits, max_response

__all__ = ["Temperature"]

LOG_RANGE = (np.log(0.01), np.log(100.0))  # where to look for a temperature
EDGE = 0.01


class Temperature(LogitScore):
    """``1 - p_1`` of the tempered softmax, at the temperature that is most likely on validation labels; 1 where none is."""

    name: ClassVar[str] = "temperature"
    paper: ClassVar[str] = "Guo et al., ICML 2017"
    cost: ClassVar[str] = "fit a search on validation logits; a query O(C)"
    uses_validation: ClassVar[bool] = True
    temperature_: float

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find the temperature."""
        super().learn(train, validation)
        self.temperature_ = 1.0
        if validation is None or validation.labels is None:
            return
        logits, labels = check_logits(self.logits(validation)), classes_of(validation, self.name)
        known = labels < logits.shape[1]
        rows, labels = logits[known], labels[known]

        def loss(log_temperature: float) -> float:
            log_p = log_softmax(rows / np.exp(log_temperature), axis=1)
            return float(-log_p[np.arange(len(labels)), labels].mean())

        if not len(labels):
            return
        found = float(minimize_scalar(loss, bounds=LOG_RANGE, method="bounded").x)
        at_edge = min(found - LOG_RANGE[0], LOG_RANGE[1] - found) < EDGE
        self.temperature_ = (
            1.0 if at_edge else float(np.exp(found))
        )  # no minimum: where all are right, none is low enough

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """One minus the largest tempered probability."""
        return max_response(logits / self.temperature_)
