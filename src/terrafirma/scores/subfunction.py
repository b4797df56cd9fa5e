"""The paper's score: the log of the bound on the smooth error of the subfunction that a sample meets.

Implements thm:true_error. as an estimator over activation patterns and training errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import storage
from terrafirma.core._checks import as_array, check_delta, check_errors
from terrafirma.core.bound import BoundTerms, Smoother, bound_terms
from terrafirma.core.normalizers import Normalizers, log_u, normalize
from terrafirma.core.patterns import FloatArray, PackedPatterns, as_patterns
from terrafirma.core.regions import RegionTable, lay_out
from terrafirma.core.weighting import Exponential, Gaussian, Tabulated, Weighting, check_weighting, exact
from terrafirma.errors import BadFile, InvalidInput, NotFitted

__all__ = ["SubfunctionBound"]

KIND = "SubfunctionBound"


@dataclass(frozen=True, eq=False)
class _Fitted:
    """What ``fit`` learned: the smoother, the weighting as it was given, and as it was used."""

    smoother: Smoother
    weighting: Weighting
    kernel: Weighting


class SubfunctionBound:
    """Unreliability of a prediction: the log of the bound on its subfunction's smooth error.

    Implements thm:true_error.

    Parameters
    ----------
    rho : float
        Width of the Gaussian weighting in bits: training samples within some rho bits of a query count.
    delta : float
        The bound holds with probability > 1 - delta over draws of the training set; in (0, 1].
    weighting : Weighting, optional
        Another closeness than ``Gaussian(rho)``, which it replaces: ``Exponential(tau)``, ``Tabulated(log_values)``.

    Attributes
    ----------
    regions_ : RegionTable
        Populated activation regions of the training set.
    log_u_ : float
        Log of the global normalisation constant [eq:practical_1].
    n_samples_, n_units_ : int
        Training samples (N) and units of a pattern (M).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> trained = rng.random((500, 32)) < 0.2
    >>> est = SubfunctionBound(rho=3.0).fit(trained, errors=rng.random(500) < 0.05)
    >>> familiar, novel = trained[:1], ~trained[:1]
    >>> bool(est.unreliability(familiar) < est.unreliability(novel))
    True

    """

    regions_: RegionTable
    log_u_: float
    n_samples_: int
    n_units_: int

    def __init__(self, rho: float = 16.0, delta: float = 0.001, weighting: Weighting | None = None) -> None:
        self.rho = rho
        self.delta = delta
        self.weighting = weighting

    def fit(self, X: Any, errors: Any) -> SubfunctionBound:
        """Learn the populated regions and their normalisers.

        Parameters
        ----------
        X : array (n, M) or PackedPatterns
            Activations of the training set: floats (active where > 0), bool or 0-1 integers.
        errors : array (n,)
            The network's error on each training sample, in [0, 1]; for a classifier ``prediction != label``.

        """
        self._checked_weighting()  # rather now than after the work
        check_delta(self.delta)
        return self.fit_table(training_table(X, errors))

    def fit_table(self, table: RegionTable) -> SubfunctionBound:
        """``fit`` on training data that is a table already."""
        weighting = self._checked_weighting()
        check_delta(self.delta)
        if not len(table):
            raise InvalidInput("table must have at least one sample to fit. Got none.")
        kernel = exact(weighting, table.n_units)
        return self._set(table, normalize(table, [kernel])[0], weighting, kernel)

    def terms(self, X: Any) -> BoundTerms:
        """Every part of the bound for each row of X, in logs."""
        return self._terms(X, "terms")

    def unreliability(self, X: Any) -> FloatArray:
        """Log of the bound for each row of X, float64 (n,): higher = less reliable."""
        return self._terms(X, "unreliability").log_bound

    @property
    def smoother_(self) -> Smoother:
        """What sums training samples around queries: regions, normalisers, closeness by distance."""
        return self._check_fitted("smoother_").smoother

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to a file (safetensors with a JSON header)."""
        storage.write_arrays(path, KIND, *self.to_arrays())

    def to_arrays(self) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
        """All that a file needs: arrays, and settings that JSON holds."""
        fitted = self._check_fitted("save")
        table, (norm,) = fitted.smoother.table, fitted.smoother.normalizers
        arrays: dict[str, npt.NDArray[Any]] = {
            "words": table.patterns.words,
            "counts": table.counts,
            "error_sum": table.error_sum,
            "log_w": norm.log_w,
        }
        check_delta(self.delta)
        settings = {"delta": float(self.delta), "n_units": table.n_units}
        match fitted.kernel:
            case Gaussian(rho):
                settings["gaussian"] = float(rho)
            case Exponential(tau):
                settings["exponential"] = float(tau)
            case Tabulated(log_values):
                arrays["log_d"] = log_values
        if table.sample_region is not None:
            arrays["sample_region"] = table.sample_region
        return arrays, settings

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SubfunctionBound:
        """Read a fitted estimator; its scores are those of the one that was saved."""
        arrays, settings = storage.read_arrays(path, KIND)
        try:
            return cls.from_arrays(arrays, settings)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
            raise BadFile(f"{path} does not hold a whole SubfunctionBound ({error!r:.200}). Save it again.") from error

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]) -> SubfunctionBound:
        """An estimator of arrays and settings that may be anything: what is not checked here is checked on the way."""
        delta = settings["delta"]
        check_delta(delta)
        match settings:
            case {"gaussian": rho}:
                estimator = cls(rho, delta)
            case {"exponential": tau}:
                estimator = cls(delta=delta, weighting=Exponential(tau))
            case _:
                estimator = cls(delta=delta, weighting=Tabulated(arrays["log_d"]))
        weighting = estimator._checked_weighting()
        patterns = PackedPatterns(arrays["words"], settings["n_units"])
        panels = lay_out(patterns)
        table = RegionTable(
            panels, patterns.n_units, arrays["counts"], arrays["error_sum"], None, arrays.get("sample_region")
        )
        wrong = np.flatnonzero(table.error_sum > 0)
        log_w = arrays["log_w"]
        if log_w.dtype != np.float64 or log_w.shape != wrong.shape or not np.isfinite(log_w).all():
            raise ValueError("log_w must be finite, one for each region with an error")
        kernel = exact(weighting, table.n_units)
        norm = Normalizers(log_u(kernel, table.n_units, table.n_samples), wrong, log_w)
        return estimator._set(table, norm, weighting, kernel)

    @classmethod
    def from_parts(cls, rho: float, delta: float, table: RegionTable, norm: Normalizers) -> SubfunctionBound:
        """A fitted estimator from a table and its normalisers for ``Gaussian(rho)``, computed elsewhere."""
        return cls(rho, delta)._set(table, norm, Gaussian(rho), Gaussian(rho))

    def __getattr__(self, name: str) -> Any:
        if name in (*SubfunctionBound.__annotations__, "smoother_"):
            raise NotFitted(f"SubfunctionBound is not fitted. Call fit(X, errors) before reading {name}.")
        raise AttributeError(f"SubfunctionBound has no attribute {name!r}.")

    def __repr__(self) -> str:
        other = "" if self.weighting is None else f", weighting={self.weighting!r}"
        fitted = f" fitted on {self.n_samples_} samples" if hasattr(self, "regions_") else ""
        return f"<SubfunctionBound(rho={self.rho!r}, delta={self.delta!r}{other}){fitted}>"

    def _terms(self, X: Any, method: str) -> BoundTerms:
        smoother = self._check_fitted(method).smoother
        check_delta(self.delta)
        (sums,) = smoother.sums(as_patterns(X, n_units=smoother.table.n_units))
        return bound_terms(sums, self.delta, smoother.table.n_samples)

    def _set(self, table: RegionTable, norm: Normalizers, weighting: Weighting, kernel: Weighting) -> SubfunctionBound:
        smoother = Smoother.prepare(table, [kernel], [norm])  # first: what fails here changes nothing
        self.regions_ = table
        self.log_u_ = norm.log_u
        self.n_samples_ = table.n_samples
        self.n_units_ = table.n_units
        self._fitted = _Fitted(smoother, weighting, kernel)  # at once, should another thread use it meanwhile
        return self

    def _checked_weighting(self) -> Weighting:
        if self.weighting is None:
            return Gaussian(self.rho)
        check_weighting(self.weighting)
        return self.weighting

    def _check_fitted(self, method: str) -> _Fitted:
        if not hasattr(self, "_fitted"):
            raise NotFitted(f"SubfunctionBound is not fitted. Call fit(X, errors) before {method}.")
        fitted = self._fitted
        weighting = self._checked_weighting()
        if exact(weighting, fitted.smoother.table.n_units) != fitted.kernel:
            raise NotFitted(
                f"SubfunctionBound was fitted with {fitted.weighting!r} and now has {weighting!r}. "
                f"Call fit(X, errors) again before {method}; only delta may change without it."
            )
        return fitted


def training_table(X: Any, errors: Any, suffix: str = "") -> RegionTable:
    """The populated regions of what a user hands in to train on; ``suffix`` ends the names in messages."""
    patterns = as_patterns(X)
    if len(patterns) == 0:
        raise InvalidInput(f"X{suffix} must have at least one row to fit. Got none.")
    errors = check_errors(errors, len(patterns), name=f"errors{suffix}")
    build = (
        RegionTable.build if patterns is X else RegionTable.build_in_place
    )  # the user's own patterns stay as they are
    table = build(patterns, errors)
    _warn_if_all_active(X, table)
    return table


def _warn_if_all_active(X: Any, table: RegionTable) -> None:
    """Warn where floats are positive throughout: these are not the outputs of a ReLU layer."""
    suspect = len(table) == 1 and table.n_samples > 1 and table.patterns.to_bool().all()
    if suspect and not isinstance(X, PackedPatterns) and as_array(X, "X").dtype.kind == "f":
        warnings.warn(
            f"All units are active in all {table.n_samples} training samples, so that every score is the same. "
            "Pass the outputs of a ReLU layer: probabilities and images are positive everywhere.",
            stacklevel=4,
        )
