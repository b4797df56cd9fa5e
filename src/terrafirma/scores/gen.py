"""Generalised entropy, which looks at small probabilities more closely than Shannon's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.special import log_softmax, logsumexp

from terrafirma.core._checks import check_count, check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import LogitScore

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
        log_p = np.sort(log_softmax(logits, axis=1), axis=1)[:, ::-1]
        log_rest = np.log1p(-np.exp(log_p[:, 1:]))
        log_first_rest = logsumexp(log_p[:, 1:], axis=1, keepdims=True)  # never 1 - 1, however sure the softmax is
        terms = np.exp(self.gamma * (log_p + np.hstack([log_first_rest, log_rest])))
        return np.asarray(terms[:, : self.top].sum(axis=1))
