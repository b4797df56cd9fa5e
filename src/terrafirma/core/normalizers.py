"""The three normalisation constants, exactly, for M into the thousands: u, z and w_l.

Implements eq:practical_1. (``u``), eq:practical_2_2. (``z``) and eq:practical_2_1. (``w_l``).

The paper's sums run over (M+1) or (M+1)^3 terms with binomials of up to a thousand digits. Here they are

- closed for the exponential weighting: ``u = N (1 + e)^M`` and ``z(a) = (2e)^a (1 + e^2)^(M-a)`` with ``e = exp(-1/tau)``;
- separate for the Gaussian. Since ``(c+e)^2 + (a-c+e)^2 = 2 (c - a/2)^2 + 2 (e + a/2)^2``,
  ``z(a) = [sum_c C(a, c) exp(-(c - a/2)^2 / rho^2)] [sum_e C(M-a, e) exp(-(e + a/2)^2 / rho^2)]``:
  O(M^2) at most for the whole table instead of O(M^3), all terms positive, and log-concave, so that few of them matter;
- the plain double sum over (c, e), in logs, for any other weighting: a (M - a) terms for each distance that occurs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, logsumexp

from terrafirma.core import _kernels
from terrafirma.core._checks import as_array, check_count
from terrafirma.core._threads import Map, row_ranges, threads
from terrafirma.core.patterns import FloatArray, IntArray
from terrafirma.core.regions import RegionTable, Rows
from terrafirma.core.sums import log_sums, occupied_distances
from terrafirma.core.weighting import Exponential, Gaussian, Weighting, exact
from terrafirma.errors import InvalidInput

__all__ = ["Normalizers", "log_u", "log_w", "log_z", "normalize"]

TABLE_COST = 1000  # of all of z, times M^1.5, in comparisons of words: beyond, it pays to ask which distances occur


@dataclass(frozen=True, eq=False)
class Normalizers:
    """What a weighting and a table of regions fix, before any query.

    Attributes
    ----------
    log_u : float
        Log of the global constant u [eq:practical_1].
    wrong : int64 array (K,)
        The regions with an error: only they need w.
    log_w : float64 array (K,)
        Log of w_l for these regions [eq:practical_2_1].

    """

    log_u: float
    wrong: IntArray
    log_w: FloatArray


def normalize(table: RegionTable, weightings: Sequence[Weighting], *, mapper: Map = threads) -> list[Normalizers]:
    """The normalisers of each weighting, computed together."""
    wrong = np.flatnonzero(table.error_sum > 0)
    log_ws = log_w(table, weightings, regions=wrong, mapper=mapper)
    n = table.n_samples
    return [
        Normalizers(log_u(weighting, table.n_units, n), wrong, row)
        for weighting, row in zip(weightings, log_ws, strict=True)
    ]


def log_u(weighting: Weighting, M: int, N: int) -> float:
    """Log of the sum of all closenesses between patterns and samples: ``u = N sum_b d(b) C(M, b)``.

    Implements eq:practical_1.

    >>> round(log_u(Gaussian(rho=16.0), M=2048, N=1000), 1)
    706.9
    """
    M, N = check_count("M", M, least=1), check_count("N", N, least=1)
    weighting = exact(weighting, M)
    if type(weighting) is Gaussian:
        return math.log(N) + float(_kernels.log_binomial_sum(M, 0.0, weighting.rho, 0.5, _log_factorials(M)))
    if type(weighting) is Exponential:
        return math.log(N) + M * math.log1p(math.exp(-1.0 / weighting.tau))
    with np.errstate(under="ignore"):
        return math.log(N) + float(logsumexp(_log_binomials(M) + weighting.log_d(M)))


def log_z(weighting: Weighting, M: int, distances: IntArray | None = None) -> FloatArray:
    """Log of ``z(a)``, the summed closeness of all patterns to two patterns at once that are ``a`` bits apart.

    Implements eq:practical_2_2.

    Parameters
    ----------
    weighting : Weighting
    M : int
        Units of a pattern.
    distances : integer array, optional
        The distances ``a`` to compute, 0..M by default.

    Returns
    -------
    float64 array (M + 1,), or of the shape of ``distances``

    >>> log_z(Gaussian(rho=1.0), M=12)[:3].round(4)
    array([1.8947, 1.1586, 0.4205])

    """
    M = check_count("M", M, least=1)
    weighting = exact(weighting, M)
    asked = np.arange(M + 1) if distances is None else as_array(distances, "distances")
    if asked.size and (asked.dtype.kind not in "iu" or ((asked < 0) | (asked > M)).any()):
        raise InvalidInput(f"distances must be integers from 0 to M = {M}. Got {distances!r:.80}.")
    flat = asked.astype(np.int64).ravel()
    if type(weighting) is Exponential:
        with np.errstate(over="ignore", under="ignore"):
            logs = flat * math.log(2.0) - flat / weighting.tau + (M - flat) * math.log1p(math.exp(-2.0 / weighting.tau))
    elif type(weighting) is Gaussian:
        rho, factorials = weighting.rho, _log_factorials(M)
        logs = np.array([_log_z_separated(rho, M, a, factorials) for a in flat.tolist()])
    else:
        log_d = weighting.log_d(M)
        each = threads(lambda one: _log_z_double_sum(log_d, M, int(flat[one.start])), row_ranges(len(flat), 1))
        logs = np.array(each, dtype=np.float64)
    return logs.reshape(asked.shape)


def log_w(
    table: RegionTable, weightings: Sequence[Weighting], *, regions: IntArray | None = None, mapper: Map = threads
) -> FloatArray:
    """Log of ``w_l = sum_j P(h_j) k(h_l, h_j) = (1/u) sum_i N_i z(Hamming(p_l, p_i))`` for some regions, all by default.

    Implements eq:practical_2_1. Returns float64 (weightings, regions).
    """
    regions = np.arange(len(table)) if regions is None else regions
    if len(regions) == 0:
        return np.zeros((len(weightings), 0))
    M, N = table.n_units, table.n_samples
    queries = Rows(table, regions)
    distances = np.arange(M + 1)
    closed = all(type(weighting) in {Gaussian, Exponential} for weighting in weightings)
    if not closed or TABLE_COST * M**1.5 * len(weightings) > len(regions) * table.panels.size:
        distances = occupied_distances(queries, table.panels, table.panel_counts, mapper=mapper)
    log_zs = np.full((len(weightings), M + 1), -np.inf)
    for row, weighting in zip(log_zs, weightings, strict=True):
        row[distances] = log_z(weighting, M, distances)
    log_us = np.array([log_u(weighting, M, N) for weighting in weightings])
    sums = log_sums(queries, table.panels, table.panel_counts, log_zs, mapper=mapper)
    return np.asarray(sums - log_us[:, None])


def _log_factorials(M: int) -> FloatArray:
    return np.asarray(gammaln(np.arange(M + 1) + 1.0))


def _log_binomials(M: int) -> FloatArray:
    factorials = _log_factorials(M)
    return np.asarray(factorials[M] - factorials - factorials[::-1])


def _log_z_separated(rho: float, M: int, a: int, factorials: FloatArray) -> float:
    """The product of two single sums, for the Gaussian."""
    differing = _kernels.log_binomial_sum(a, -a / 2, rho, 1.0, factorials)
    others = _kernels.log_binomial_sum(M - a, a / 2, rho, 1.0, factorials)
    return float(differing + others)


def _log_z_double_sum(log_d: FloatArray, M: int, a: int) -> float:
    """``sum_c sum_e C(a, c) C(M-a, e) d(c+e) d(a-c+e)``: c of the a differing bits are flipped, e of the others."""
    return float(_kernels.log_double_sum(log_d, _log_binomials(a), _log_binomials(M - a)))
