"""The slow, obviously right twin of every formula.

Loops over all 2^M patterns in exact rational arithmetic; nothing here is shared with the fast path. A weighting is the
list of its values ``d[0..M]`` as Fractions; a pattern is a tuple of 0 and 1.
"""

import math
from fractions import Fraction
from itertools import permutations, product
from math import ceil, comb, e, exp, log
from typing import NamedTuple

import numpy as np


def all_patterns(M):
    return list(product((0, 1), repeat=M))


def hamming(p, q):
    return sum(a != b for a, b in zip(p, q, strict=True))


def regions(patterns, errors):
    """pattern -> (count, summed error), for populated regions."""
    table = {}
    for pattern, error in zip(patterns, errors, strict=True):
        count, total = table.get(pattern, (0, Fraction(0)))
        table[pattern] = (count + 1, total + Fraction(error))
    return table


def histogram(query, patterns, M):
    counts = [0] * (M + 1)
    for pattern in patterns:
        counts[hamming(query, pattern)] += 1
    return counts


def u(d, patterns, M):
    """eq:practical_1, by its definition: all patterns against all samples."""
    return sum(d[hamming(h, p)] for h in all_patterns(M) for p in patterns)


def z(d, M, a):
    """eq:practical_2_2, by its meaning: the summed closeness of every pattern to two patterns a bits apart."""
    p, q = (0,) * M, (1,) * a + (0,) * (M - a)
    return sum(d[hamming(h, p)] * d[hamming(h, q)] for h in all_patterns(M))


def z_as_printed(d, M, a):
    """eq:practical_2_2, as the paper prints it."""
    return sum(
        d[b]
        * sum(comb(a, c) * comb(M - a, b - c) * d[a + (b - c) - c] for c in range(b + 1) if c <= a and b - c <= M - a)
        for b in range(M + 1)
    )


def density(d, patterns, M):
    """eq:density: P(h) of every pattern h."""
    mass = {h: sum(d[hamming(h, p)] for p in patterns) for h in all_patterns(M)}
    total = sum(mass.values())
    return {h: value / total for h, value in mass.items()}


def w(d, P, pattern):
    """eq:practical_2_1, by its definition: the expected closeness to one pattern."""
    return sum(P[h] * d[hamming(pattern, h)] for h in P)


def risk(d, P, patterns, errors, query):
    """R* by eq:dist_weighted_fact3: a sum over samples, not over regions."""
    total = sum(
        (d[hamming(p, query)] * Fraction(r) / w(d, P, p) for p, r in zip(patterns, errors, strict=True) if r),
        Fraction(0),
    )
    return total / len(patterns)


def auroc(scores, wrong):
    """Over all pairs of a wrong and a right row."""
    pairs = [
        (a, b) for a, x in zip(scores, wrong, strict=True) if x for b, y in zip(scores, wrong, strict=True) if not y
    ]
    return sum(Fraction(a > b) + Fraction(a == b) / 2 for a, b in pairs) / len(pairs)


def orders(scores):
    """All orders from most to least reliable that the scores allow."""
    rows = range(len(scores))
    return [o for o in permutations(rows) if all(scores[a] <= scores[b] for a, b in zip(o, o[1:], strict=False))]


def risk_coverage(scores, errors):
    """Mean error of the k most reliable, k = 1..n, averaged over all orders of tied rows."""
    allowed = orders(scores)
    curves = [[sum(Fraction(errors[i]) for i in order[:k]) / k for k in range(1, len(order) + 1)] for order in allowed]
    return [sum(column) / len(allowed) for column in zip(*curves, strict=True)]


def aucea(scores, errors):
    curve = risk_coverage(scores, errors)
    return sum(1 - risk for risk in curve) / len(curve)


def augrc(scores, errors):
    curve = risk_coverage(scores, errors)
    n = len(curve)
    joint = [Fraction(0)] + [risk * Fraction(k, n) for k, risk in enumerate(curve, 1)]
    return sum((a + b) / 2 for a, b in zip(joint, joint[1:], strict=False)) / n


def published(scores, errors, thresholds):
    """The published protocol's curves: (accepted, accepted errors) at each threshold, by counting."""
    finite = [s for s in scores if s not in (float("inf"), float("-inf"))]
    low, high = min(finite), max(finite)
    steps = [low + (high - low) * i / thresholds for i in range(thresholds)] + [high]
    points = []
    for t in [float("-inf"), *steps, float("inf")]:
        taken = [Fraction(e) for s, e in zip(scores, errors, strict=True) if s <= t]
        points.append((len(taken), sum(taken, Fraction(0))))
    return points


# ------------------------------------------------------------------------------------------------ explanations


class Region(NamedTuple):
    """A populated region as seen from a query."""

    pattern: np.ndarray
    distance: int
    share: float


def neighbourhood(bits, query, rho):
    """All populated regions by their share of the density at a query (Gaussian), the greatest first."""
    patterns = {tuple(row) for row in bits.tolist()}
    found = []
    for pattern in patterns:
        distance = sum(a != b for a, b in zip(pattern, query.tolist(), strict=True))
        count = sum(tuple(row) == pattern for row in bits.tolist())
        found.append((count * math.exp(-(distance**2) / (2 * rho**2)), distance, pattern))
    total = math.fsum(mass for mass, _, _ in found)
    found.sort(key=lambda region: (-region[0], region[1]))
    return [Region(np.array(pattern), distance, mass / total) for mass, distance, pattern in found]


# policies


def binomial_cdf(errors, trials, risk):
    return sum(comb(trials, k) * risk**k * (1 - risk) ** (trials - k) for k in range(errors + 1))


def hoeffding_bentkus(error_sum, trials, risk):
    mean = error_sum / trials
    kl = sum(a * log(a / b) for a, b in ((mean, risk), (1 - mean, 1 - risk)) if a > 0) if mean < risk else 0
    return min(exp(-trials * kl), e * float(binomial_cdf(ceil(error_sum), trials, Fraction(risk))))


def certify(scores, errors, risk, starts):
    """Learn-then-test by its words: {start: share of the budget}; rows in order. How many are accepted?"""
    accepted, level = 0, Fraction(0)
    for j in range(1, len(scores) + 1):
        p = binomial_cdf(sum(errors[:j]), j, risk)
        whole = j == len(scores) or scores[j - 1] < scores[j]
        finite = scores[j - 1] < float("inf")
        if whole and finite and p > level:
            level = Fraction(0)
        if j in starts and p <= starts[j]:
            level += starts[j]
        if whole and finite and level:
            accepted = j
    return accepted


def isotonic(scores, errors):
    """{score: probability of error}: the max-min formula, an error made up at the lowest score, a right one at the highest."""
    levels = sorted(set(scores))
    rows = [*zip(scores, errors, strict=True), (levels[0], 1), (levels[-1], 0)]

    def mean(a, b):
        block = [Fraction(r) for s, r in rows if a <= s <= b]
        return sum(block) / len(block)

    return {x: max(min(mean(a, b) for b in levels if b >= x) for a in levels if a <= x) for x in levels}
