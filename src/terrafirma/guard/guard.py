"""The front door: a network, a score of its unreliability, and a policy that keeps a promise."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from terrafirma import scores
from terrafirma.capture.batches import DataHash, batches
from terrafirma.capture.network import Network, Reduction
from terrafirma.capture.record import BATCH_SIZE, as_network, checked_layers
from terrafirma.capture.stream import Capture, run_through
from terrafirma.core._checks import check_count, check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput, NotFitted
from terrafirma.guard import files
from terrafirma.guard.explain import Explanation, explain
from terrafirma.guard.learning import check_fits, learn, recalibrated, with_more, without
from terrafirma.guard.state import AnyScore, State, Wanted, unreliability_of
from terrafirma.guard.summary import summary
from terrafirma.guard.verdict import Evaluation, Verdict, evaluate
from terrafirma.policy import Policy
from terrafirma.policy.threshold import CONFIDENCE, RISK
from terrafirma.recorded import ErrorFunction, Recorded, Source, errors_of, is_classification, why_no_errors
from terrafirma.scores.ensembles import EnsembleScore
from terrafirma.scores.subfunction import SubfunctionBound
from terrafirma.scores.subfunction_search import Subfunction

__all__ = ["Guard"]


class Guard:
    """Accept or abstain: a trained network with a rule that keeps the error among accepted predictions low.

    Parameters
    ----------
    model : torch.nn.Module, path of an .onnx file, or scikit-learn MLP
        None where everything comes as ``Recorded``.
    score : str, Score or SubfunctionBound, optional
        By default the subfunction bound with rho and delta chosen on validation data; a ``SubfunctionBound(rho, delta)`` is
        taken as it is. A name is one of ``scores.available()``. Any object with ``fit(train, validation)`` and
        ``unreliability(recorded)`` will do.
    layers, reduce, error, batch_size
        What to record, as in ``record``. By default the last ReLU, and the 0-1 error of a classifier.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPClassifier
    >>> X = np.random.default_rng(0).normal(size=(3000, 2))
    >>> y = (X[:, 0] * X[:, 1] > 0).astype(int)
    >>> mlp = MLPClassifier((32, 32), solver="lbfgs", max_iter=2000, random_state=0).fit(X[:1000], y[:1000])
    >>> guard = Guard(mlp).fit((X[:1000], y[:1000]), (X[1000:], y[1000:]), risk=0.05, verbose=False)
    >>> len(guard.predict(X[:5]))
    5

    """

    def __init__(
        self,
        model: Any,
        score: str | SubfunctionBound | AnyScore | None = None,
        layers: str | Sequence[str] | None = None,
        reduce: Reduction = "none",
        error: ErrorFunction | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        self.model = model
        self.score = _checked_score(score)
        self.layers = checked_layers(layers, reduce)
        self.reduce = reduce
        self.error = _checked_error(error)
        self.batch_size = check_count("batch_size", batch_size, least=1)
        self._network: Network | None = None if model is None else as_network(model)
        self._state: State | None = None

    def fit(
        self,
        train: Any,
        validation: Any,
        calibration: Any = None,
        risk: float = 0.02,
        confidence: float = 0.95,
        *,
        verbose: bool = True,
    ) -> Guard:
        """Record, choose hyperparameters, find the threshold; then say what was done.

        Parameters
        ----------
        train, validation, calibration : (X, y), loader, or Recorded
            The training data of the network; data to choose hyperparameters on; data to calibrate the policy on. Without
            ``calibration`` the validation set is cut into two random halves, one for each. Neither may be in the training data.
        risk, confidence : float
            With this confidence, the mean error among accepted predictions is at most ``risk``.
        verbose : bool
            Whether to print the summary.

        """
        check_share("risk", risk, RISK)  # rather now than after the work
        check_share("confidence", confidence, CONFIDENCE)
        started = time.monotonic()
        wanted = Wanted.by(self.score, self.layers, self.reduce)
        trained = self._recorded(train, "train", wanted.to_train(self.score))
        if isinstance(train, Recorded) and train.source is not None and self._network is not None:
            files.check_network(self._network, (train.source.model, train.source.model_fingerprint))
        reduce = self.reduce if trained.source is None else cast("Reduction", trained.source.reduce)
        wanted = replace(wanted, layers=trained.layer_names or self.layers, reduce=reduce)
        validated = self._recorded(validation, "validation", wanted)
        recorded = time.monotonic()

        def calibrate_on(fitted: SubfunctionBound | AnyScore) -> Recorded:
            return self._recorded(calibration, "calibration", Wanted.by(fitted, wanted.layers, reduce))

        self._state = learn(
            self.score,
            trained,
            validated,
            None if calibration is None else calibrate_on,
            risk=risk,
            confidence=confidence,
            reduce=reduce,
            classes=None if self._network is None else self._network.classes,
        )
        if verbose:
            print(self.summary())
            print(f"  took         {time.monotonic() - started:.1f} s, of which {recorded - started:.1f} s recording")
        return self

    def predict(self, x: Any) -> Verdict:
        """Predictions with their unreliability, and whether to accept them.

        ``x``: inputs in any form that ``fit`` takes; labels are not looked at. For tensors the verdict holds tensors on their
        device.
        """
        state = self._fitted("predict")
        policy, probability = state.live
        recorded = self._recorded_inputs(x)
        check_fits("x", recorded, state)
        unreliability = unreliability_of(state.score, recorded)
        verdict = Verdict(
            prediction=self._predictions(recorded),
            output=recorded.outputs,
            unreliability=unreliability,
            accepted=policy.accept(unreliability),
            error_probability=probability.probability(unreliability),
        )
        return verdict.in_framework_of(x)

    def unreliability(self, x: Any) -> FloatArray:
        """The score alone, float64 (n,): higher = less reliable. It needs no policy."""
        return unreliability_of(self._fitted("unreliability").score, self._recorded_inputs(x))

    def evaluate(self, test: Any) -> Evaluation:
        """How the guard does on labelled data that it has not seen."""
        state = self._fitted("evaluate")
        policy, _ = state.live
        recorded = self._recorded(test, "test", self._alike())
        check_fits("test", recorded, state)
        unreliability = unreliability_of(state.score, recorded)
        errors = recorded.need("errors", by="evaluate")
        return evaluate(unreliability, errors, policy.accept(unreliability), state.risk, state.confidence)

    def explain(self, x: Any, n: int = 5) -> list[Explanation]:
        """For each sample the n training regions that bring most of its density, and the parts of its bound."""
        state = self._fitted("explain")
        recorded = self._recorded_inputs(x)
        patterns = recorded.need("patterns", by="explain")
        return explain(state, patterns, self._predictions(recorded), self._classes(), n)

    def partial_fit(self, data: Any, *, recalibrate: bool = True) -> Guard:
        """Add training data; hyperparameters stay.

        The table is that of a fit on all data. Since the score changes, the policy is calibrated again on the data kept for it;
        with ``recalibrate=False`` it is stale, and predictions are refused with an error until ``recalibrate()``.
        """
        state = self._fitted("partial_fit")
        return self._with(with_more(state, self._recorded(data, "data", self._alike())), recalibrate)

    def forget(self, rows: Any, *, recalibrate: bool = True) -> Guard:
        """Take training samples out, by number: their order in ``train``, then in each ``partial_fit``; numbers never shift.

        The table is that of a fit without them. The network itself still knows what it learned from them.
        """
        return self._with(without(self._fitted("forget"), rows), recalibrate)

    def recalibrate(
        self, calibration: Any = None, *, risk: float | None = None, confidence: float | None = None
    ) -> Guard:
        """Find the policy anew: on other data, for another risk, or after training data came or went."""
        state = self._fitted("recalibrate")
        if calibration is not None:
            recorded = self._recorded(calibration, "calibration", self._alike())
            state = recalibrated(state, recorded)
        self._state = state.calibrated(risk, confidence)
        return self

    def wrap(self, model: Any = None) -> Any:
        """A torch module whose forward gives output, unreliability and accepted, for serving.

        ``model``: the network to run, by default the guard's own; another must have the same weights. The module follows the
        guard, should that learn, forget or be calibrated again.
        """
        from terrafirma.guard.serve import guarded_module

        _ = self.policy  # rather now than at the first batch
        module = guarded_module(self, self.model if model is None else model)
        if model is not None:
            files.check_network(as_network(model), self._fitted("wrap").network)
        return module

    def watching(self, model: Any) -> Guard:
        """A guard of the same state over another copy of the network."""
        twin = Guard(model, self.score, self.layers, self.reduce, self.error, self.batch_size)
        twin._state = self._fitted("watching")
        return twin

    def export(self, path: str | os.PathLike[str], example: Any = None) -> None:
        """Write network, score and threshold as one ONNX graph: inputs -> output, unreliability, accepted.

        ``example``: a few inputs, needed to trace a torch network.
        """
        from terrafirma.guard.serve import export

        state = self._fitted("export")
        export(self.model, self._running(), state, self.policy, example, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the guard to a folder: all but the network, of which it keeps the fingerprint; an ONNX file is copied along."""
        files.save(path, self._fitted("save"), self._network, self.error)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any = None, error: ErrorFunction | None = None) -> Guard:
        """Read what ``save`` wrote; ``model`` must be the network it was fitted with."""
        state, model, known_error = files.load(path, model)
        score: Any = state.score
        if isinstance(score, SubfunctionBound):
            score = None if state.selected is not None else SubfunctionBound(score.rho, score.delta, score.weighting)
        else:
            score = score.unfitted()
        guard = cls(model, score, state.layer_names or None, state.reduce, error or known_error)
        guard._state = state
        return guard

    @property
    def policy(self) -> Policy:
        """The threshold and its promise."""
        policy, _ = self._fitted("policy").live
        return policy

    @property
    def state(self) -> State:
        """Everything that was learned."""
        return self._fitted("state")

    def summary(self) -> str:
        """What the guard is and what it promises, in numbers."""
        return summary(self._fitted("summary"), self._name())

    def __repr__(self) -> str:
        if self._state is None:
            return f"<Guard of {self._name()}, not fitted>"
        samples, policy = self._state.samples, self._state.policy or "policy is stale"
        return f"<Guard of {self._name()} fitted on {len(samples.ids)} samples: {policy}>"

    # ----------------------------------------------------------------------------------------------- inside

    def _fitted(self, method: str) -> State:
        if self._state is None:
            raise NotFitted(f"Guard is not fitted. Call fit(train, validation) before {method}.")
        return self._state

    def _name(self) -> str:
        known = None if self._state is None else self._state.network
        if self._network is not None:
            return self._network.name
        return "recorded arrays" if known is None else known[0]

    def _with(self, state: State, recalibrate: bool) -> Guard:
        self._state = state.calibrated() if recalibrate else state
        return self

    def _running(self) -> Network:
        if self._network is None:
            raise InvalidInput(
                "The guard has no network to run. Give it a Recorded, or make it with Guard(model), or Guard.load(path, model)."
            )
        return self._network

    def _alike(self) -> Wanted:
        """What to record as in the fit: the layers by their exact names, how to reduce maps, what the score needs."""
        state = self._fitted("predict")
        return Wanted.by(state.score, state.layer_names or self.layers, state.reduce)

    def _recorded(self, data: Any, name: str, wanted: Wanted) -> Recorded:
        """Labelled data, recorded, with an error for each sample."""
        recorded = self._captured(data, wanted, labelled=True)
        if (
            recorded.errors is None
            and self.error is not None
            and recorded.outputs is not None
            and recorded.labels is not None
        ):
            recorded = replace(recorded, errors=errors_of(recorded.outputs, recorded.labels, self.error))
        if recorded.errors is None:
            raise InvalidInput(f"{name} must have an error for each sample. {why_no_errors(recorded)}")
        return recorded

    def _recorded_inputs(self, x: Any) -> Recorded:
        """Inputs, run through the network."""
        return self._captured(x, self._alike(), labelled=False)

    def _captured(self, data: Any, wanted: Wanted, *, labelled: bool) -> Recorded:
        if isinstance(data, Recorded):
            return data
        network, stream = self._running(), batches(data, self.batch_size)
        seen = DataHash() if labelled else None
        capture = Capture(
            network,
            self.error if labelled else None,
            stream.n_samples,
            seen=seen,
            keep_outputs=not labelled or wanted.outputs,
            keep_inputs=wanted.inputs,
        )
        run_through(
            capture,
            stream,
            wanted.layers,
            wanted.reduce,
            features=wanted.features,
            dropout=wanted.dropout,
            progress=None if labelled else False,
        )
        if seen is None:
            return capture.result()
        return capture.result(Source(network.name, network.fingerprint(), seen.hexdigest(), wanted.reduce))

    def _classes(self) -> Any:
        return self._fitted("predict").classes if self._network is None else self._network.classes

    def _predictions(self, recorded: Recorded) -> Any:
        """Classes, where the labels of the training data are such; else outputs, (n,) where they are one number each."""
        outputs, classes, labels = recorded.outputs, self._classes(), self._fitted("predict").samples.labels
        if outputs is None:
            return None
        if classes is not None:
            return classes[recorded.predictions]
        if labels is not None and is_classification(outputs, labels):
            return recorded.predictions
        return outputs.reshape(len(outputs)).copy() if outputs.size == len(outputs) else outputs.copy()


