"""Unreliability scores: higher = less reliable, for every one of them.

>>> from terrafirma import Recorded, scores
>>> import numpy as np
>>> train = Recorded(outputs=np.array([[2.0, 1.0], [0.5, 3.0]]), labels=np.array([0, 1]))
>>> scores.get("entropy").fit(train).unreliability(train).round(3)
array([0.582, 0.269])
"""

from __future__ import annotations

import difflib
import importlib
import os
from typing import Any, TypeVar

from terrafirma import storage
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.recorded import FIELDS
from terrafirma.scores.base import KIND, NOT_RECORDED, Score
from terrafirma.tables import Table

__all__ = ["Score", "available", "describe", "get", "load", "register"]

# where each score lives: files are read when a score is asked for
HOMES = {
    "subfunction": "subfunction_search:Subfunction",
    "max_response": "max_response:MaxResponse",
    "entropy": "entropy:Entropy",
    "margin": "margin:Margin",
    "mc_dropout": "mc_dropout:McDropout",
    "class_distance": "class_distance:ClassDistance",
    "cluster_distance": "cluster_distance:ClusterDistance",
    "gaussian_process": "gaussian_process:GaussianProcess",
    "residual_flow": "residual_flow:ResidualFlow",
    "ensemble_variance": "ensembles:EnsembleVariance",
    "ensemble_max_response": "ensembles:EnsembleMaxResponse",
    "ensemble_subfunction": "ensembles:EnsembleSubfunction",
    "energy": "energy:Energy",
    "max_logit": "max_logit:MaxLogit",
    "gen": "gen:Gen",
    "temperature": "temperature:Temperature",
    "odin": "odin:Odin",
    "knn": "knn:Knn",
    "mahalanobis": "mahalanobis:Mahalanobis",
    "relative_mahalanobis": "relative_mahalanobis:RelativeMahalanobis",
    "vim": "vim:Vim",
    "trust_score": "trust_score:TrustScore",
}
OWN: dict[str, type[Score]] = {}  # those that users registered
S = TypeVar("S", bound=type[Score])


def available() -> list[str]:
    """The names that ``get`` knows."""
    return [*HOMES, *OWN]


def get(name: str, **parameters: Any) -> Score:
    """A score by its name; hyperparameters that are left out are chosen on validation data."""
    score_type = _type(name)
    known = score_type.parameter_names()
    for parameter in parameters:
        if parameter not in known:
            takes = ", ".join(known) or "none"
            raise InvalidInput(f"Parameters of the score {name} must be among: {takes}. Got {parameter!r}.")
    score = score_type(**parameters)
    score.check()  # rather now than after a network has run
    return score


def register(score_type: S) -> S:
    """Make a ``Score`` of one's own known by its name, to ``get`` and all that goes by names; to be used as a decorator."""
    if not (isinstance(score_type, type) and issubclass(score_type, Score)):
        raise InvalidInput(f"register must get a subclass of Score. Got {score_type!r:.80}.")
    name = getattr(score_type, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidInput(f"A score must have a name that is an identifier. Got {name!r:.80}; set name = 'my_score'.")
    if name in HOMES:
        raise InvalidInput(f"A score must have a name of its own. Got {name!r}, which is terrafirma's; choose another.")
    if not isinstance(score_type.needs, frozenset | set):
        raise InvalidInput(
            f"needs must be a set of fields, as frozenset({{'features'}}). Got {score_type.needs!r:.80}."
        )
    if score_type.score is Score.score and score_type.unreliability is Score.unreliability:
        raise InvalidInput(
            f"A score must have a method score(self, recorded). Got {score_type.__name__}, which lacks it."
        )
    unknown = sorted(score_type.needs - FIELDS - NOT_RECORDED)
    if unknown:
        raise InvalidInput(f"needs must be among {', '.join(sorted(FIELDS | NOT_RECORDED))}. Got {', '.join(unknown)}.")
    nowhere = sorted(set(score_type.grid) - set(score_type.parameter_names()))
    if nowhere:
        raise InvalidInput(
            f"grid must name parameters of __init__. Got {', '.join(nowhere)}; add {nowhere[0]}=None there."
        )
    OWN[name] = score_type
    return score_type


def describe() -> Table:
    """All scores: what they need, their parameters (* chosen on validation data), what they cost, where they are from."""
    types = {name: _type(name) for name in available()}
    rows = [
        (name, ", ".join(sorted(score.needs)), _parameters(score), score.cost, score.paper)
        for name, score in types.items()
    ]
    return Table(("score", "needs", "parameters", "cost", "paper"), rows)


def _parameters(score: type[Score]) -> str:
    """Names, those that are chosen on validation data with a star."""
    return ", ".join(f"{name}*" if name in score.grid else name for name in score.parameter_names()) or "-"


def load(path: str | os.PathLike[str], model: Any = None) -> Score:
    """Read what ``Score.save`` wrote; ``model``: the network, for scores that were given one for its gradients."""
    arrays, settings = storage.read_arrays(path, KIND)
    try:
        return from_arrays(arrays, settings, model)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, InvalidInput | BadFile):
            raise
        raise BadFile(f"{path} does not hold a whole score ({error!r:.200}). Save it again.") from error


def from_arrays(arrays: Any, settings: Any, model: Any = None) -> Score:
    """The fitted score of what ``Score.to_arrays`` gave; an error of any kind where it is not whole."""
    if settings["name"] not in available():
        raise BadFile(
            f"The score {settings['name']!r:.80} is not known here. Import what registers it, then load again."
        )
    return _type(settings["name"]).from_arrays(arrays, settings, model)


def _type(name: str) -> type[Score]:
    if isinstance(name, str) and name in OWN:
        return OWN[name]
    if not isinstance(name, str) or name not in HOMES:
        near = difflib.get_close_matches(str(name), available(), n=3, cutoff=0.4)
        hint = f" (near it: {', '.join(near)})" if near else ""
        raise InvalidInput(
            f"A score must be a name that there is. Got {name!r:.80}{hint}; there are {', '.join(available())}."
        )
    module, _, type_name = HOMES[name].partition(":")
    found: type[Score] = getattr(importlib.import_module(f"terrafirma.scores.{module}"), type_name)
    return found
