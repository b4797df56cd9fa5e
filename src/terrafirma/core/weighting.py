"""Weighting functions: how much a training sample counts, by Hamming distance.

Implements eq:density. (the closeness ``k(h_i, h_j) = d(Hamming(p_i, p_j))``, which must fall with distance: section
s:weighting_function). A weighting gives its logs, ``log_d(M)[b] = log d(b)`` for b = 0..M; where ``u`` and ``z`` have a
better form than the general sum, ``normalizers`` knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from terrafirma.core._checks import as_array, check_count, check_positive
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

__all__ = ["Exponential", "Gaussian", "Tabulated", "Weighting", "check_weighting", "exact"]

LARGEST_LOG = 1e300  # sums of logs stay finite


@runtime_checkable
class Weighting(Protocol):
    """A non-increasing positive function of Hamming distance."""

    def log_d(self, M: int) -> FloatArray:
        """Logs of the closeness at distances 0..M: float64 (M + 1,)."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """The paper's weighting, ``d(h) = exp(-h^2 / (2 rho^2))``.

    >>> Gaussian(rho=2.0).log_d(4)
    array([-0.   , -0.125, -0.5  , -1.125, -2.   ])
    """

    rho: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", check_positive("rho", self.rho, "the kernel's width in bits"))

    def log_d(self, M: int) -> FloatArray:
        """Logs of the closeness at distances 0..M."""
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(-0.5 * np.square(np.arange(check_count("M", M, least=1) + 1) / self.rho))


@dataclass(frozen=True)
class Exponential:
    """``d(h) = exp(-h / tau)``: each differing bit costs the same factor.

    >>> Exponential(tau=2.0).log_d(4)
    array([ 0. , -0.5, -1. , -1.5, -2. ])
    """

    tau: float

    def __post_init__(self) -> None:
        tau = check_positive("tau", self.tau, "the distance in bits over which closeness falls by e")
        object.__setattr__(self, "tau", tau)

    def log_d(self, M: int) -> FloatArray:
        """Logs of the closeness at distances 0..M."""
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(-np.arange(check_count("M", M, least=1) + 1) / self.tau)


@dataclass(frozen=True, eq=False)
class Tabulated:
    """Any non-increasing positive weighting, as the logs of its values at distances 0..M.

    >>> Tabulated([0.0, -1.0, -1.5]).log_d(2)
    array([ 0. , -1. , -1.5])
    """

    log_values: Any

    def __post_init__(self) -> None:
        given = as_array(self.log_values, "log_values")
        valid = given.ndim == 1 and len(given) > 1 and given.dtype.kind in "fiu"
        with np.errstate(over="ignore"):
            log_values = given.astype(np.float64) + 0.0 if valid else np.array([np.nan])  # a copy, without -0
        if not (np.abs(log_values) < LARGEST_LOG).all() or (np.diff(log_values) > 0).any():
            raise InvalidInput(
                f"log_values must be numbers within +-{LARGEST_LOG:g}, one for each distance 0..M, that never increase. "
                f"Got {self.log_values!r:.80}."
            )
        log_values.setflags(write=False)
        object.__setattr__(self, "log_values", log_values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tabulated) and np.array_equal(self.log_values, other.log_values)

    def __hash__(self) -> int:
        return hash(self.log_values.tobytes())

    def log_d(self, M: int) -> FloatArray:
        """Logs of the closeness at distances 0..M."""
        if len(self.log_values) != M + 1:
            raise InvalidInput(
                f"log_values must have M + 1 = {M + 1} entries for patterns of {M} units. "
                f"Got {len(self.log_values)}; give one for each distance 0..M."
            )
        return np.asarray(self.log_values)


def exact(weighting: Weighting, M: int) -> Weighting:
    """The weighting itself where it is one of ours; else, or for a class derived from ours, its checked table."""
    if type(weighting) in {Gaussian, Exponential}:
        return weighting
    check_weighting(weighting)
    return Tabulated(Tabulated(weighting.log_d(M)).log_d(M))


def check_weighting(weighting: Any) -> None:
    """Raise unless ``weighting`` can tell its values."""
    if not isinstance(weighting, Weighting) or isinstance(weighting, type):
        raise InvalidInput(
            f"weighting must have log_d(M), as Gaussian, Exponential and Tabulated do. Got {weighting!r:.80}."
        )
