"""What a scikit-learn MLP did inside: the activations of its hidden ReLU layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.core._checks import as_array
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

__all__ = ["hidden_activations"]


def hidden_activations(mlp: MLPClassifier | MLPRegressor, X: Any) -> list[FloatArray]:
    """Outputs of the hidden layers of a fitted MLP with ReLU, in the order in which they run: (n, units) each."""
    if not hasattr(mlp, "coefs_"):
        raise InvalidInput(
            f"mlp must be a fitted MLPClassifier or MLPRegressor. Got {type(mlp).__name__}; "
            "fit it, or take it out of its pipeline."
        )
    if mlp.activation != "relu":
        raise InvalidInput(f"The MLP must have activation='relu'. Got {mlp.activation!r}; its regions are not linear.")
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
