"""The paper's whole job at its real size, from boolean patterns: fit, search rho and delta, score.

42 500 training samples, 7 500 to select on, 10 000 to score, nine rho and eleven delta. The work grows with
the number of wrong training samples, so it is measured with few (1 %) and with many (20 %).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.common import N_TRAIN, BoolArray, Clusters, Figure, Report, Watch, race
from terrafirma import Selection, SubfunctionBound, select

N_SELECT, N_SCORE = 7_500, 10_000
RHOS = {
    2048: (4, 6, 8, 12, 16, 24, 32, 48, 64),
    4096: (32, 48, 64, 98, 128, 192, 256, 384, 512),
}
WRONG = (0.01, 0.20)
WRONG_SELECT = 0.08
TOTAL_SECONDS = {(2048, 0.01): 3.0, (4096, 0.01): 5.0, (2048, 0.20): 6.0, (4096, 0.20): 8.0}
SWEEP_SECONDS = {0.01: 2.0, 0.20: 4.0}


@dataclass(frozen=True)
class Job:
    """The data of one job: patterns to fit, to select and to score, with the errors of the first two."""

    train: BoolArray
    wrong: BoolArray
    val: BoolArray
    wrong_val: BoolArray
    test: BoolArray
    rhos: tuple[float, ...]

    def whole(self) -> Any:
        """Search the whole grid and score with the best."""
        return self.select(self.rhos, None).best.unreliability(self.test)

    def select(self, rhos: tuple[float, ...], deltas: tuple[float, ...] | None) -> Selection:
        """Fit, and search a grid; the paper's eleven delta by default."""
        return select(self.train, self.wrong, self.val, self.wrong_val, rhos=rhos, deltas=deltas)

    def fit(self) -> SubfunctionBound:
        """Fit for the middle rho."""
        return SubfunctionBound(rho=self.middle).fit(self.train, self.wrong)

    @property
    def middle(self) -> float:
        """The rho in the middle of the grid."""
        return self.rhos[len(self.rhos) // 2]


def run() -> Report:
    figures, notes = [], []
    for M in RHOS:
        with Watch() as watch:
            figures += _measure(M)
        notes += watch.note(f"M = {M}")
    title = f"From bool arrays: fit {N_TRAIN}, sweep 9 rho x 11 delta on {N_SELECT}, score {N_SCORE}"
    return Report("job", title, figures, notes).finish()


def _measure(M: int) -> list[Figure]:
    clusters = Clusters.seeded(M)
    train, val, test = (clusters.draw(n) for n in (N_TRAIN, N_SELECT, N_SCORE))
    wrong_val = clusters.wrong(N_SELECT, WRONG_SELECT)
    figures = []
    for share in WRONG:
        job = Job(train, clusters.wrong(N_TRAIN, share), val, wrong_val, test, RHOS[M])
        figures += _figures(f"M = {M}, {share:.0%} wrong", job, TOTAL_SECONDS[M, share], SWEEP_SECONDS[share])
    return figures


def _figures(name: str, job: Job, total: float, sweep: float) -> list[Figure]:
    est = job.fit()
    runs: dict[str, Callable[[], Any]] = {
        "total": job.whole,
        "sweep": lambda: job.select(job.rhos, None),
        "single": lambda: job.select((job.middle,), (0.001,)),
        "fit": job.fit,
        "score": lambda: est.unreliability(job.test),
    }
    times = race(runs, seconds=2.0, least=2, warm_up=False)
    return [
        Figure(f"{name}: total", times["total"], "s", at_most=total),
        Figure(f"{name}: of which fit", times["fit"], "s"),
        Figure(f"{name}: of which sweep, beyond fit", times["sweep"] - times["fit"], "s"),
        Figure(f"{name}: of which score", times["score"], "s"),
        Figure(f"{name}: sweep beyond a single setting", times["sweep"] - times["single"], "s", at_most=sweep),
    ]


if __name__ == "__main__":
    run()
