"""Which predictions of a trained network stand on firm ground?

terrafirma gives every prediction of a trained ReLU network an *unreliability*: the log of a bound on the network's error,
smoothed over the activation regions around the sample (Ji et al., CoLLAs 2022). Higher = less reliable, everywhere.

>>> import numpy as np, terrafirma
>>> rng = np.random.default_rng(0)
>>> trained, errors = rng.random((200, 16)) < 0.3, rng.random(200) < 0.1
>>> est = terrafirma.SubfunctionBound(rho=2.0).fit(trained, errors)
>>> est.unreliability(trained[:3]).shape
(3,)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401  # the one heavy package that importing terrafirma loads

from terrafirma._version import __version__

if TYPE_CHECKING:
    from terrafirma import errors, metrics, scores
    from terrafirma.capture.record import layers, record
    from terrafirma.comparison import Comparison, compare
    from terrafirma.core.bound import BoundTerms
    from terrafirma.core.patterns import PackedPatterns
    from terrafirma.core.regions import RegionTable
    from terrafirma.core.weighting import Exponential, Gaussian, Tabulated
    from terrafirma.guard.guard import Guard
    from terrafirma.policy import ErrorProbability, GroupPolicy, Policy
    from terrafirma.recorded import ClippedError, Recorded
    from terrafirma.scores.subfunction import SubfunctionBound
    from terrafirma.scores.subfunction_search import Selection, select

__all__ = [
    "BoundTerms",
    "ClippedError",
    "Comparison",
    "ErrorProbability",
    "Exponential",
    "Gaussian",
    "GroupPolicy",
    "Guard",
    "PackedPatterns",
    "Policy",
    "Recorded",
    "RegionTable",
    "Selection",
    "SubfunctionBound",
    "Tabulated",
    "__version__",
    "compare",
    "errors",
    "layers",
    "metrics",
    "record",
    "scores",
    "select",
]

_HOME = {
    "BoundTerms": "terrafirma.core.bound",
    "ClippedError": "terrafirma.recorded",
    "Comparison": "terrafirma.comparison",
    "ErrorProbability": "terrafirma.policy",
    "Exponential": "terrafirma.core.weighting",
    "Gaussian": "terrafirma.core.weighting",
    "GroupPolicy": "terrafirma.policy",
    "Guard": "terrafirma.guard.guard",
    "PackedPatterns": "terrafirma.core.patterns",
    "Policy": "terrafirma.policy",
    "Recorded": "terrafirma.recorded",
    "RegionTable": "terrafirma.core.regions",
    "Selection": "terrafirma.scores.subfunction_search",
    "SubfunctionBound": "terrafirma.scores.subfunction",
    "Tabulated": "terrafirma.core.weighting",
    "compare": "terrafirma.comparison",
    "layers": "terrafirma.capture.record",
    "record": "terrafirma.capture.record",
    "select": "terrafirma.scores.subfunction_search",
}
_MODULES = ("errors", "metrics", "scores")


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing terrafirma stays free."""
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"terrafirma.{name}")
    else:
        raise AttributeError(f"module 'terrafirma' has no attribute {name!r}. It has: {', '.join(__all__)}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
