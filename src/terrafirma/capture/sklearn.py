"""What a scikit-learn MLP did inside: the activations of its hidden ReLU layers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from terrafirma.capture.dropout import Dropout
from terrafirma.capture.network import Layer, Linear, Reduction, Step, Stochastic, is_chosen, unknown_layer
from terrafirma.core._checks import as_array
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

__all__ = ["SklearnNetwork", "check_mlp", "hidden_activations"]


def check_mlp(mlp: Any) -> None:
    """Raise unless this is a fitted MLP with ReLU."""
    if not hasattr(mlp, "coefs_"):
        raise InvalidInput(
            f"mlp must be a fitted MLPClassifier or MLPRegressor. Got {type(mlp).__name__}; "
            "fit it, or take it out of its pipeline."
        )
    if len(mlp.coefs_) < 2:
        raise InvalidInput("The MLP must have a hidden layer. Got none; its predictions are linear everywhere.")
    if mlp.activation != "relu":
        raise InvalidInput(f"The MLP must have activation='relu'. Got {mlp.activation!r}; its regions are not linear.")


def hidden_activations(mlp: MLPClassifier | MLPRegressor, X: Any) -> list[FloatArray]:
    """Outputs of the hidden layers of a fitted MLP with ReLU, in the order in which they run: (n, units) each."""
    check_mlp(mlp)
    learned, given = getattr(mlp, "feature_names_in_", None), getattr(X, "columns", None)
    if learned is not None and given is not None and list(learned) != list(given):
        raise InvalidInput(
            f"X must have the columns of the training data, in their order. Got {list(given)!r:.200}; "
            "use X[mlp.feature_names_in_]."
        )
    h = as_array(X, "X")
    if h.ndim != 2 or h.shape[1] != mlp.n_features_in_ or h.dtype.kind not in "bfiu":
        raise InvalidInput(
            f"X must be numbers of shape (n, {mlp.n_features_in_}), as in fitting the MLP. Got {h.dtype} of shape {h.shape}."
        )
    if not np.isfinite(h).all():
        raise InvalidInput("X must be finite. Got NaN or infinity; impute or drop such rows first.")
    layers = []
    for weights, bias in list(zip(mlp.coefs_, mlp.intercepts_, strict=True))[:-1]:
        h = np.maximum(h @ weights + bias, 0.0)
        layers.append(h)
    return layers


class SklearnNetwork:
    """A fitted ``MLPClassifier`` or ``MLPRegressor`` with ReLU, or a pipeline that ends in one.

    Its layers are ``hidden_1``, ``hidden_2``, ...; outputs are logits, for two classes those of both.
    """

    def __init__(self, model: Any) -> None:
        *self.steps, self.mlp = [step for _, step in model.steps] if hasattr(model, "steps") else [model]
        check_mlp(self.mlp)
        if getattr(self.mlp, "out_activation_", "") == "logistic" and self.mlp.n_outputs_ > 1:
            raise InvalidInput(
                "The MLP must give one class to each sample. Got one that gives several labels; "
                "record its activations as arrays, with errors of your own."
            )

    @property
    def name(self) -> str:
        """The class."""
        return type(self.mlp).__name__

    @property
    def classes(self) -> npt.NDArray[Any] | None:
        """Class labels, of a classifier."""
        return getattr(self.mlp, "classes_", None)

    def fingerprint(self) -> str:
        """Digest of the weights, and of what comes before them."""
        digest = hashlib.sha256(self.name.encode())
        for part in (self.mlp.coefs_, self.mlp.intercepts_, self.classes, self.mlp.out_activation_, self.steps):
            _digest(digest, part)
        return digest.hexdigest()

    def candidates(self, inputs: Any) -> list[Layer]:
        """The hidden layers."""
        return [replace(layer, bits=None, features=None) for layer in self._run(inputs).layers]

    @contextmanager
    def watch(
        self,
        layers: Sequence[str] | None,
        reduce: Reduction = "none",  # noqa: ARG002
        *,
        features: bool | Sequence[str] = False,
    ) -> Iterator[Callable[[Any], Step]]:
        """Nothing needs to be prepared; ``reduce`` has no maps to reduce."""
        chosen = self._chosen(("hidden_*",), "layers")[-1:] if layers is None else self._chosen(layers, "layers")
        also = chosen if features else []
        featured = also if isinstance(features, bool) else self._chosen(features, "features")

        def run(inputs: Any) -> Step:
            step = self._run(inputs)
            kept = [
                replace(
                    layer,
                    bits=layer.bits if layer.name in chosen else None,
                    features=layer.features if layer.name in featured else None,
                )
                for layer in step.layers
                if layer.name in chosen or layer.name in featured
            ]
            return replace(step, layers=kept)

        yield run

    def linear(self, n_features: int, n_outputs: int) -> Linear:
        """The output layer; two classes share their one logit."""
        W, b = self.mlp.coefs_[-1].T, self.mlp.intercepts_[-1]
        if self.classes is not None and len(W) == 1:
            W, b = np.vstack([-W / 2, W / 2]), np.append(-b / 2, b / 2)
        return [W] if W.shape == (n_outputs, n_features) else [], [b], float(np.finfo(W.dtype).eps)

    def dropping(self, dropout: Dropout) -> Callable[[Any, int], Stochastic]:  # noqa: ARG002  # whatever was asked for
        """Raise: there is none to have."""
        raise InvalidInput(
            f"dropout needs a torch module with nn.Dropout modules. Got {self.name} of scikit-learn, which has none; choose a "
            "score that needs no dropout."
        )

    def _chosen(self, patterns: Sequence[str], argument: str) -> list[str]:
        """Names of the hidden layers that are meant, in order."""
        names = [f"hidden_{i}" for i in range(1, len(self.mlp.coefs_))]
        for pattern in patterns:
            if not any(is_chosen(name, 1, [pattern]) for name in names):
                raise unknown_layer(pattern, names, argument)
        return [name for name in names if is_chosen(name, 1, patterns)]

    def _run(self, inputs: Any) -> Step:
        if isinstance(inputs, dict | tuple):
            raise InvalidInput(
                f"The MLP takes one array. Got {len(inputs)} in a {type(inputs).__name__}; name none of them."
            )
        for step in self.steps:
            inputs = inputs if step in ("passthrough", None) else step.transform(inputs)
        hidden = hidden_activations(self.mlp, inputs)
        outputs = hidden[-1] @ self.mlp.coefs_[-1] + self.mlp.intercepts_[-1]
        if getattr(self.mlp, "out_activation_", "") == "exp":  # of a Poisson regression
            outputs = np.exp(outputs)
        if self.classes is not None and outputs.shape[1] == 1:  # the log of the second class's odds: half to each
            outputs = np.hstack([-outputs / 2, outputs / 2])
        layers = [
            Layer(f"hidden_{i}", "relu", h.shape[1:], bits=h > 0, features=h) for i, h in enumerate(hidden, start=1)
        ]
        return Step(layers, outputs)


def _digest(digest: Any, value: Any) -> None:
    """Add whatever an estimator may hold: its parameters and what it learned, those of its parts, too."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype.str} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for name, part in sorted(value.items(), key=str):
            digest.update(str(name).encode())
            _digest(digest, part)
    elif isinstance(value, list | tuple | np.ndarray):
        digest.update(str(len(value)).encode())
        for part in value:
            _digest(digest, part)
    elif callable(value) and hasattr(value, "__qualname__"):
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    elif hasattr(value, "get_params"):
        digest.update(type(value).__name__.encode())
        _digest(digest, vars(value))
    else:
        digest.update(re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode())
