"""Residual flow density: how many bits it takes to write a sample down, by a density learned from the training data.

An invertible network carries the data to a normal distribution; what it does to volumes tells the density of each sample.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from terrafirma.core._checks import as_array, check_count, check_positive
from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput, require
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, matrix_of

if TYPE_CHECKING:
    import torch

__all__ = ["ResidualFlow"]

EXACT = 128  # dimensions up to which log-determinants come from whole Jacobians
SEEDS = 2**63  # that torch knows
NUMBERS = 1 << 23  # in the largest array of a batch to score


class ResidualFlow(Score):
    """Bits per dimension, ``-log2 density / dimensions``, under a residual flow fitted to the training data.

    The density is that of the data as given, their scaling included: of uint8 pixels as numbers in [0, 256), scored amid
    their level; of anything else in the units that it has. Inputs (n, C, H, W) or (n, H, W) are images and pass
    convolutions; inputs (n, d), and features, are vectors. Needs torch.

    Up to 128 dimensions the density is exact. Beyond, each block's log-determinant is a power series cut after 20 terms,
    its traces estimated with 4 probes that are the same for all samples: a score never depends on what else is scored,
    but it is an estimate. The cut costs at most 0.06 nats for each dimension and block, where a block stretches as much as
    it may, and less than 1e-7 where it stretches by half; the probes' error is much the same for all samples.

    Training data are blurred by a fiftieth of their standard deviation (pixels: spread over their level), lest the
    likelihood of data that repeat grow without end.

    Parameters
    ----------
    on : "inputs" or "features"
        Whose density; that of the inputs in the paper, and in the published numbers (``variant="published"``).
    blocks, width : int
        Residual blocks, of each scale for images; units or channels within a block.
    epochs, batch_size, learning_rate, seed
        Of the training, with Adam on steps that shorten along half a cosine.
    device : str
        Where torch computes; "auto" is a CUDA device if there is one.
    checkpoint : path, optional
        Where training is kept after each epoch. A fit on the same data with the same settings goes on from there, on a CPU
        to the same weights, bit for bit.

    """

    name: ClassVar[str] = "residual_flow"
    paper: ClassVar[str] = "Chen et al., NeurIPS 2019"
    cost: ClassVar[str] = "fit epochs x N passes through the flow; a query some 100 passes"
    needs = frozenset({"inputs"})
    shape_: list[int]  # of a sample, as the flow sees it
    mean_: FloatArray | None
    scale_: FloatArray | None
    weights_: dict[str, npt.NDArray[Any]]
    losses_: list[float]  # bits per dimension of the training data, by epoch

    def __init__(  # noqa: PLR0913  # all are hyperparameters
        self,
        on: str = "inputs",
        blocks: int = 4,
        width: int = 128,
        epochs: int = 50,
        batch_size: int = 128,
        learning_rate: float = 3e-3,
        seed: int = 0,
        device: str = "auto",
        checkpoint: str | os.PathLike[str] | None = None,
        variant: str | None = None,
    ) -> None:
        self.on = on
        self.blocks = blocks
        self.width = width
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.seed = seed
        self.device = device
        self.checkpoint = os.fspath(checkpoint) if isinstance(checkpoint, os.PathLike) else checkpoint  # for files
        self.variant = variant
        if on == "features":
            self.needs = frozenset({"features"})

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.on not in ("inputs", "features"):
            raise InvalidInput(f"on must be 'inputs' or 'features'. Got {self.on!r:.80}.")
        if self.variant == "published" and self.on != "inputs":
            raise InvalidInput(
                f"on must be 'inputs' for the published variant, whose density is the image's. Got {self.on!r}; leave it out."
            )
        for name in ("blocks", "width", "epochs", "batch_size"):
            check_count(name, getattr(self, name), 1)
        check_count("seed", self.seed, 0)
        check_positive("learning_rate", self.learning_rate, "the length of Adam's first steps")
        for name, value in {"device": self.device, "checkpoint": self.checkpoint}.items():
            if not isinstance(value, str) and (name == "device" or value is not None):
                raise InvalidInput(f"{name} must be text. Got {value!r:.80}.")

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Train the flow."""
        device = self._device()
        from terrafirma.scores.flow.scaling import Scaling
        from terrafirma.scores.flow.training import Plan, train_flow

        data = self._samples(train)
        scaling = Scaling.learn(data)
        shape, seed = data.shape[1:], int(self.seed) % SEEDS
        plan = Plan(shape, self.blocks, self.width, self.epochs, self.batch_size, self.learning_rate, seed)
        flow, losses = train_flow(plan, data, scaling, device, self.checkpoint)
        self.shape_, self.losses_, self.weights_ = list(shape), losses, flow.frozen_weights()
        self.mean_, self.scale_ = scaling.mean, scaling.scale

    def score(self, recorded: Recorded) -> FloatArray:
        """Bits per dimension of each sample."""
        device = self._device()
        import torch

        from terrafirma.scores.flow.blocks import Flow
        from terrafirma.scores.flow.log_det import Truncated, exact
        from terrafirma.scores.flow.scaling import Scaling
        from terrafirma.scores.flow.training import few_threads, largest

        data = self._samples(recorded)
        scaling = Scaling(self.mean_, self.scale_)
        flow = Flow(tuple(self.shape_), self.blocks, self.width).load(self.weights_).to(device)
        dimensions, size = math.prod(self.shape_), largest(tuple(self.shape_), self.width)
        is_small = dimensions <= EXACT
        step = max(1, NUMBERS // max(size, dimensions**2 if is_small else 0))
        found = []
        with few_threads(min(step, len(data)) * size):
            for rows in row_ranges(len(data), step):
                z, log_volume = scaling.scoring(torch.tensor(data[rows], device=device))
                log_density = flow.log_density(z, exact if is_small else Truncated(int(self.seed) % SEEDS)) + log_volume
                found.append((-log_density / (dimensions * math.log(2))).cpu().numpy())
        return np.concatenate(found)

    def _samples(self, recorded: Recorded) -> npt.NDArray[Any]:
        """What the density is of: (n, d) or (n, channels, H, W), uint8 for pixels."""
        values = as_array(recorded.need(self.on, by=f"The score {self.name}"), self.on)
        trained = getattr(self, "shape_", None)
        pixels = self.on == "inputs" and values.dtype == np.uint8 and (trained is None or self.mean_ is None)
        if self.on == "features":
            values = matrix_of(recorded, "features", self.name)
        elif not pixels:
            values = matrix_of(recorded, "inputs", self.name).reshape(values.shape)
        if not 2 <= values.ndim <= 4 or not math.prod(values.shape[1:]):
            raise InvalidInput(
                f"{self.on} must be vectors (n, d) or images (n, H, W) or (n, C, H, W). Got shape {values.shape}; reshape them."
            )
        values = values[:, None] if values.ndim == 3 else values
        if trained is not None and (list(values.shape[1:]) != trained or (self.mean_ is None and not pixels)):
            kind = "uint8" if self.mean_ is None else "numbers"
            raise InvalidInput(
                f"{self.on} must be {kind} of shape (n, {', '.join(map(str, trained))}), as the training data. "
                f"Got {values.dtype} of shape {values.shape}."
            )
        return values

    def _device(self) -> torch.device:
        torch = require("torch", extra="torch")
        try:
            found = torch.device(
                ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
            )
            torch.zeros(1, device=found)
        except (RuntimeError, AssertionError) as error:
            raise InvalidInput(
                f"device must be 'auto' or a device that torch has here. Got {self.device!r:.80} ({str(error)!r:.120})."
            ) from error
        return found  # type: ignore[no-any-return]
