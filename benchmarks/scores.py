"""Every score at a real size: time to fit and to score, and peak memory, beside pytorch-ood's version where it has one.

50 000 training samples and 10 000 queries of 512 features and 100 classes, float32: what a network would have given, drawn at
random around a centre for each class. Hyperparameters are fixed, so that nothing is searched.

``TERRAFIRMA_PYTORCH_OOD`` names the Python of an environment with torch and pytorch-ood 0.4 (see ``benchmarks/README.md``);
without it our scores are measured alone. Each score runs in two processes, one for each side, which are warmed up, hold the
data, and take turns; both use as many threads. What pytorch-ood gives is held against what we give.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.common import Figure, Report, Watch
from benchmarks.peer_scores import DIM, EPSILON, WARM_UP, Data, K, head_of, serve
from terrafirma import Recorded, scores
from terrafirma.core._threads import n_threads

N, Q, UNITS, CLASSES = 50_000, 10_000, 512, 100
SPREAD = 0.23  # of the centres, for noise of 1: one sample in 25 is put into a wrong class
PASSES = 10  # of MC dropout
ROOT = Path(__file__).parents[1]
PEER = os.environ.get("TERRAFIRMA_PYTORCH_OOD")
SECONDS, LEAST, MOST = 3.0, 2, 40  # of turns


@dataclass(frozen=True)
class Case:
    """One of our scores, and what pytorch-ood's must be multiplied by to give the same numbers, up to a constant."""

    name: str
    make: Callable[[Data], Any]
    peer: float | None = None
    at_least: float = 1.0  # times as fast, fit and score together
    alike: float = 0.99  # rank correlation: with less of it, speed says nothing


def _fixed(name: str, **parameters: Any) -> Callable[[Data], Any]:
    return lambda _: scores.get(name, **parameters)


CASES = (
    Case("max_response", _fixed("max_response"), 1.0),
    Case("entropy", _fixed("entropy"), 1.0),
    Case("energy", _fixed("energy"), 1.0),
    Case("max_logit", _fixed("max_logit"), 1.0),
    Case("gen", _fixed("gen"), CLASSES),  # a sum, theirs a mean
    Case("temperature", _fixed("temperature"), 1.0, alike=0.95),  # they end their search before the best temperature
    Case("react", _fixed("energy", react=0.9), 1.0),
    Case("odin", lambda data: scores.get("odin", temperature=1000.0, epsilon=EPSILON, model=head_of(data)), 1.0),
    Case("knn", _fixed("knn", k=K), 1.0, at_least=1.4),
    Case("vim", _fixed("vim", dim=DIM), 1.0),
    Case("mahalanobis", _fixed("mahalanobis"), 2.0 * N),  # half the square, of a covariance not divided by N
    Case("relative_mahalanobis", _fixed("relative_mahalanobis"), float(N)),
    Case("class_distance", _fixed("class_distance"), 2.0 * N, at_least=20.0),
    Case("margin", _fixed("margin")),
    Case("mc_dropout", _fixed("mc_dropout", p=0.5)),
    Case("cluster_distance", _fixed("cluster_distance", clusters="all")),
    Case("trust_score", _fixed("trust_score")),
    Case("gaussian_process", _fixed("gaussian_process", scale=1.0)),
)


def run() -> Report:
    figures, notes = [], [_peer_note()]
    with tempfile.TemporaryDirectory() as folder:
        draw().save(Path(folder) / "data.npz")
        for case in CASES:
            with Watch() as watch:
                figures += measure(case, Path(folder))
            notes += watch.note(case.name)
    title = f"Scores, fit on {N} x {UNITS} and {CLASSES} classes, for {Q} queries; {n_threads()} threads"
    return Report("scores", title, figures, notes).finish()


def draw() -> Data:
    """Clusters of features as after a ReLU, and a linear layer that tells them apart, sure of most of them."""
    rng = np.random.default_rng(0)
    centres = SPREAD * rng.standard_normal((CLASSES, UNITS), dtype=np.float32)

    def around(labels: Any) -> Any:
        features = rng.standard_normal((len(labels), UNITS), dtype=np.float32)
        features += centres[labels]
        return np.maximum(features, 0, out=features)

    labels, query_labels = rng.integers(0, CLASSES, N), rng.integers(0, CLASSES, Q)
    features, queries = around(labels), around(query_labels)
    means = np.stack([features[labels == c].mean(axis=0) for c in range(CLASSES)])
    weights = means - means.mean(axis=0)
    weights += 0.01 * rng.standard_normal(weights.shape, dtype=np.float32)  # of full rank, as a trained one
    bias = -(weights * means.mean(axis=0)).sum(axis=1) - (weights**2).sum(axis=1) / 2
    return Data(features, labels, features @ weights.T + bias, queries, queries @ weights.T + bias, weights, bias)


# ------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """The best times of one side, the most memory, and what it gave."""

    fit: float
    score: float
    peak: float
    found: Any

    @property
    def total(self) -> float:
        """Fit and score."""
        return self.fit + self.score


