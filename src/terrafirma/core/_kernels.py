"""The loops beside those over all pairs: rows hashed, grouped and laid out, and two sums. Numba only; no formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrafirma.core._jit import kernel
from terrafirma.core.patterns import BoolArray, FloatArray, IntArray, WordArray

LEAST, ENOUGH = -690.0, 1e-260  # fewer than 2^63 times e^-690 are nothing beside 1e-260


@kernel
def log_sums(histograms: Any, log_tables: FloatArray, out: FloatArray) -> None:
    """Logs of histograms times tables: ``out[q, r] = log sum_h histograms[q, h, r] exp(log_tables[r, h])``.

    histograms (Q, M + 1, R or 1), a last axis of 1 serving all tables. Nothing overflows, and only what is nothing beside
    the sum underflows: each table is scaled by its largest entry, and where the sum is then too small to be exact, by the
    largest among the occupied distances.
    """
    n, width, columns = histograms.shape
    for r in range(len(log_tables)):
        log_table, c = log_tables[r], r if columns > 1 else 0
        largest = log_table.max()
        table = np.zeros(width)
        for h in range(width):
            if log_table[h] > largest + LEAST:
                table[h] = math.exp(log_table[h] - largest)
        for q in range(n):
            total = _dot(histograms, q, c, table)
            if total > ENOUGH:
                out[q, r] = largest + math.log(total)
            else:
                out[q, r] = _log_sum(histograms, q, c, log_table)


@kernel
def _dot(histograms: Any, q: int, c: int, table: FloatArray) -> float:
    """``sum_h histograms[q, h, c] table[h]``, in four sums side by side: a single one would wait for each addition."""
    a0 = a1 = a2 = a3 = 0.0
    whole = len(table) // 4 * 4
    for h in range(0, whole, 4):
        a0 += histograms[q, h, c] * table[h]
        a1 += histograms[q, h + 1, c] * table[h + 1]
        a2 += histograms[q, h + 2, c] * table[h + 2]
        a3 += histograms[q, h + 3, c] * table[h + 3]
    for h in range(whole, len(table)):
        a0 += histograms[q, h, c] * table[h]
    return float((a0 + a1) + (a2 + a3))


@kernel
def _log_sum(histograms: Any, q: int, c: int, log_table: FloatArray) -> float:
    """Log of ``sum_h histograms[q, h, c] exp(log_table[h])``, scaled by the largest entry among occupied distances."""
    largest = -np.inf
    for h in range(len(log_table)):
        if histograms[q, h, c] != 0:
            largest = max(largest, log_table[h])
    if largest == -np.inf:
        return largest
    total = 0.0
    for h in range(len(log_table)):
        if histograms[q, h, c] != 0:
            total += histograms[q, h, c] * math.exp(log_table[h] - largest)
    return float(largest + math.log(total))


@kernel
def hash_rows(words: WordArray, out: WordArray) -> None:
    """A 64-bit hash of each row: equal rows have equal hashes. Part of the file format: it orders the regions."""
    for i in range(len(words)):
        h = np.uint64(0x9E3779B97F4A7C15)
        for w in range(words.shape[1]):
            h = (h ^ words[i, w]) * np.uint64(0xFF51AFD7ED558CCD)
            h ^= h >> np.uint64(32)
        out[i] = h


@kernel
def find_groups(words: WordArray, hashes: WordArray, order: IntArray, first: BoolArray) -> bool:
    """Mark in ``first`` where row ``order[i]`` is another pattern than the one before it.

    Returns whether two different neighbours have one hash, so that equal patterns may stand apart.
    """
    collision = False
    for i in range(len(order)):
        first[i] = i == 0
        for w in range(words.shape[1]):
            if first[i]:
                break
            first[i] = words[order[i], w] != words[order[i - 1], w]
        collision |= i > 0 and first[i] and hashes[order[i]] == hashes[order[i - 1]]
    return collision


@kernel
def number_groups(order: IntArray, first: BoolArray, group: IntArray) -> None:
    """Number the groups that begin where ``first`` is set: the group of each row."""
    g = -1
    for i in range(len(order)):
        g += first[i]
        group[order[i]] = g


@kernel
def sum_groups(group: IntArray, values: FloatArray, sums: FloatArray) -> None:
    """Add the values of each group to its sum; what rounding loses is summed apart and added in the end (Neumaier)."""
    lost = np.zeros_like(sums)
    for i in range(len(group)):
        g = group[i]
        total = sums[g] + values[i]
        if sums[g] >= values[i]:
            lost[g] += (sums[g] - total) + values[i]
        else:
            lost[g] += (values[i] - total) + sums[g]
        sums[g] = total
    for g in range(len(sums)):
        sums[g] += lost[g]


@kernel
def permute_rows(words: WordArray, permutation: IntArray) -> None:
    """Put row ``permutation[i]`` at ``i`` for all rows, in place, cycle by cycle; the permutation is used up."""
    lifted = np.empty(words.shape[1], dtype=np.uint64)
    for start in range(len(words)):
        if permutation[start] < 0:
            continue
        lifted[:] = words[start]
        i = start
        while permutation[i] != start:
            source = permutation[i]
            words[i] = words[source]
            permutation[i] = -1
            i = source
        words[i] = lifted
        permutation[i] = -1


@kernel
def rows_to_panels(blocks: WordArray) -> None:
    """Turn each block of 32 rows (n, 32, W) into a panel (W, 32), in its own memory."""
    _, height, n_words = blocks.shape
    block = np.empty((height, n_words), dtype=np.uint64)
    for b in range(len(blocks)):
        block[:] = blocks[b]
        panel = blocks[b].reshape(n_words, height)
        for w in range(n_words):
            for j in range(height):
                panel[w, j] = block[j, w]


@kernel
def log_double_sum(log_d: FloatArray, log_differing: FloatArray, log_others: FloatArray) -> float:
    """Log of ``sum_c sum_e exp(log_differing[c] + log_others[e] + log_d[c + e] + log_d[a - c + e])``, c = 0..a."""
    a = len(log_differing) - 1
    largest = -np.inf
    for c in range(a + 1):
        for e in range(len(log_others)):
            largest = max(largest, log_differing[c] + log_others[e] + log_d[c + e] + log_d[a - c + e])
    total = 0.0
    for c in range(a + 1):
        for e in range(len(log_others)):
            above = log_differing[c] + log_others[e] + log_d[c + e] + log_d[a - c + e] - largest
            if above > -80.0:  # of 2^60 terms the rest would be nothing
                total += math.exp(above)
    return float(largest + math.log(total))


@kernel
def log_binomial_sum(n: int, shift: float, rho: float, scale: float, log_factorial: FloatArray) -> float:
    """Log of ``sum_c C(n, c) exp(-scale ((c + shift) / rho)^2)`` over c = 0..n.

    The terms are log-concave: the largest is found by bisection on the ratio of neighbours, and the sum runs outward from
    it, term by ratio of terms, until nothing is left to add.
    """
    low, high = 0, n  # the peak: the first c whose ratio to the next term is at most 1
    while low < high:
        c = (low + high) // 2
        if math.log((n - c) / (c + 1.0)) > scale * ((2 * (c + shift) + 1) / rho) / rho:
            low = c + 1
        else:
            high = c
    peak = low
    total, term = 1.0, 1.0
    for c in range(peak, n):
        term *= (n - c) / (c + 1.0) * math.exp(-scale * ((2 * (c + shift) + 1) / rho) / rho)
        total += term
        if term < 1e-22:
            break
    term = 1.0
    for c in range(peak, 0, -1):
        term *= c / (n - c + 1.0) * math.exp(scale * ((2 * (c + shift) - 1) / rho) / rho)
        total += term
        if term < 1e-22:
            break
    x = (peak + shift) / rho
    return float(log_factorial[n] - log_factorial[peak] - log_factorial[n - peak] - scale * x * x + math.log(total))
