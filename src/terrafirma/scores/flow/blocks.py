"""The invertible parts of a flow and the flow itself: a chain of them that carries data to a normal distribution.

Vectors pass residual blocks of three matrices; images residual blocks of three convolutions, on maps that are halved in
size (their pixels become channels) between the scales. Every part gives what it makes of a batch and the log-determinant
of its Jacobian, and can go back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from terrafirma.scores.flow.lipschitz import Lipschitz, LipschitzConv, LipschitzLinear, LipSwish
from terrafirma.scores.flow.log_det import LogDet, Pull, no_log_det

__all__ = ["ActNorm", "Flow", "ResidualBlock", "Squeeze"]

SCALES = 3  # of images, at most
SMALLEST = 8  # sides below this are not halved
GAIN = 0.1  # of a block's last layer before learning: near to doing nothing
INVERSE_ROUNDS = 1000
FIRST_ROUNDS = 20  # of power iteration before training
SPREAD = 1e-3  # below it a unit counts as constant


class ActNorm(nn.Module):
    """A scale and a shift for each feature or channel, at first such that a batch is standardised."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        free = (1, shape[0], *(1 for _ in shape[1:]))
        self.log_scale = nn.Parameter(torch.zeros(free))
        self.shift = nn.Parameter(torch.zeros(free))
        self.repeats = math.prod(shape[1:])

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Learn from a batch; what is constant in it is only shifted."""
        axes = [0, *range(2, x.ndim)]
        spread = x.std(dim=axes, keepdim=True, correction=0)
        self.log_scale.copy_(-torch.where(spread > SPREAD, spread, 1.0).log())
        self.shift.copy_(-x.mean(dim=axes, keepdim=True))

    def forward(self, x: Tensor, log_det: LogDet) -> tuple[Tensor, Tensor]:
        """Scaled samples, and the log of the scales' product."""
        return (x + self.shift) * self.log_scale.exp(), (self.log_scale.sum() * self.repeats).expand(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        """Back."""
        return y * (-self.log_scale).exp() - self.shift


class Squeeze(nn.Module):
    """Squares of two by two pixels become four channels."""

    def forward(self, x: Tensor, log_det: LogDet) -> tuple[Tensor, Tensor]:
        """Maps of half the size."""
        return nn.functional.pixel_unshuffle(x, 2), x.new_zeros(len(x))

    def inverse(self, y: Tensor) -> Tensor:
        """Back."""
        return nn.functional.pixel_shuffle(y, 2)


class ResidualBlock(nn.Module):
    """``x + g(x)`` where g stretches no distance by 1 or more, so that there is exactly one x for each result."""

    def __init__(self, shape: tuple[int, ...], width: int, generator: torch.Generator) -> None:
        super().__init__()
        units, maps = shape[0], shape[1:]
        layers: list[Lipschitz]
        if len(maps) == 2:
            layers = [
                LipschitzConv((units, width), 3, maps, generator),
                LipschitzConv((width, width), 1, maps, generator),
                LipschitzConv((width, units), 3, maps, generator, GAIN),
            ]
        else:
            layers = [
                LipschitzLinear(units, width, generator),
                LipschitzLinear(width, width, generator),
                LipschitzLinear(width, units, generator, GAIN),
            ]
        self.layers = nn.ModuleList(layers)
        self.bends = nn.ModuleList([LipSwish(), LipSwish()])

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Find the norms of fresh layers, and where a batch lies."""
        for layer, bend in zip(self.layers, [*self.bends, None], strict=True):
            layer.iterate(FIRST_ROUNDS)  # type: ignore[operator]  # a Lipschitz
            x = layer(x)[0]
            if bend is not None:
                bend.begin(x)
                x = bend(x)[0]

    def residual(self, x: Tensor) -> tuple[Tensor, Pull]:
        """``g(x)``, and what carries vectors back through its Jacobian; slopes are computed once for all vectors."""
        first, second, third = self.layers
        one, other = self.bends
        x, pull_first = first(x)
        x, slopes = one(x)
        x, pull_second = second(x)
        x, later_slopes = other(x)
        g, pull_third = third(x)
        return g, lambda vectors: pull_first(slopes * pull_second(later_slopes * pull_third(vectors)))

    def forward(self, x: Tensor, log_det: LogDet) -> tuple[Tensor, Tensor]:
        """The result and its log-determinant."""
        g, pull = self.residual(x)
        return x + g, log_det(pull, x)

    @torch.no_grad()
    def inverse(self, y: Tensor) -> Tensor:
        """Back, by fixed-point iteration until nothing moves any more."""
        x, tiny = y, 4 * torch.finfo(y.dtype).eps
        for _ in range(INVERSE_ROUNDS):
            before, x = x, y - self.residual(x)[0]
            if bool(((x - before).abs() <= tiny * (1 + x.abs())).all()):
                break
        return x


class Flow(nn.Module):
    """Blocks with an ``ActNorm`` before, between and after them, from data to a standard normal distribution.

    ``shape`` is that of a sample: ``(d,)``, or ``(channels, H, W)`` with ``blocks`` for each scale.
    """

    def __init__(self, shape: tuple[int, ...], blocks: int, width: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ModuleList([ActNorm(shape)])
        for scale in range(SCALES if len(shape) == 3 else 1):
            if scale:
                if shape[1] % 2 or shape[2] % 2 or min(shape[1:]) < SMALLEST:
                    break
                shape = (4 * shape[0], shape[1] // 2, shape[2] // 2)
                self.parts.append(Squeeze())
            for _ in range(blocks):
                self.parts.extend([ResidualBlock(shape, width, generator), ActNorm(shape)])

    def forward(self, x: Tensor, log_det: LogDet) -> tuple[Tensor, Tensor]:
        """Where samples land, and the log-determinant of the way there (n,)."""
        total = x.new_zeros(len(x))
        for part in self.parts:
            x, found = part(x, log_det)
            total = total + found
        return x, total

    def log_density(self, x: Tensor, log_det: LogDet) -> Tensor:
        """The log of the density of samples, in nats (n,)."""
        z, total = self.forward(x, log_det)
        z = z.flatten(1)
        normal: Tensor = -0.5 * (z * z).sum(dim=1) - 0.5 * math.log(2 * math.pi) * z.shape[1]
        return normal + total

    def inverse(self, z: Tensor) -> Tensor:
        """Back from the normal distribution to data."""
        for part in reversed(self.parts):
            z = part.inverse(z)  # type: ignore[operator]  # all parts have one
        return z

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Before training, let every part learn from a batch, in turn."""
        for part in self.parts:
            if isinstance(part, ActNorm | ResidualBlock):
                part.begin(x)
            x = part(x, no_log_det)[0]

    def lipschitz(self) -> list[Lipschitz]:
        """All bounded layers."""
        return [part for part in self.modules() if isinstance(part, Lipschitz)]

    def frozen_weights(self) -> dict[str, npt.NDArray[Any]]:
        """Weights that need no bounding any more; learning is over."""
        self.double()  # norms to many digits
        for layer in self.lipschitz():
            layer.freeze()
        return {name: value.detach().float().cpu().numpy() for name, value in self.named_parameters()}

    def load(self, weights: Mapping[str, npt.NDArray[Any]]) -> Flow:
        """Take frozen weights, to work in double precision."""
        self.double().requires_grad_(False)
        for name, parameter in self.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(weights[name])))
        for layer in self.lipschitz():
            layer.frozen = True
        return self