def measure(case: Case, folder: Path) -> list[Figure]:
    """Let both sides run in turns, or ours alone."""
    commands = {"ours": [sys.executable, "-m", "benchmarks.scores"]}
    if PEER is not None and case.peer is not None:
        commands["pytorch-ood"] = [PEER, str(ROOT / "benchmarks" / "peer_scores.py")]
    sides = _alternate(case.name, commands, folder)
    figures = []
    for side, measured in sides.items():
        figures += [
            Figure(f"{case.name}, {side}: fit", measured.fit, "s"),
            Figure(f"{case.name}, {side}: score", measured.score, "s"),
            Figure(f"{case.name}, {side}: peak memory beyond the data", measured.peak / 2**20, "MiB"),
        ]
    return figures + (_compared(case, *sides.values()) if len(sides) > 1 else [])


def _alternate(name: str, commands: dict[str, list[str]], folder: Path) -> dict[str, Measured]:
    """Start a process for each side, and take turns until each had its seconds."""
    threads = {f"{library}_NUM_THREADS": str(n_threads()) for library in ("OMP", "MKL", "OPENBLAS")}
    environment = os.environ | threads | {"TERRAFIRMA_THREADS": str(n_threads())}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in commands}
    with ExitStack() as stack:
        processes = {}
        for side, command in commands.items():
            whole = [*command, name, str(folder / "data.npz"), str(folder / f"{side}.npy")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            processes[side] = stack.enter_context(subprocess.Popen(whole, cwd=ROOT, env=environment, **pipes))
        for turn in range(MOST):
            for side in list(commands)[:: -1 if turn % 2 else 1]:
                if len(runs[side]) < LEAST or sum(run["fit"] + run["score"] for run in runs[side]) < SECONDS:
                    runs[side].append(_turn(processes[side]))
    return {
        side: Measured(
            min(run["fit"] for run in seen),
            min(run["score"] for run in seen),
            max(run["peak"] for run in seen),
            np.load(folder / f"{side}.npy"),
        )
        for side, seen in runs.items()
    }


def _turn(process: subprocess.Popen[str]) -> dict[str, float]:
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{' '.join(process.args)} ended with {process.wait()}; see what it printed.")
    return json.loads(answer)


def _compared(case: Case, ours: Measured, peer: Measured) -> list[Figure]:
    """How many times as fast ours is, and whether the answers agree."""
    ranks = float(spearmanr(ours.found, peer.found).statistic)
    apart = ours.found - case.peer * peer.found
    off = np.abs(apart - np.median(apart)).max() / ours.found.std()
    figures = [
        Figure(f"{case.name}: score, times as fast", peer.score / ours.score, "x"),
        Figure(f"{case.name}: fit and score, times as fast", peer.total / ours.total, "x", at_least=case.at_least),
        Figure(f"{case.name}: rank correlation of the scores", ranks, at_least=case.alike),
        Figure(f"{case.name}: largest difference, of the scores' spread", off),
    ]
    learns = min(ours.fit, peer.fit) > 1e-3
    return [Figure(f"{case.name}: fit, times as fast", peer.fit / ours.fit, "x")] * learns + figures


def _peer_note() -> str:
    if PEER is None:
        return "pytorch-ood left out: TERRAFIRMA_PYTORCH_OOD does not name a Python that has it."
    packages = ("pytorch-ood", "torch", "numpy", "scikit-learn")
    code = f"from importlib.metadata import version\nprint(*(f'{{p}} {{version(p)}}' for p in {packages}), sep=', ')"
    return (
        "Beside " + subprocess.run([PEER, "-c", code], check=True, capture_output=True, text=True).stdout.strip() + "."
    )


# ------------------------------------------------------------------------------------------------------ ours


def main(name: str, path: str, out: str) -> None:
    """Run one of our scores whenever asked."""
    data = Data.load(path)
    case = next(case for case in CASES if case.name == name)

    def fit(parts: tuple[Recorded, Recorded]) -> Any:
        train, _ = parts
        return case.make(data).fit(train, train if name == "temperature" else None)

    def score(fitted: Any, parts: tuple[Recorded, Recorded]) -> Any:
        return fitted.unreliability(parts[1])

    passes = _passes(data.query_logits) if name == "mc_dropout" else None
    serve(fit, score, _recorded(data, passes), _recorded(data.first(WARM_UP), passes), out)


def _recorded(data: Data, passes: Any) -> tuple[Recorded, Recorded]:
    """Training samples and queries, as one would record them."""
    rows = len(data.query_logits)
    train = Recorded(outputs=data.logits, features=data.features, labels=data.labels, head=(data.weights, data.bias))
    queries = Recorded(
        outputs=data.query_logits,
        features=data.query_features,
        inputs=data.query_features,
        stochastic={} if passes is None else {0.5: passes[:, :rows]},
    )
    return train, queries


def _passes(logits: Any) -> Any:
    rng = np.random.default_rng(1)
    return logits + rng.standard_normal((PASSES, *logits.shape), dtype=np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else run()