def _checked_score(score: Any) -> SubfunctionBound | AnyScore | None:
    """A score that can be fitted and asked."""
    if isinstance(score, str):
        score = scores.get(score)
    if isinstance(score, EnsembleScore):
        raise InvalidInput(
            f"A guard must have a score of one network. Got {score.name}; average the networks' outputs."
        )
    if isinstance(score, Subfunction):  # a guard's own kind, which can be explained, added to and exported
        if score.rho is None and score.delta is None:
            return None
        if score.rho is not None and score.delta is not None:
            return SubfunctionBound(score.rho, score.delta)
    fit_to_use = hasattr(score, "fit") and hasattr(score, "unreliability") and not isinstance(score, type)
    if score is not None and not fit_to_use:
        raise InvalidInput(
            f"score must have fit and unreliability, as SubfunctionBound(rho=16.0) has. Got {score!r:.80}; "
            "leave it out to select one."
        )
    fitting: SubfunctionBound | AnyScore | None = score
    return fitting


def _checked_error(error: Any) -> ErrorFunction | None:
    if error is not None and (not callable(error) or isinstance(error, type)):
        raise InvalidInput(
            f"error must be a function of (outputs, labels), or ClippedError(scale=...). Got {error!r:.80}."
        )
    function: ErrorFunction | None = error
    return function
