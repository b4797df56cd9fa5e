"""Maximum logit: what the network says before softmax forgets how loud."""

from __future__ import annotations

from typing import ClassVar

from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import LogitScore, by_block

__all__ = ["MaxLogit"]


class MaxLogit(LogitScore):
    """Minus the largest logit."""

    name: ClassVar[str] = "max_logit"
    paper: ClassVar[str] = "Hendrycks et al., ICML 2022"

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """Minus the largest."""
        return by_block(lambda values: -values.max(axis=1), logits)
