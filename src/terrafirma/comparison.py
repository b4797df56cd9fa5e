"""Which score is best for a network: all of them on the same recordings, side by side, with intervals."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from terrafirma import scores as known_scores
from terrafirma.capture.progress import progress_bar
from terrafirma.core._checks import check_count, check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput, TerrafirmaError
from terrafirma.guard.guard import Guard
from terrafirma.metrics import Interval
from terrafirma.recorded import Recorded
from terrafirma.resampling import FIGURES, figures
from terrafirma.scores.base import Score
from terrafirma.scores.ensembles import EnsembleScore, joint
from terrafirma.tables import Table

__all__ = ["Comparison", "Result", "compare"]

WRONG = "misclassified"  # what the network's own errors are called beside sets that it never saw
TITLES = {"auroc": "AUROC", "aucea": "AUCEA", "fpr95": "FPR95", "aurc": "AURC"}
DRAWS = 200
LONG = ("residual_flow",)  # trains a network of its own, so it has to be asked for


class Result(NamedTuple):
    """One figure of one score: ``data`` is "misclassified", or the name of an out-of-distribution set."""

    network: str
    score: str
    data: str
    metric: str
    interval: Interval | None

    @property
    def bounds(self) -> tuple[float | None, float | None, float | None]:
        """Value, low and high end."""
        one = self.interval
        return (None, None, None) if one is None else (one.value, one.low, one.high)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """What ``compare`` found.

    Attributes
    ----------
    results : tuple of Result
        Each figure with its bootstrap interval; None where it is not defined, as AUROC where nothing is wrong.
    fitted : dict of (network, score) to Score
    left_out : dict of str to str
        Scores that could not be computed, and why; only where no scores were named.

    """

    results: tuple[Result, ...]
    fitted: Mapping[tuple[str, str], Any]
    left_out: Mapping[str, str]

    def value(self, score: str, data: str = WRONG, metric: str = "auroc", network: str | None = None) -> float:
        """One figure; ``network`` where there are several."""
        rows = [row for row in self._rows(data, metric, network) if row.score == score]
        if len(rows) != 1 or rows[0].interval is None:
            raise InvalidInput(
                "score, data, metric and network must name one figure that is defined. Got "
                f"{(score, data, metric, network)}, which names {len(rows)}; results lists all."
            )
        return rows[0].interval.value

    def best(self, data: str = WRONG, metric: str = "auroc", network: str | None = None) -> str:
        """The score with the best figure."""
        found = _best(self._rows(data, metric, network))
        if found is None:
            raise InvalidInput(
                "data, metric and network must name figures that are defined. Got "
                f"{(data, metric, network)}; results lists all."
            )
        return found.score

    def _rows(self, data: str, metric: str, network: str | None) -> list[Result]:
        return [row for row in self.results if row[2:4] == (data, metric) and network in (None, row.network)]

    def table(self) -> Table:
        """One line for each network, set of data and score; the best of each in bold."""
        rows: list[tuple[str, ...]] = []
        bold: set[tuple[int, int]] = set()
        for network, data in dict.fromkeys((row.network, row.data) for row in self.results):
            columns = [self._rows(data, metric, network) for metric in FIGURES]
            best = [_best(column) for column in columns]
            for line in zip(*columns, strict=True):
                winners = [j for j, row in enumerate(line) if row.interval and _value(row) == _value(best[j])]
                bold |= {(len(rows), 3 + j) for j in winners}
                rows.append((network, data, line[0].score, *(_shown(row.interval) for row in line)))
        return Table(("network", "data", "score", *(TITLES[metric] for metric in FIGURES)), rows, bold)

    def to_csv(self) -> str:
        """All figures as numbers, a line for each."""
        rows = [(*row[:4], *("" if bound is None else repr(bound) for bound in row.bounds)) for row in self.results]
        return Table(("network", "score", "data", "metric", "value", "low", "high"), rows).to_csv()

    def to_markdown(self) -> str:
        """The table for a page."""
        return self.table().to_markdown()

    def to_latex(self) -> str:
        """The table for a paper."""
        return self.table().to_latex()

    def __str__(self) -> str:
        left = [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join([str(self.table()), "* the best", *left])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def compare(
    networks: Mapping[str, Sequence[Any]],
    scores: Sequence[str | Score | Guard] | Mapping[str, str | Score | Guard] | None = None,
    *,
    draws: int = DRAWS,
    confidence: float = 0.95,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Fit scores on recordings, and measure how well each tells wrong and unknown samples from right ones.

    Parameters
    ----------
    networks : dict of name to (train, validation, test) or (train, validation, test, {name: out-of-distribution set})
        Recordings. Hyperparameters are chosen on the validation data's errors; the rest is only for measuring. Fitted guards
        need the test set alone, (None, None, test).
    scores : list of names, scores or fitted guards, or a dict of them by name, optional
        By default all whose needs were recorded, but for residual_flow, which trains a network of its own; what cannot be
        computed is then left out, and listed. Ensemble scores take all networks together, which must have been recorded on
        the same samples.
    draws, confidence, seed
        Of the bootstrap intervals.
    progress : bool, optional
        Whether to show a bar; by default on a terminal.

    AUROC, AUCEA, FPR at 95 % TPR and AURC are exact and by ranks, as in ``metrics``. Against an out-of-distribution set, all of
    its samples count as wrong and all of the test set as right.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(900, 3)) * 3
    >>> labels = (logits + rng.normal(size=(900, 3))).argmax(axis=1)
    >>> recorded = Recorded(outputs=logits, labels=labels)
    >>> found = compare({"toy": (recorded[:300], recorded[300:600], recorded[600:])}, ["entropy", "margin"], draws=50)
    >>> found.best()
    'margin'

    """
    sets = {name: _Sets.of(name, given) for name, given in networks.items()}
    if not sets:
        raise InvalidInput(
            "networks must hold at least one network. Got none; give {'name': (train, validation, test)}."
        )
    check_count("draws", draws, least=1)
    check_share("confidence", confidence, "the share of such intervals that hold the true value")
    chosen = _chosen(scores)
    left_out: dict[str, str] = {}
    results: list[Result] = []
    fitted: dict[tuple[str, str], Any] = {}
    jobs = list(_jobs(chosen, sets, named=scores is not None))
    with progress_bar("comparing", len(jobs), shown=progress) as advance:
        for network, label, score, given in jobs:
            try:
                ready, unreliability = _fitted(score, given)
            except TerrafirmaError as error:
                if scores is not None:
                    raise
                left_out[label] = str(error)
            else:
                fitted[network, label] = ready
                for data, u, errors in _truths(given, unreliability):
                    measured = figures(u, errors, draws, confidence, seed)
                    results += [Result(network, label, data, metric, one) for metric, one in measured.items()]
            advance(1)
    return Comparison(tuple(results), fitted, left_out)


