"""The normaliser z at 4096 bits: how long the whole table takes, and how exact it is.

The reference is computed in 300 bits from whole numbers and powers of one base: the separated sums of z at
4096 bits; and at 64 bits the plain double sum that the paper gives, which proves the separated ones right.

The error asked for is 1e-10 of the log. With rho = 1 the largest logs are in the millions, where neighbouring
float64 numbers lie further apart than that: no float64 result can meet it there, and a note says so.
"""

from __future__ import annotations

import math
from functools import partial

import mpmath
import numpy as np

from benchmarks.common import Figure, Report, race
from terrafirma.core.normalizers import log_z
from terrafirma.core.weighting import Gaussian

M, M_SMALL = 4096, 64
RHOS = (1, 16, 128, 512)
N_DISTANCES = 40  # whose values are checked
BITS = 300
SECONDS, ERROR = 0.3, 1e-10


def run() -> Report:
    runs = {rho: partial(log_z, Gaussian(float(rho)), M) for rho in RHOS}
    times = race({str(rho): table for rho, table in runs.items()})
    figures = [Figure(f"rho = {rho}: table of {M} bits", times[str(rho)], "s", at_most=SECONDS) for rho in RHOS]
    notes = []
    with mpmath.workprec(BITS):
        for rho in RHOS:
            error, rounding = _error(rho)
            name = f"rho = {rho}: largest error, {M} bits, separated sums"
            figures.append(Figure(name, error, at_most=ERROR))
            if rounding > ERROR:
                notes.append(f"rho = {rho}: rounding the largest true log to float64 alone may cost {rounding:.2g}.")
        for rho in RHOS:
            name = f"rho = {rho}: largest error, {M_SMALL} bits, double sum"
            figures.append(Figure(name, _small_error(rho), at_most=ERROR))
        for rho in RHOS:
            name = f"rho = {rho}: error of sum C(M,a) z(a) = (sum C(M,b) d(b))²"
            figures.append(Figure(name, _sum_error(rho), at_most=ERROR))
    return Report("log_z", f"Whole table of log z, and its error against {BITS} bits", figures, notes).finish()


def _error(rho: int) -> tuple[float, float]:
    """Find the largest error of log z at sampled distances, and what rounding alone may cost there."""
    computed = log_z(Gaussian(float(rho)), M)
    powers = _powers(mpmath.exp(-mpmath.mpf(1) / (4 * rho**2)), 2 * M)
    inner = set(np.linspace(3, M - 2, N_DISTANCES - 6).astype(int).tolist())
    distances = sorted(inner | {0, 1, 2, M // 2, M - 1, M})
    exact = [mpmath.log(_separated(powers, M, a)) for a in distances]
    errors = [abs(float(mpmath.mpf(computed[a]) - value)) for a, value in zip(distances, exact, strict=True)]
    return max(errors), max(math.ulp(float(value)) for value in exact) / 2


def _separated(powers: list[mpmath.mpf], M: int, a: int) -> mpmath.mpf:
    """Multiply the two sums of z(a): their exponents are squares of whole numbers over 4 rho²."""
    differing = mpmath.fdot((c, powers[abs(2 * k - a)]) for k, c in enumerate(_binomials(a)))
    others = mpmath.fdot((c, powers[2 * k + a]) for k, c in enumerate(_binomials(M - a)))
    return differing * others


def _small_error(rho: int) -> float:
    """Find the largest absolute error of log z at all distances of a small M, against the double sum."""
    computed = log_z(Gaussian(float(rho)), M_SMALL)
    closeness = _powers(mpmath.exp(-mpmath.mpf(1) / (2 * rho**2)), M_SMALL)
    return max(
        abs(float(mpmath.log(_double_sum(closeness, M_SMALL, a)) - mpmath.mpf(computed[a]))) for a in range(M_SMALL + 1)
    )


def _double_sum(closeness: list[mpmath.mpf], M: int, a: int) -> mpmath.mpf:
    """Sum d(c+e) d(a-c+e) over c flips of the a differing bits and e flips of the others."""
    return mpmath.fsum(
        math.comb(a, c) * math.comb(M - a, e) * closeness[c + e] * closeness[a - c + e]
        for c in range(a + 1)
        for e in range(M - a + 1)
    )


def _sum_error(rho: int) -> float:
    """Compare the logs of both sides of an identity that needs all of z, however it was computed."""
    computed = log_z(Gaussian(float(rho)), M)
    binomials = _binomials(M)
    closeness = _powers(mpmath.exp(-mpmath.mpf(1) / (2 * rho**2)), M)
    left = mpmath.fsum(n * mpmath.exp(mpmath.mpf(value)) for n, value in zip(binomials, computed, strict=True))
    right = mpmath.fdot(zip(binomials, closeness, strict=True))
    return abs(float(mpmath.log(left) - 2 * mpmath.log(right)))


def _powers(base: mpmath.mpf, n: int) -> list[mpmath.mpf]:
    """List base^(k²) for k = 0..n."""
    powers, step = [mpmath.mpf(1)], base
    for _ in range(n):
        powers.append(powers[-1] * step)
        step *= base * base
    return powers


def _binomials(n: int) -> list[int]:
    row = [1]
    for k in range(n):
        row.append(row[-1] * (n - k) // (k + 1))
    return row


if __name__ == "__main__":
    run()
