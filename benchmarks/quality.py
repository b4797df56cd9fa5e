"""What the bound is worth on digits: AUROC beside entropy, for two networks and five seeds.

Not a race: it shows that the density needs a representation in which samples of one kind lie close together. The second
network has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from benchmarks.common import Figure, Report
from terrafirma import metrics, select
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
    return Report("quality", f"Digits, means of {SEEDS} seeds", figures).finish()


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


if __name__ == "__main__":
    run()