@dataclass(frozen=True, eq=False)
class _Sets:
    """The recordings of a network; of an ensemble, lists of them, and what it is as one network."""

    train: Any
    validation: Any
    test: Any
    ood: Mapping[str, Any]
    errors: FloatArray

    @classmethod
    def of(cls, name: str, given: Any) -> _Sets:
        if not isinstance(given, Sequence) or len(given) not in (3, 4):
            raise InvalidInput(
                f"networks[{name!r}] must be (train, validation, test), and a dict of out-of-distribution sets where there "
                f"are any. Got {type(given).__name__}{f' of {len(given)}' if isinstance(given, Sequence) else ''}."
            )
        train, validation, test, *rest = given
        ood = dict(rest[0]) if rest else {}
        for role, one in {"train": train, "validation": validation, "test": test, **ood}.items():
            if not isinstance(one, Recorded) and not (one is None and role in ("train", "validation")):
                raise InvalidInput(
                    f"networks[{name!r}] must hold recordings. Got {type(one).__name__} for {role}; "
                    "make them with terrafirma.record."
                )
        if WRONG in ood:
            raise InvalidInput(f"An out-of-distribution set must not be called {WRONG!r}. Got one; rename it.")
        return cls(train, validation, test, ood, test.need("errors", by="compare"))


