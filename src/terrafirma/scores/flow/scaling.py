"""From data as given to numbers around 0 that a flow can learn, with the volume that this takes.

Pixels (uint8) are spread evenly over their level, 0 to 1, 1 to 2 and so on, and their logits taken; anything else is
standardised. Densities are then of the data as given: for pixels of a number in [0, 256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray

__all__ = ["Scaling"]

LEVELS = 256
EDGE = 0.05  # pixels are squeezed into [EDGE, 1 - EDGE] before their logits are taken
NOISE = 0.02  # of training data, in standard deviations
ROWS = 1024


@dataclass(frozen=True)
class Scaling:
    """``mean`` and ``scale``, float64 (1, features) or (1, channels, 1, 1); None for pixels."""

    mean: FloatArray | None
    scale: FloatArray | None

    @classmethod
    def learn(cls, data: npt.NDArray[Any]) -> Self:
        """Moments by feature or by channel, unless the data are pixels; what is constant keeps its scale."""
        if data.dtype == np.uint8:
            return cls(None, None)
        axes = (0, *range(2, data.ndim))
        size = data.size // data.shape[1]
        blocks = row_ranges(len(data), ROWS)
        sums = [data[rows].sum(axis=axes, dtype=np.float64, keepdims=True) for rows in blocks]
        mean = np.sum(sums, axis=0) / size
        squares = [((data[rows] - mean) ** 2).sum(axis=axes, keepdims=True) for rows in blocks]
        spread = np.sqrt(np.sum(squares, axis=0) / size)
        return cls(mean, np.where(spread > 1e-9 * np.abs(mean) + 1e-100, spread, 1.0))

    def training(self, batch: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scaled samples, float32, with noise: pixels anywhere within their level, other numbers near their value.

        Without noise the likelihood of data that repeat, or lie in a plane, has no maximum.
        """
        if self.mean is None:
            noise = torch.rand(batch.shape, generator=generator, device=batch.device)
            return _of_pixels(batch.float() + noise)
        z, log_volume = self._standardised(batch)
        noise = torch.randn(z.shape, generator=generator, device=z.device)
        return z.float() + NOISE * noise, log_volume.float()

    def scoring(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled samples, float64, pixels amid their level.

        With both comes the log of what scaling multiplies volumes by (n,).
        """
        return _of_pixels(batch.double() + 0.5) if self.mean is None else self._standardised(batch)

    def _standardised(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = (torch.tensor(values, device=batch.device) for values in (self.mean, self.scale))
        log_volume = -scale.log().sum() * (batch[0].numel() // scale.numel())
        return (batch.double() - mean) / scale, log_volume.expand(len(batch))


def _of_pixels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of numbers in [0, LEVELS)."""
    share = EDGE + (1 - 2 * EDGE) / LEVELS * values
    log_share, log_rest = share.log(), torch.log1p(-share)
    log_volume = (math.log((1 - 2 * EDGE) / LEVELS) - log_share - log_rest).flatten(1).sum(dim=1)
    return log_share - log_rest, log_volume
