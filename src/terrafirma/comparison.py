"""Which score is best for a network: all of them on the same recordings, side by side, with intervals."""

from __future__ import annotations

import copy
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
LONG = {"residual_flow": "It trains a network of its own. Name it, to have it computed."}


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
    counts : dict of (network, data) to (int, int)
        Wrong (or unknown) samples, and all of them.
    settings : dict of (network, score) to dict
        The hyperparameters in use.
    left_out : dict of (network, score) to str
        Scores that could not be computed, and why; only where no scores were named.

    """

    results: tuple[Result, ...]
    counts: Mapping[tuple[str, str], tuple[float, int]]
    settings: Mapping[tuple[str, str], Mapping[str, Any]]
    left_out: Mapping[tuple[str, str], str]

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
        rows = self._rows(data, metric, network)
        found = _best(rows)
        if found is None:
            known = {
                part: list(dict.fromkeys(getattr(row, part) for row in self.results)) for part in Result._fields[:4]
            }
            raise InvalidInput(
                f"data, metric and network must name figures that are defined. Got {(data, metric, network)}; there are data "
                f"{known['data']}, metrics {known['metric']} and networks {known['network']}."
            )
        several = sorted({row.network for row in rows})
        if len(several) > 1:
            raise InvalidInput(
                f"network must be one of {', '.join(several)}. Got none; the best of each is another question."
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
                wrong, n = self.counts[network, data]
                rows.append(
                    (network, f"{data}: {wrong:g} of {n}", line[0].score, *(_shown(row.interval) for row in line))
                )
        return Table(("network", "data", "score", *(TITLES[metric] for metric in FIGURES)), rows, bold)

    def to_csv(self) -> str:
        """All figures as numbers, a line for each."""
        rows = [(*row[:4], *("" if bound is None else repr(bound) for bound in row.bounds)) for row in self.results]
        return Table(("network", "score", "data", "metric", "value", "low", "high"), rows).to_csv()

    def to_markdown(self) -> str:
        """The table for a page, and what was left out."""
        notes = "".join(f"- {note}\n" for note in self.notes())
        return self.table().to_markdown() + (f"\n{notes}" if notes else "")

    def to_latex(self) -> str:
        """The table for a paper; what was left out are comments."""
        return self.table().to_latex() + "".join(f"% {note}\n" for note in self.notes())

    def notes(self) -> list[str]:
        """What was left out, and why."""
        return [f"left out: {score} ({network}): {why}" for (network, score), why in self.left_out.items()]

    def __str__(self) -> str:
        return "\n".join([str(self.table()), "* the best", *self.notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes())
        return self.table()._repr_html_() + (f"<ul>{notes}</ul>" if notes else "")


def compare(
    networks: Mapping[str, Sequence[Any]],
    scores: Sequence[str | Score] | Mapping[str, str | Score] | None = None,
    guards: Mapping[str, Guard] | None = None,
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
        Recordings. Hyperparameters are chosen on the validation data's errors; the rest is only for measuring.
    scores : list of names or scores, or a dict of them by name, optional
        By default all whose needs were recorded, but for residual_flow, which trains a network of its own; what cannot be
        computed is then left out, and listed. Ensemble scores take all networks together, which must have been recorded on
        the same samples, and their errors are those of the mean probability. An empty list, where only guards are to be
        measured: they need the test set alone, (None, None, test).
    guards : dict of name to fitted Guard, optional
        Measured beside the scores.
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
    check_count("draws", draws, least=1)
    check_count("seed", seed, least=0)
    check_share("confidence", confidence, "the share of such intervals that hold the true value")
    sets = _checked_networks(networks)
    chosen = _checked_scores(scores, guards or {})
    if chosen and any(one.train is None for one in sets.values()):
        raise InvalidInput(
            "networks must have training data for scores to learn from. Got None; for guards alone use scores=[]."
        )
    results: list[Result] = []
    counts: dict[tuple[str, str], tuple[float, int]] = {}
    settings: dict[tuple[str, str], Mapping[str, Any]] = {}
    left_out = {} if scores is not None else {(name, score): why for name in sets for score, why in LONG.items()}
    jobs = _jobs({**chosen, **(guards or {})}, sets)
    with progress_bar("comparing", len(jobs), shown=progress) as advance:
        for network, label, score, make in jobs:
            try:
                given = make()
                settings[network, label], unreliability = _computed(score, given)
            except TerrafirmaError as error:
                if scores is not None:
                    raise
                left_out[network, label] = str(error)
            except Exception as error:
                error.add_note(f"This came up while the score {label} was computed for {network}.")
                raise
            else:
                for data, u, errors in _truths(given, unreliability):
                    counts[network, data] = float(errors.sum()), len(errors)
                    measured = figures(u, errors, draws, confidence, seed)
                    results += [Result(network, label, data, metric, one) for metric, one in measured.items()]
            advance(1)
    return Comparison(tuple(results), counts, settings, left_out)


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
        if not isinstance(given, Sequence) or len(given) not in (3, 4) or (len(given) == 4 and not _is_dict(given[3])):
            shown = (
                ", ".join(type(part).__name__ for part in given)
                if isinstance(given, Sequence)
                else type(given).__name__
            )
            raise InvalidInput(
                f"networks[{name!r}] must be (train, validation, test), and a dict of out-of-distribution sets where there "
                f"are any. Got {shown:.200}."
            )
        train, validation, test, *rest = given
        ood = dict(rest[0] or {}) if rest else {}
        for role, one in {"train": train, "validation": validation, "test": test, **ood}.items():
            if one is None and role in ("train", "validation"):
                continue
            if not isinstance(one, Recorded):
                raise InvalidInput(
                    f"networks[{name!r}] must hold recordings. Got {type(one).__name__} for {role}; "
                    "make them with terrafirma.record."
                )
            if not len(one):
                raise InvalidInput(f"networks[{name!r}] must hold samples in every set. Got none in {role}.")
        _check_sources(name, {"train": train, "validation": validation, "test": test, **ood})
        if WRONG in ood:
            raise InvalidInput(f"An out-of-distribution set must not be called {WRONG!r}. Got one; rename it.")
        return cls(train, validation, test, ood, test.need("errors", by="compare"))

    @classmethod
    def together(cls, sets: list[_Sets]) -> _Sets:
        """Several networks as an ensemble, whose errors are those of the mean probability."""
        labels = [one.test.labels for one in sets]
        same = all(one is not None and np.array_equal(one, labels[0]) for one in labels)
        if len(sets) < 2 or not same or len({tuple(one.ood) for one in sets}) > 1:
            raise InvalidInput(
                "Ensemble scores must have several networks, recorded on the same samples. Got "
                f"{f'{len(sets)} with differing test sets' if len(sets) > 1 else 'one'}; leave these scores out."
            )
        ood = {name: [one.ood[name] for one in sets] for name in sets[0].ood}
        train, validation, test = ([getattr(one, role) for one in sets] for role in ("train", "validation", "test"))
        return cls(train, validation, test, ood, joint(test).need("errors", by="compare"))


MakeSets = Callable[[], _Sets]


def _check_sources(network: str, sets: Mapping[str, Recorded | None]) -> None:
    """Raise where recordings that know where they are from are of other networks or layers, or of the same samples."""
    seen: dict[str, tuple[str, Recorded]] = {}
    first = next(one for one in sets.values() if one is not None)
    for role, one in sets.items():
        if one is None:
            continue
        if one.layer_names and first.layer_names and one.layer_names != first.layer_names:
            now, before = ", ".join(one.layer_names), ", ".join(first.layer_names)
            raise InvalidInput(
                f"networks[{network!r}] must hold recordings of the same layers. Got {now} for {role}, and {before} before; "
                "record all alike."
            )
        if one.source is None:
            continue
        if first.source is not None and one.source.model_fingerprint != first.source.model_fingerprint:
            raise InvalidInput(
                f"networks[{network!r}] must hold recordings of one network. Got another, or other weights, for {role}; record "
                "all sets with the same."
            )
        other = seen.setdefault(one.source.data_fingerprint, (role, one))[0]
        if other != role and len(seen[one.source.data_fingerprint][1]) == len(one):
            raise InvalidInput(
                f"networks[{network!r}] must hold other samples in every set. Got the same for {other} and {role}; "
                "hold some out."
            )


def _is_dict(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _checked_networks(networks: Any) -> dict[str, _Sets]:
    if not isinstance(networks, Mapping) or not networks:
        got = "none" if isinstance(networks, Mapping) else type(networks).__name__
        raise InvalidInput(
            f"networks must be a dict of at least one network. Got {got}; give {{'name': (train, validation, test)}}."
        )
    return {name: _Sets.of(name, given) for name, given in networks.items()}


def _checked_scores(scores: Any, guards: Any) -> dict[str, Score]:
    """Scores by the names that they go by in the table."""
    if scores is None:
        scores = [name for name in known_scores.available() if name not in LONG]
    items = list(scores.items()) if isinstance(scores, Mapping) else scores
    pairs = (
        items if isinstance(scores, Mapping) or not isinstance(scores, list | tuple) else [(None, x) for x in scores]
    )
    listed = isinstance(pairs, list) and all(isinstance(item, str | Score) for _, item in pairs)
    if not listed or not isinstance(guards, Mapping) or not all(isinstance(one, Guard) for one in guards.values()):
        raise InvalidInput(
            "scores must be a list of names or scores, or a dict of them by name, and guards a dict of fitted guards. Got "
            f"{scores!r:.80}{f' and {guards!r:.80}' if guards else ''}."
        )
    if not pairs and not guards:
        raise InvalidInput("scores must name at least one score, where there are no guards. Got none.")
    chosen: dict[str, Score] = {}
    for name, item in pairs:
        score = known_scores.get(item) if isinstance(item, str) else item
        label = name or score.label
        if label in chosen or label in guards:
            raise InvalidInput(
                f"scores and guards must differ. Got {label!r} twice; name them, {{'one': ..., 'other': ...}}."
            )
        chosen[label] = score
    return chosen


def _jobs(
    chosen: Mapping[str, Score | Guard], sets: Mapping[str, _Sets]
) -> list[tuple[str, str, Score | Guard, MakeSets]]:
    """Each score for each network; ensemble scores for all of them, put together when their turn comes."""
    together = partial(_Sets.together, list(sets.values()))
    jobs: list[tuple[str, str, Score | Guard, MakeSets]] = []
    for name, given in sets.items():
        singles = ((label, score) for label, score in chosen.items() if not isinstance(score, EnsembleScore))
        jobs += [(name, label, score, partial(_same, given)) for label, score in singles]
    ensembles = ((label, score) for label, score in chosen.items() if isinstance(score, EnsembleScore))
    return jobs + [(f"all {len(sets)}", label, score, together) for label, score in ensembles]


def _same(given: _Sets) -> _Sets:
    return given


def _computed(score: Score | Guard, given: _Sets) -> tuple[Mapping[str, Any], dict[str, FloatArray]]:
    """The hyperparameters in use, and the unreliability on the test set and on all others."""
    ready: Any = score
    if isinstance(score, Score):
        ready = copy.copy(score).fit(given.train, given.validation)
    data = {WRONG: given.test, **given.ood}
    return getattr(ready, "settings_", {}), {name: ready.unreliability(one) for name, one in data.items()}


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
    return "-" if interval is None else f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
