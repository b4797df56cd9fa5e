"""log |det(I + J)| of a residual block ``x + g(x)``, for the Jacobian J of g: exactly, as a cut series, or without bias.

Each function of this file takes ``pull``, which carries vectors v (one for each sample, of its shape) to ``v J``, and the
batch x, and returns (n,).
``log det(I + J) = tr J - tr J^2 / 2 + tr J^3 / 3 - ...`` converges, since g stretches no distance by 1 or more; a trace is
the mean of ``v J^k v`` over vectors v of random signs, and ``v J^k`` takes k pulls and no matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["PROBES", "TERMS", "LogDet", "Pull", "Roulette", "Truncated", "exact", "no_log_det", "signs"]

Pull = Callable[[Tensor], Tensor]
LogDet = Callable[[Pull, Tensor], Tensor]
SURE = 2  # terms of the series that Roulette always takes
GOES_ON = 0.5  # probability of each further one: a finite variance while blocks stretch by less than its square root
TERMS = 20  # of the cut series
PROBES = 4


def no_log_det(pull: Pull, x: Tensor) -> Tensor:  # noqa: ARG001  # a LogDet like the others
    """Zeros, where nobody asks for it."""
    return x.new_zeros(len(x))


def exact(pull: Pull, x: Tensor) -> Tensor:
    """From the whole Jacobian: as many pulls as there are dimensions."""
    identity = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device)
    rows = [pull(unit.reshape(x[:1].shape).expand_as(x)).flatten(1) for unit in identity]
    found: Tensor = torch.linalg.slogdet(identity + torch.stack(rows, dim=1)).logabsdet
    return found


class Truncated:
    """The first terms of the series, with probes that are the same for all samples.

    Each call draws new ones; the calls of every ``Truncated`` with equal seed draw the same, whatever the device.
    """

    def __init__(self, seed: int, terms: int = TERMS, probes: int = PROBES) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.terms = terms
        self.probes = probes

    def __call__(self, pull: Pull, x: Tensor) -> Tensor:
        """The mean over the probes."""
        total = x.new_zeros(len(x))
        for _ in range(self.probes):
            probe = signs(x[:1], self.generator).expand_as(x)
            vector = probe
            for k in range(self.terms):
                vector = pull(vector)
                total += (-1) ** k / (k + 1) * _dot(vector, probe)
        return total / self.probes


class Roulette:
    """Unbiased: after ``SURE`` terms a coin says whether another one follows, and each is divided by its probability.

    The value has no gradient of its own. That of the log-determinant is ``tr (I + J)^-1 dJ``, whose series takes the same
    terms (Neumann's): one pull that remembers how it came about, however many terms there are.
    """

    def __init__(self, rng: np.random.Generator, generator: torch.Generator) -> None:
        self.rng = rng
        self.generator = generator

    def weights(self) -> list[float]:
        """One over the probability of each term that is taken."""
        further = int(self.rng.geometric(1 - GOES_ON)) - 1
        return [1.0] * SURE + [GOES_ON**-k for k in range(1, further + 1)]

    def __call__(self, pull: Pull, x: Tensor) -> Tensor:
        """One draw, the same number of terms for all samples and one probe for each."""
        probe = signs(x, self.generator)
        with torch.no_grad():
            vector, inverse, value = probe, torch.zeros_like(x), x.new_zeros(len(x))
            for k, weight in enumerate(self.weights()):
                inverse += (-1) ** k * weight * vector
                vector = pull(vector)
                value += (-1) ** k / (k + 1) * weight * _dot(vector, probe)
        slope = _dot(pull(inverse), probe)
        return value + slope - slope.detach()


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """-1 or 1 at random."""
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=generator.device, dtype=torch.int8)
    return drawn.to(like) * 2 - 1


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(dim=1)
