"""The bound on a subfunction's smooth error, in logs.

Implements eq:density. (``P``), eq:dist_weighted_fact4. (``R*``) and thm:true_error. (the bound).

For a query in region h, with k_l its closeness to training region l, N_l the samples there and E_l their summed error::

    P(h)  = (1/u) sum_l N_l k_l                     density
    R*(h) = (1/N) sum_l k_l E_l / w_l               smooth empirical error; only wrong regions add to it
    gap   = sqrt(log(2/delta) / (2N)) / P(h)        delta enters last, as a constant in the log
    bound = R*(h) + gap
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from terrafirma.core._threads import Map, threads
from terrafirma.core.normalizers import Normalizers
from terrafirma.core.patterns import FloatArray, PackedPatterns, WordArray
from terrafirma.core.regions import RegionTable, Rows, fill_panels, lay_out
from terrafirma.core.sums import log_sums
from terrafirma.core.weighting import Weighting

__all__ = ["BoundTerms", "KernelSums", "Smoother", "bound_terms", "log_gap_constant", "log_relative_bound"]


@dataclass(frozen=True, eq=False)
class KernelSums:
    """What one weighting sums around each query, before delta.

    Attributes
    ----------
    log_density : float64 array (n,)
        Log of P(h) [eq:density].
    log_risk : float64 array (n,)
        Log of R*(h), the smooth empirical error [eq:dist_weighted_fact4]; -inf where no training sample is wrong.

    """

    log_density: FloatArray
    log_risk: FloatArray


@dataclass(frozen=True, eq=False)
class BoundTerms:
    """Every part of the bound, in logs, for each query: float64 arrays (n,).

    Attributes
    ----------
    log_density : P(h), the share of smoothed training samples in the query's region [eq:density]
    log_risk : R*(h), the smooth empirical error [eq:dist_weighted_fact4]
    log_gap : the gap to the expected error, sqrt(log(2/delta) / 2N) / P(h) [eq:true_error_bound]
    log_bound : R*(h) + gap, the bound of thm:true_error

    """

    log_density: FloatArray
    log_risk: FloatArray
    log_gap: FloatArray
    log_bound: FloatArray

    def __repr__(self) -> str:
        bound = self.log_bound
        extent = f", log_bound {bound.min():.4g} to {bound.max():.4g}" if len(bound) else ""
        return f"BoundTerms({len(bound)} rows{extent})"


@dataclass(frozen=True, eq=False)
class Smoother:
    """Training regions made ready to be summed around queries, for one or many weightings at once.

    Attributes
    ----------
    table : RegionTable
    normalizers : list of Normalizers
        One for each weighting.
    log_d : float64 array (R, M + 1)
        Log closeness by distance.
    wrong_panels : uint64 array (panels, W, 32)
        The patterns of the wrong regions alone.
    wrong_values : float64 array (panels, 32, R)
        E_l / w_l of the wrong regions, divided by the largest. All lie within a factor N of each other for equal errors,
        since N_l z(0) <= u w_l <= N z(0).
    log_scale : float64 array (R, 1)
        Log of that largest value.

    """

    table: RegionTable
    normalizers: list[Normalizers]
    log_d: FloatArray
    wrong_panels: WordArray
    wrong_values: FloatArray
    log_scale: FloatArray

    @classmethod
    def prepare(cls, table: RegionTable, weightings: Sequence[Weighting], normalizers: list[Normalizers]) -> Smoother:
        """Gather the wrong regions and their weights."""
        wrong = normalizers[0].wrong
        log_w = np.array([norm.log_w for norm in normalizers])
        log_values = np.log(table.error_sum[wrong]) - log_w
        log_scale = log_values.max(axis=1, keepdims=True, initial=-np.inf)
        all_wrong = len(wrong) == len(table)
        with np.errstate(under="ignore"):
            wrong_values = fill_panels(np.exp(log_values - log_scale).T)
        return cls(
            table=table,
            normalizers=normalizers,
            log_d=np.array([weighting.log_d(table.n_units) for weighting in weightings]),
            wrong_panels=table.panels if all_wrong else lay_out(Rows(table, wrong)),
            wrong_values=wrong_values,
            log_scale=log_scale,
        )

    def sums(self, queries: PackedPatterns, *, mapper: Map = threads) -> list[KernelSums]:
        """Density and smooth error at each query, for each weighting."""
        log_mass = log_sums(queries, self.table.panels, self.table.panel_counts, self.log_d, mapper=mapper)
        if len(self.wrong_panels):
            log_error = log_sums(queries, self.wrong_panels, self.wrong_values, self.log_d, mapper=mapper)
        else:
            log_error = np.full_like(log_mass, -np.inf)
        log_error += self.log_scale - math.log(self.table.n_samples)
        return [
            KernelSums(mass - norm.log_u, error)
            for norm, mass, error in zip(self.normalizers, log_mass, log_error, strict=True)
        ]


def log_gap_constant(delta: float, N: int) -> float:
    """Log of ``sqrt(log(2/delta) / 2N)``: the gap is this over the density [eq:true_error_bound]."""
    return 0.5 * (math.log(math.log(2.0) - math.log(delta)) - math.log(2.0 * N))


def log_relative_bound(sums: KernelSums, delta: float, N: int) -> FloatArray:
    """Log of the bound over ``sqrt(log(2/delta) / 2N)``, which ranks alike.

    Where the risk is nothing beside the gap this is ``-log P(h)`` to the last bit, so that all delta tie; adding a constant
    for each would round near neighbours together for one and not for another.
    """
    log_risk_over_gap = sums.log_risk + sums.log_density - log_gap_constant(delta, N)
    with np.errstate(under="ignore"):
        return np.asarray(np.logaddexp(0.0, log_risk_over_gap) - sums.log_density)


def bound_terms(sums: KernelSums, delta: float, N: int) -> BoundTerms:
    """The bound at each query. Implements eq:true_error_bound."""
    log_gap = log_gap_constant(delta, N) - sums.log_density
    with np.errstate(under="ignore"):
        return BoundTerms(sums.log_density, sums.log_risk, log_gap, np.logaddexp(sums.log_risk, log_gap))
