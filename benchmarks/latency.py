"""One query at a time, on a fitted estimator that is warm: what a service waits for an answer.

Estimators take turns in blocks of queries. The median of all calls is what one waits on this machine; the
smallest median of a block is what one waits when nothing else runs.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.common import N_TRAIN, Clusters, Figure, Report, Watch
from terrafirma import SubfunctionBound

SIZES = (512, 2048, 4096)
WRONG = (0.0, 0.01, 0.20)
BLOCKS, BLOCK = 20, 50
MICROSECONDS = {(512, 0.0): 150.0, (512, 0.01): 150.0}


def run() -> Report:
    figures, notes = [], []
    for M in SIZES:
        with Watch() as watch:
            figures += _measure(M)
        notes += watch.note(f"M = {M}")
    return Report("latency", f"One query among {N_TRAIN} training samples, warm", figures, notes).finish()


def _measure(M: int) -> list[Figure]:
    clusters = Clusters.seeded(M)
    train, queries = clusters.draw(N_TRAIN), clusters.draw(BLOCK)
    estimators = {share: SubfunctionBound(rho=16.0).fit(train, clusters.wrong(N_TRAIN, share)) for share in WRONG}
    waits: dict[float, list[list[float]]] = {share: [] for share in WRONG}
    for est in estimators.values():
        _block(est, queries)
    for _ in range(BLOCKS):
        for share, est in estimators.items():
            waits[share].append(_block(est, queries))
    figures = []
    for share, blocks in waits.items():
        name, target = f"M = {M}, {share:.0%} wrong", MICROSECONDS.get((M, share))
        figures += [
            Figure(f"{name}: median", float(np.median(blocks)) * 1e6, "µs", at_most=target),
            Figure(f"{name}: median, best block", float(np.median(blocks, axis=1).min()) * 1e6, "µs"),
        ]
    return figures


def _block(est: SubfunctionBound, queries: np.ndarray) -> list[float]:
    """Score queries one by one; how long each takes, in seconds."""
    seconds = []
    for x in queries:
        start = time.perf_counter()
        est.unreliability(x[None])
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    run()
