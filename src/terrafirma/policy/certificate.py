"""How many of the least unreliable samples may be accepted: learn-then-test, with its p-values.

The argument for the promise stands in ``docs/policy.md``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrafirma.core.patterns import BoolArray, FloatArray, IntArray

__all__ = [
    "binomial_p",
    "certify",
    "clopper_pearson_upper",
    "hoeffding_bentkus_p",
    "hoeffding_bentkus_upper",
    "is_binary",
    "least_samples",
    "p_value_for",
    "place_starts",
    "risk_upper",
    "why_nothing",
]

# where runs of tests start, as shares of the samples, and their parts of the error budget; by simulation, see docs/policy.md
START_SHARES = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])
START_WEIGHTS = np.array([1, 2, 4, 8, 2])
MOST = 10**9  # samples to ask for


def certify(errors: FloatArray, whole: BoolArray, risk: float, budget: float) -> tuple[int, float]:
    """How many of the least unreliable rows may be accepted, and the level at which this was tested.

    ``errors`` are in order of unreliability; only a rank where ``whole`` is true (the last of tied rows) may be chosen. Test
    j asks whether the first j errors are too few for a mean above ``risk``. A start that passes at its own level joins
    its level to the run, which goes on upward while whole ranks pass. A wrong one passes with probability <= ``budget``.
    """
    n = len(errors)
    p = p_value_for(errors)(np.cumsum(errors), np.arange(1, n + 1), risk)
    starts, levels = place_starts(n, risk, budget)
    accepted, used, level = 0, 0.0, 0.0
    for start, end, share in zip(starts, np.append(starts, n)[1:], levels, strict=True):
        if p[start - 1] <= share:
            level += share
            if whole[start - 1]:
                accepted, used = int(start), float(level)
        ranks = start + 1 + np.flatnonzero(whole[start:end])
        passed = (p[ranks - 1] <= level) & (level > 0)  # p may underflow to 0
        run = len(ranks) if passed.all() else int(np.argmin(passed))
        if run:
            accepted, used = int(ranks[run - 1]), float(level)
        if run < len(ranks):
            level = 0.0
    return accepted, used


def place_starts(n: int, risk: float, budget: float) -> tuple[IntArray, FloatArray]:
    """The ranks at which runs of tests start, and the level of each, by n, risk and budget alone.

    Halvings of n, as far down as an error-free start could pass; where not even n / 2 could, the one rank that can. Each but
    n itself moves down as far as it allows as many errors as before.
    """
    from scipy.special import bdtrik, bdtrin

    for lowest in range(len(START_SHARES) - 1):
        starts = (n * START_SHARES[lowest:]).astype(np.int64)
        levels = budget * START_WEIGHTS[lowest:] / START_WEIGHTS[lowest:].sum()
        if (starts * math.log1p(-risk) <= np.log(levels)).all():
            allowed = np.floor(bdtrik(levels, starts.astype(np.float64), risk))
            lower = np.ceil(bdtrin(allowed, levels, risk)).astype(np.int64)
            return np.append(np.minimum(starts, lower)[:-1], n), levels
    least = least_samples(risk, budget)
    return np.array([least][: n >= least], dtype=np.int64), np.array([budget][: n >= least])


def least_samples(risk: float, level: float) -> int:
    """How many samples certify a risk at this level where all of them are right."""
    return max(1, math.ceil(min(math.log(level) / math.log1p(-risk), MOST)))


def binomial_p(error_sum: Any, trials: Any, risk: float) -> Any:
    """Chance of at most this many errors among ``trials`` if each is wrong with probability ``risk``; exact."""
    from scipy.special import bdtr

    return bdtr(error_sum, trials, risk)


def hoeffding_bentkus_p(error_sum: Any, trials: Any, risk: float) -> Any:
    """Bound on the chance that independent errors in [0, 1] of mean ``risk`` or more sum to at most this.

    Bates et al. (2021): the lesser of Hoeffding's bound and Bentkus's.
    """
    from scipy.special import bdtr, rel_entr

    mean = np.minimum(error_sum / trials, risk)
    hoeffding = np.exp(-trials * (rel_entr(mean, risk) + rel_entr(1 - mean, 1 - risk)))
    return np.minimum(hoeffding, math.e * bdtr(np.minimum(np.ceil(error_sum), trials), trials, risk))


def clopper_pearson_upper(error_sum: float, trials: int, level: float) -> float:
    """The greatest risk that ``binomial_p`` does not reject at this level."""
    from scipy.special import betainccinv

    return 1.0 if error_sum >= trials else float(betainccinv(error_sum + 1, trials - error_sum, level))


def hoeffding_bentkus_upper(error_sum: float, trials: int, level: float) -> float:
    """The greatest risk that ``hoeffding_bentkus_p`` does not reject at this level, from above."""
    low, high = error_sum / trials, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if hoeffding_bentkus_p(error_sum, trials, middle) <= level else (middle, high)
    return high


def is_binary(errors: FloatArray) -> bool:
    """Whether all errors are 0 or 1, which makes the exact binomial test theirs."""
    return bool(((errors == 0) | (errors == 1)).all())


def p_value_for(errors: FloatArray) -> Any:
    """The test that goes with these errors."""
    return binomial_p if is_binary(errors) else hoeffding_bentkus_p


def risk_upper(errors: FloatArray, accepted: int, level: float) -> float:
    """Upper limit, at this level, of the risk of which the first rows are a sample."""
    upper = clopper_pearson_upper if is_binary(errors) else hoeffding_bentkus_upper
    return upper(float(errors[:accepted].sum()), accepted, level)


def why_nothing(errors: FloatArray, whole: BoolArray, risk: float, budget: float) -> str:
    """Why ``certify`` accepted nothing, and how many samples would help."""
    least = least_samples(risk, budget)
    asked = f"{100 * (1 - budget):g} % confidence in a risk of at most {100 * risk:g} %"
    ranks = np.append(0, np.flatnonzero(whole) + 1)
    if ranks[-1] < least:
        return f"{asked} takes {least} calibration samples below +inf even if all are right, and there are {ranks[-1]}."
    ranks = ranks[ranks >= least]
    sums = np.cumsum(errors)[ranks - 1]
    best = int(np.argmin(p_value_for(errors)(sums, ranks, risk)))
    rate = sums[best] / ranks[best]
    seen = (
        f"the {ranks[best]} most reliable of {len(errors)} calibration samples have a mean error of {100 * rate:.3g} %"
    )
    if rate >= risk:
        return f"{asked} is out of reach: {seen}. More samples will not help; a better score or a higher risk will."
    enough = _enough(errors, int(ranks[best]), risk, budget)
    return f"{asked} takes more samples: {seen}. If that stays so, about {enough} are enough."


def _enough(errors: FloatArray, rank: int, risk: float, budget: float) -> int:
    """About how many samples would certify the risk if the first ``rank`` keep their share and their rate of error."""
    n, rate, p_value = len(errors), float(errors[:rank].mean()), p_value_for(errors)
    level = budget * START_WEIGHTS.min() / START_WEIGHTS.sum()
    while True:
        n = math.ceil(1.05 * n)
        trials = rank * n // len(errors)
        if n > MOST or p_value(math.ceil(rate * trials), trials, risk) <= level:
            unit: int = 10 ** (len(str(n)) - 2)
            return unit * math.ceil(n / unit)