def _chosen(scores: Any) -> dict[str, Score | Guard]:
    """Scores and fitted guards, by the names that they go by in the table."""
    if scores is None:
        scores = [name for name in known_scores.available() if name not in LONG]
    many = isinstance(scores, Sequence | Mapping) and not isinstance(scores, str) and len(scores) > 0
    items = list(scores.items()) if isinstance(scores, Mapping) else [(None, item) for item in scores] if many else []
    if not many or not all(isinstance(item, str | Score | Guard) for _, item in items):
        raise InvalidInput(
            f"scores must be a list of names, scores or fitted guards, or a dict of them by name. Got {scores!r:.80}."
        )
    chosen: dict[str, Score | Guard] = {}
    for name, item in items:
        score = known_scores.get(item) if isinstance(item, str) else item
        label = name or (score.label if isinstance(score, Score) else "guard")
        if label in chosen:
            raise InvalidInput(f"scores must differ. Got {label!r} twice; name them, {{'one': ..., 'other': ...}}.")
        chosen[label] = score
    return chosen


def _jobs(
    chosen: Mapping[str, Score | Guard], sets: Mapping[str, _Sets], *, named: bool
) -> Iterator[tuple[str, str, Score | Guard, _Sets]]:
    """Each score for each network; ensemble scores for all of them."""
    ensembles = {label: score for label, score in chosen.items() if isinstance(score, EnsembleScore)}
    for network, given in sets.items():
        yield from ((network, label, score, given) for label, score in chosen.items() if label not in ensembles)
    together = _together(list(sets.values()), named=named) if ensembles else None
    if together is not None:
        yield from ((f"all {len(sets)}", label, score, together) for label, score in ensembles.items())


def _together(sets: list[_Sets], *, named: bool) -> _Sets | None:
    """The networks as an ensemble; None where they were not recorded on the same samples and no one asked for it."""
    labels = [one.test.labels for one in sets]
    same = len(sets) > 1 and all(
        one is not None and labels[0] is not None and np.array_equal(one, labels[0]) for one in labels
    )
    if not same or len({tuple(one.ood) for one in sets}) > 1:
        if named:
            raise InvalidInput(
                "Ensemble scores must have several networks, recorded on the same samples. Got "
                f"{f'{len(sets)} with differing test sets' if len(sets) > 1 else 'one'}; leave these scores out."
            )
        return None
    ood = {name: [one.ood[name] for one in sets] for name in sets[0].ood}
    train, validation, test = ([getattr(one, role) for one in sets] for role in ("train", "validation", "test"))
    return _Sets(train, validation, test, ood, joint(test).need("errors", by="compare"))


def _fitted(score: Score | Guard, given: _Sets) -> tuple[Any, dict[str, FloatArray]]:
    """The fitted score, and its unreliability on the test set and on all others."""
    ready: Any = score
    if isinstance(score, Score):
        ready = copy.copy(score).fit(given.train, given.validation)
    data = {WRONG: given.test, **given.ood}
    return ready, {name: ready.unreliability(one) for name, one in data.items()}


def _truths(given: _Sets, unreliability: Mapping[str, FloatArray]) -> Iterator[tuple[str, FloatArray, FloatArray]]:
    """What is to be told apart: wrong from right predictions, and each other set from the test set."""
    known = unreliability[WRONG]
    yield WRONG, known, given.errors
    for name in given.ood:
        novel = unreliability[name]
        yield name, np.concatenate([known, novel]), np.repeat([0.0, 1.0], [len(known), len(novel)])


def _best(rows: Sequence[Result]) -> Result | None:
    """The row with the best figure; of equals, the first; None where none is defined."""
    defined = [row for row in rows if row.interval is not None]
    return max(defined, key=_value) if defined else None


def _value(row: Result | None) -> float:
    """A row's figure, with the sign that makes higher better."""
    if row is None or row.interval is None:
        return -np.inf
    return row.interval.value if FIGURES[row.metric] else -row.interval.value


def _shown(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)
