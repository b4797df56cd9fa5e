"""Energy: minus the log of the unnormalised density that the logits make of an input."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core._checks import check_positive
from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import LogitScore, Odds, by_block

__all__ = ["Energy"]


class Energy(LogitScore):
    """``-T log sum exp(logit / T)``; T = 1 in the paper."""

    name: ClassVar[str] = "energy"
    paper: ClassVar[str] = "Liu et al., NeurIPS 2020"

    def __init__(self, temperature: float = 1.0, react: float | None = None) -> None:
        super().__init__(react)
        self.temperature = temperature

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        check_positive("temperature", self.temperature, "logits are divided by it")

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """The energy."""

        def formula(values: FloatArray) -> FloatArray:
            odds = Odds.of(values / self.temperature)
            return -self.temperature * (odds.largest + np.log1p(odds.rest))

        return by_block(formula, logits)
