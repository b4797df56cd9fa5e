"""Margin: how little the most probable class is ahead of the second."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import PublishedLogitScore, margin, published_softmax

__all__ = ["Margin"]


class Margin(PublishedLogitScore):
    """``1 - (p_1 - p_2)``, as twice the second probability and the rest.

    ``variant="published"``: ``p_2 - p_1`` in single precision, where saturated softmaxes tie.
    """

    name: ClassVar[str] = "margin"
    paper: ClassVar[str] = "Scheffer et al., IDA 2001"

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """One minus the margin; as published, minus the margin."""
        if self.variant == "published":
            ordered = np.sort(published_softmax(logits), axis=1)
            return (ordered[:, -2] - ordered[:, -1]).astype(np.float64)
        return margin(logits)
