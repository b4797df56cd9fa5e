"""What the bound is worth: AUROC beside entropy, on digits for two networks and five seeds, and on CIFAR10.

Not a race: it shows that the density needs a representation in which samples of one kind lie close together. The second
network of digits has none. CIFAR10 takes part where ``TERRAFIRMA_CAPTURES`` names a folder with what a network with a
ReLU layer of 512 units did: ``cnn512_{train,test,cifar100_test,svhn_test10k}.npz``, each with bits, outputs and labels.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from benchmarks.common import Figure, Report
from terrafirma import PackedPatterns, metrics, select
from terrafirma.capture.sklearn import hidden_activations
from terrafirma.scores.logits import entropy

KNOWN, N_TRAIN, N_VAL, SEEDS = 8, 400, 400, 5  # as in the demo
NETWORKS: dict[str, Callable[[int], MLPClassifier]] = {
    "128-128-128, SGD": lambda seed: MLPClassifier(
        (128, 128, 128),
        solver="sgd",
        learning_rate_init=0.1,
        alpha=1e-3,
        batch_size=50,
        max_iter=60,
        random_state=seed,
    ),
    "64-256, Adam": lambda seed: MLPClassifier((64, 256), max_iter=60, random_state=seed),
}


def run() -> Report:
    figures = []
    for name, make in NETWORKS.items():
        found = [_measure(make(seed), seed) for seed in range(SEEDS)]
        for key in found[0]:
            values = [each[key] for each in found]
            figures.append(Figure(f"{name}: {key}", float(np.mean(values)), f"+- {np.std(values):.3f}"))
    folder = os.environ.get("TERRAFIRMA_CAPTURES")
    if folder:
        figures += _cifar10(Path(folder))
    notes = [] if folder else ["CIFAR10 left out: TERRAFIRMA_CAPTURES names no folder."]
    return Report("quality", f"Digits (means of {SEEDS} seeds) and CIFAR10", figures, notes).finish()


def _measure(mlp: MLPClassifier, seed: int) -> dict[str, float]:
    X, y = load_digits(return_X_y=True)
    X = X / 16
    known = np.random.default_rng(seed).permutation(np.flatnonzero(y < KNOWN))
    train, val, test = np.split(known, [N_TRAIN, N_TRAIN + N_VAL])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 60 epochs are what is asked for
        mlp.fit(X[train], y[train])
    layer = hidden_activations(mlp, X)[-1]
    wrong = mlp.predict(X) != y
    selection = select(layer[train], wrong[train], layer[val], wrong[val])
    rows = np.concatenate([test, np.flatnonzero(y >= KNOWN)])
    novel = y[rows] >= KNOWN
    scores = {
        "log bound": selection.best.unreliability(layer[rows]),
        "entropy": entropy(layer[rows] @ mlp.coefs_[-1] + mlp.intercepts_[-1]),
    }
    found = {"AUCEA in validation": selection.metric, "AUCEA in validation, random order": float(selection.chance or 0)}
    for name, u in scores.items():
        found[f"{name}, AUROC wrong"] = metrics.auroc(u[~novel], wrong[test])
        found[f"{name}, AUROC 8 and 9"] = metrics.auroc(u, novel)
    return found


def _cifar10(folder: Path) -> list[Figure]:
    """Select on the first half of the test set, test on the second."""
    train, test, cifar100, svhn = (
        _Captured(folder / f"cnn512_{name}.npz") for name in ("train", "test", "cifar100_test", "svhn_test10k")
    )
    val, rest = slice(0, len(test.wrong) // 2), slice(len(test.wrong) // 2, None)
    best = select(train.patterns, train.wrong, test.patterns[val], test.wrong[val]).best
    known, wrong = test.patterns[rest], test.wrong[rest]
    terms = best.terms(test.patterns)
    figures = [
        Figure("CIFAR10: rho", best.rho, "bits"),
        Figure("CIFAR10: largest log of risk / gap", float((terms.log_risk - terms.log_gap).max())),
        Figure("CIFAR10: least log bound", float(terms.log_bound.min())),
        Figure("CIFAR10: greatest log bound", float(terms.log_bound.max())),
    ]
    for name, u, others in (
        ("log bound", best.unreliability(known), [best.unreliability(each.patterns) for each in (cifar100, svhn)]),
        ("entropy", entropy(test.outputs[rest]), [entropy(each.outputs) for each in (cifar100, svhn)]),
    ):
        figures.append(Figure(f"CIFAR10: {name}, AUROC wrong", metrics.auroc(u, wrong)))
        for other, novel in zip(("CIFAR100", "SVHN"), others, strict=True):
            is_novel = np.repeat([False, True], [len(u), len(novel)])
            figures.append(
                Figure(f"CIFAR10: {name}, AUROC {other}", metrics.auroc(np.concatenate([u, novel]), is_novel))
            )
    return figures + _ties(test)


def _ties(test: _Captured) -> list[Figure]:
    """What ties at the minimum cost 1 - max softmax in single precision."""
    outputs = test.outputs.astype(np.float32)
    exponentials = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    u = 1 - (exponentials / exponentials.sum(axis=1, keepdims=True)).max(axis=1)
    return [
        Figure("CIFAR10: single-precision max response, share tied at the minimum", float((u == u.min()).mean())),
        Figure("CIFAR10: its AUCEA as published", metrics.aucea(u, test.wrong, thresholds=1000)),
        Figure("CIFAR10: its AUCEA, exact", metrics.aucea(u, test.wrong)),
    ]


class _Captured:
    """What the network did on one set."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            bits, self.outputs, labels = file["bits"], file["outputs"], file["labels"]
        self.patterns = PackedPatterns.pack(np.unpackbits(bits, axis=1, count=512))
        self.wrong: Any = self.outputs.argmax(axis=1) != labels


if __name__ == "__main__":
    run()
