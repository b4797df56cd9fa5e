"""Handwritten digits: an MLP that has learned 0 to 7 meets its own mistakes, and the never-seen 8 and 9.

The data ships with scikit-learn. The pattern is that of the last hidden ReLU layer, as in the paper's image experiments.
Hyperparameters are selected on validation misclassification; 8 and 9 are never seen before the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from terrafirma import metrics
from terrafirma.capture.sklearn import hidden_activations
from terrafirma.core.patterns import BoolArray, FloatArray
from terrafirma.scores.logits import entropy, margin, max_response
from terrafirma.scores.subfunction_search import Selection, select

__all__ = ["REFUSED", "Digits", "ScoreRow", "run"]

KNOWN = 8  # digits 0 to 7 are learned
HIDDEN = (128, 128, 128)
EPOCHS = 60
N_TRAIN, N_VAL = 400, 400
REFUSED = (0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class ScoreRow:
    """How well one score tells which predictions to trust.

    Attributes
    ----------
    score : str
    auroc_wrong : metrics.Interval
        Among the known digits: misclassified against right, with its 95 % bootstrap interval, as few are wrong.
    aucea : float
        Among the known digits: mean accuracy over all shares accepted.
    auroc_novel : float
        Known digits against 8 and 9.
    accuracy : tuple of float
        Of the known digits that remain when the shares ``REFUSED`` of the least reliable are refused.

    """

    score: str
    auroc_wrong: metrics.Interval
    aucea: float
    auroc_novel: float
    accuracy: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Digits:
    """The outcome: the table, and what a picture of it needs.

    Attributes
    ----------
    rows : list of ScoreRow
    curves : dict of str to RiskCoverage
        By score, on the known test digits.
    images, predictions, wrong : arrays (n, 8, 8), (n,), (n,)
        Known test digits, then 8 and 9; ``wrong`` is False where no label was learned.
    novel : bool array (n,)
    log_bound : float64 array (n,)
    selection : Selection
    n_train : int

    """

    rows: list[ScoreRow]
    curves: dict[str, metrics.RiskCoverage]
    images: FloatArray
    predictions: FloatArray
    wrong: BoolArray
    novel: BoolArray
    log_bound: FloatArray
    selection: Selection
    n_train: int


def run(seed: int = 0, advance: Callable[[], None] = lambda: None) -> Digits:
    """Train, select, score; ``advance`` is called after each of ``STEPS``."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    digits = load_digits()
    X, y = digits.data / 16.0, digits.target
    known = np.random.default_rng(seed).permutation(np.flatnonzero(y < KNOWN))
    train, val, test = np.split(known, [N_TRAIN, N_TRAIN + N_VAL])
    mlp = MLPClassifier(HIDDEN, solver="sgd", learning_rate_init=0.1, alpha=1e-3, batch_size=50, random_state=seed)
    for _ in range(EPOCHS):
        mlp.partial_fit(X[train], y[train], classes=np.arange(KNOWN))
        advance()

    def pattern(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> FloatArray:
        return hidden_activations(mlp, X[rows])[-1]

    def errors(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> BoolArray:
        return np.asarray(mlp.predict(X[rows]) != y[rows])

    selection = select(pattern(train), errors(train), pattern(val), errors(val))
    advance()

    rows = np.concatenate([test, np.flatnonzero(y >= KNOWN)])
    novel = y[rows] >= KNOWN
    wrong = errors(test)
    logits = pattern(rows) @ mlp.coefs_[-1] + mlp.intercepts_[-1]
    log_bound = selection.best.unreliability(pattern(rows))
    scores = {
        "subfunction bound": log_bound,
        "max response": max_response(logits),
        "entropy": entropy(logits),
        "margin": margin(logits),
    }
    advance()
    return Digits(
        rows=[_row(name, u, wrong, novel) for name, u in scores.items()],
        curves={name: metrics.risk_coverage(u[~novel], wrong) for name, u in scores.items()},
        images=digits.images[rows],
        predictions=mlp.predict(X[rows]),
        wrong=np.concatenate([wrong, np.zeros(novel.sum(), dtype=bool)]),
        novel=novel,
        log_bound=log_bound,
        selection=selection,
        n_train=len(train),
    )


STEPS = EPOCHS + 2


def _row(name: str, u: FloatArray, wrong: BoolArray, novel: BoolArray) -> ScoreRow:
    curve = metrics.risk_coverage(u[~novel], wrong)
    kept = [round((1 - share) * len(wrong)) for share in REFUSED]
    return ScoreRow(
        score=name,
        auroc_wrong=metrics.bootstrap(metrics.auroc, u[~novel], wrong),
        aucea=metrics.aucea(u[~novel], wrong),
        auroc_novel=metrics.auroc(u, novel),
        accuracy=tuple(float(1 - curve.risk[k - 1]) for k in kept),
    )
