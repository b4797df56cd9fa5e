"""Entropy of the predicted distribution over classes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import PublishedLogitScore, entropy, published_softmax

__all__ = ["Entropy"]


class Entropy(PublishedLogitScore):
    """``-sum p log p``, from the logits.

    ``variant="published"``: in single precision, where saturated softmaxes tie.
    """

    name: ClassVar[str] = "entropy"
    paper: ClassVar[str] = "Shannon, 1948"

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """The entropy in nats."""
        if self.variant == "published":
            p = published_softmax(logits)
            log_p = np.log(np.maximum(p, np.finfo(np.float32).tiny))
            return np.asarray(-(p * log_p).sum(axis=1), dtype=np.float64)
        return entropy(logits)
