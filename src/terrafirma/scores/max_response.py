"""Maximum response: the probability that is left to all classes but the predicted one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.scores.logits import PublishedLogitScore, max_response, published_softmax

__all__ = ["MaxResponse"]


class MaxResponse(PublishedLogitScore):
    """``1 - p_1``, summed from the other classes.

    ``variant="published"``: 1 - max softmax in single precision, where saturated ones tie.
    """

    name: ClassVar[str] = "max_response"
    paper: ClassVar[str] = "Hendrycks & Gimpel, ICLR 2017"

    def of_logits(self, logits: FloatArray) -> FloatArray:
        """One minus the largest probability."""
        if self.variant == "published":
            return np.asarray(1 - published_softmax(logits).max(axis=1), dtype=np.float64)
        return max_response(logits)
