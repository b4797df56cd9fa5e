"""What a scikit-learn MLP did inside: the activations of its hidden ReLU layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

__all__ = ["hidden_activations"]


def hidden_activations(mlp: MLPClassifier | MLPRegressor, X: Any) -> list[FloatArray]:
    """Outputs of the hidden layers of a fitted MLP with ReLU, in the order in which they run: (n, units) each."""
    if mlp.activation != "relu":
        raise InvalidInput(f"The MLP must have activation='relu'. Got {mlp.activation!r}; its regions are not linear.")
    layers, h = [], np.asarray(X, dtype=np.float64)
    for weights, bias in list(zip(mlp.coefs_, mlp.intercepts_, strict=True))[:-1]:
        h = np.maximum(h @ weights + bias, 0.0)
        layers.append(h)
    return layers
