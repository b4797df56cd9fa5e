"""Generalised entropy, which looks at small probabilities more closely than Shannon's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core._checks import check_count, check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import LogitScore, Odds, by_block

__all__ = ["Gen"]


class Gen(LogitScore):
    """``sum p^gamma (1 - p)^gamma`` over the ``top`` most probable classes; gamma = 0.1 and top = 100 in the paper."""

    name: ClassVar[str] = "gen"
    paper: ClassVar[str] = "Liu et al., CVPR 2023"

    def __init__(self, gamma: float = 0.1, top: int = 100, react: float | None = None) -> None:
        super().__init__(react)
        self.gamma = gamma
        self.top = top

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        check_share("gamma", self.gamma, "the power; 0.1 in its paper")
        check_count("top", self.top, least=1)

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """The generalised entropy."""
        return by_block(self._formula, logits)

    def _formula(self, values: FloatArray) -> FloatArray:
        odds, top = Odds.of(values), min(self.top, values.shape[1])
        total = (1 + odds.rest)[:, None]
        not_this = total - odds.others
        np.copyto(
            not_this, odds.rest[:, None], where=odds.others == 0
        )  # of the most probable class, and far too unlikely ones
        logs = odds.logs
        if top < values.shape[1]:
            kept = np.argpartition(-logs, top - 1, axis=1)[:, :top]
            logs, not_this = (np.take_along_axis(part, kept, axis=1) for part in (logs, not_this))
        with np.errstate(divide="ignore"):  # of a softmax that is surer than floats can say
            terms = np.exp(self.gamma * (logs + np.log(not_this) - 2 * np.log(total)))
        return np.asarray(terms.sum(axis=1))
