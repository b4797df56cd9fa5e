"""Layers that stretch no distance by more than a known factor: what makes ``x + g(x)`` invertible.

Spectral norms are found by power iteration on the linear map itself, for a convolution on the convolution of whole maps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from terrafirma.scores.flow.log_det import Pull

__all__ = ["COEFFICIENT", "LipSwish", "Lipschitz", "LipschitzConv", "LipschitzLinear"]

COEFFICIENT = 0.97  # the largest spectral norm of a layer
BENDS = 3.0  # times the typical size of x that beta is at first
TINY = 1e-3
MOST_ROUNDS = 2000  # of power iteration on final weights, which stops when the norm has settled
SETTLED = 1e-9


class LipSwish(nn.Module):
    """``x sigmoid(beta x) / 1.1``: smooth, with a slope of at most 1 in size whatever the positive ``beta`` learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_beta = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def begin(self, x: Tensor) -> None:
        """Bend where the data are: behind layers of bounded norm they are so close to 0 that beta = 1 would leave a line."""
        self.log_beta.copy_((BENDS / (x.square().mean().sqrt() + TINY)).log())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The activation of every number, and its slope."""
        scaled = self.log_beta.exp() * x
        gate = torch.sigmoid(scaled) / 1.1
        return x * gate, gate * (1 + scaled * (1 - 1.1 * gate))


class Lipschitz(nn.Module):
    """A linear map and an offset, divided by whatever its spectral norm exceeds ``COEFFICIENT`` by.

    While it learns, the norm is that of two vectors which power iteration keeps near the leading ones; ``freeze`` lets
    them settle and writes the division into the weights.
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Tensor, offsets: int, spaces: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(offsets))
        generator = torch.Generator().manual_seed(0)
        for name, space in zip(("left", "right"), spaces, strict=True):
            vector = torch.randn(1, *space, generator=generator)
            self.register_buffer(name, vector / vector.norm())
        self.frozen = False

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the map makes of samples."""
        raise NotImplementedError

    def transposed(self, y: Tensor, weight: Tensor) -> Tensor:
        """What the transposed map makes of vectors on its other side."""
        raise NotImplementedError

    @torch.no_grad()
    def iterate(self, rounds: int = 1) -> None:
        """Bring ``left`` and ``right`` nearer to the leading singular vectors."""
        for _ in range(rounds):
            self.left = _unit(self.product(self.right, self.weight), self.left)
            self.right = _unit(self.transposed(self.left, self.weight), self.right)

    def norm(self) -> Tensor:
        """The spectral norm as far as power iteration has come; never more than the true one."""
        return (self.left * self.product(self.right, self.weight)).sum()

    @torch.no_grad()
    def freeze(self) -> None:
        """Make the bound part of the weights, with the norm found to many digits."""
        norm = self.norm()
        for _ in range(MOST_ROUNDS):
            self.iterate()
            before, norm = norm, self.norm()
            if abs(norm - before) <= SETTLED * norm:
                break
        self.weight.div_((norm / COEFFICIENT).clamp(min=1.0))
        self.frozen = True

    def bounded(self) -> Tensor:
        """The weights in use."""
        return self.weight if self.frozen else self.weight / (self.norm() / COEFFICIENT).clamp(min=1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Pull]:
        """The bounded map of samples, and what its transposed makes of vectors."""
        weight = self.bounded()
        return self.product(x, weight, self.bias), lambda y: self.transposed(y, weight)


class LipschitzLinear(Lipschitz):
    """A matrix; ``gain`` scales its first weights, which are of size 1 / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator, gain: float = 1.0) -> None:
        weight = torch.randn(outputs, inputs, generator=generator) * (gain / inputs**0.5)
        super().__init__(weight, outputs, ((outputs,), (inputs,)))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Samples (n, inputs) to (n, outputs)."""
        return functional.linear(x, weight, bias)

    def transposed(self, y: Tensor, weight: Tensor) -> Tensor:
        """Vectors (n, outputs) to (n, inputs)."""
        return y @ weight


class LipschitzConv(Lipschitz):
    """A convolution that keeps the size of its maps, an odd ``side`` of the kernel; zeros beyond the border."""

    def __init__(
        self,
        channels: tuple[int, int],
        side: int,
        maps: tuple[int, int],
        generator: torch.Generator,
        gain: float = 1.0,
    ) -> None:
        inputs, outputs = channels
        weight = torch.randn(outputs, inputs, side, side, generator=generator) * (gain / (inputs * side * side) ** 0.5)
        maps = maps if side > 1 else (1, 1)  # every pixel alike
        super().__init__(weight, outputs, ((outputs, *maps), (inputs, *maps)))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Maps (n, inputs, H, W) to (n, outputs, H, W)."""
        return functional.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)

    def transposed(self, y: Tensor, weight: Tensor) -> Tensor:
        """Maps (n, outputs, H, W) to (n, inputs, H, W)."""
        return functional.conv_transpose2d(y, weight, padding=weight.shape[-1] // 2)


def _unit(vector: Tensor, fallback: Tensor) -> Tensor:
    """The vector at length 1; where it vanishes, another."""
    length = vector.norm()
    return torch.where(length > 0, vector / length.clamp(min=torch.finfo(vector.dtype).tiny), fallback)
