"""Run a network over data once and keep what scores need of it: patterns, outputs, labels, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrafirma.capture.batches import DataHash, batches
from terrafirma.capture.network import REDUCTIONS, Layer, Network, Reduction
from terrafirma.capture.parts import Parts
from terrafirma.capture.stream import Capture, run_through
from terrafirma.core._checks import check_count
from terrafirma.errors import InvalidInput
from terrafirma.recorded import ErrorFunction, Recorded, Source

__all__ = ["BATCH_SIZE", "as_network", "checked_layers", "layers", "record"]

BATCH_SIZE = 128  # samples at a time, of data that does not come in batches


def record(  # noqa: PLR0913  # what to run, on what, what to keep, where: each is one choice
    model: Any,
    data: Any,
    layers: str | Sequence[str] | None = None,
    reduce: Reduction = "none",
    *,
    error: ErrorFunction | None = None,
    features: bool = False,
    path: str | os.PathLike[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool | None = None,
) -> Recorded:
    """Run a network over data, once, and keep its activation patterns, outputs, labels and errors.

    Parameters
    ----------
    model : torch.nn.Module, path of an .onnx file, or scikit-learn MLP (or a pipeline that ends in one)
    data : array, (X, y), dict of arrays, torch Dataset, or loader
        A loader yields ``(inputs, labels)``, dicts (labels under ``labels``, ``label``, ``target`` or ``y``) or arrays.
        One that shuffles is read in the order of its data set.
    layers : name or names, optional
        Dotted names or globs of gated layers (ReLU, GELU, ...), or exact names of any modules, whose outputs' signs then
        count. By default the last gated layer that runs.
    reduce : "none", "any" or "mean"
        Of maps, each position is a unit; or a channel is active where any of its positions is, or where their mean is.
    error : function of (outputs, labels), optional
        Errors (n,) in [0, 1] of a batch; for a classifier by default whether the largest output is the label's.
    features : bool
        Whether to keep what the layers give, as floats.
    path : optional
        Write the result there; a capture that was killed goes on where it stopped.
    progress : bool, optional
        Whether to show a bar with rate and time left; by default on a terminal.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neural_network import MLPClassifier
    >>> X = np.random.default_rng(0).normal(size=(60, 2))
    >>> mlp = MLPClassifier((8,), solver="lbfgs", max_iter=2000, random_state=0).fit(X, X[:, 0] > 0)
    >>> record(mlp, (X, X[:, 0] > 0))
    <Recorded 60 samples: patterns of 8 units (hidden_1), outputs, labels, errors; mean error 0>

    """
    network = as_network(model)
    chosen = checked_layers(layers, reduce)
    stream = batches(data, check_count("batch_size", batch_size, least=1))
    fingerprint = network.fingerprint()
    parts = None
    if path is not None:
        settings = {"model": fingerprint, "layers": chosen, "reduce": reduce, "features": bool(features)}
        parts = Parts.beside(Path(path), settings)
    seen = DataHash()
    capture = Capture(network, error, stream.n_samples, parts, seen)
    run_through(capture, stream, chosen, reduce, features=features, progress=progress)
    recorded = capture.result(Source(network.name, fingerprint, seen.hexdigest(), reduce))
    if path is not None and parts is not None:
        recorded.save(path)
        parts.remove()
    return recorded


def layers(model: Any, inputs: Any) -> list[Layer]:
    """The gated layers that run on some inputs, with names and shapes: what ``record`` could take."""
    return as_network(model).candidates(inputs)


def as_network(model: Any) -> Network:
    """The adapter for whatever the network was made with."""
    if hasattr(model, "watch") and hasattr(model, "fingerprint"):
        network: Network = model
        return network
    if "torch" in sys.modules and isinstance(model, sys.modules["torch"].nn.Module):
        from terrafirma.capture.torch import TorchNetwork

        return TorchNetwork(model)
    if isinstance(model, str | os.PathLike) or type(model).__name__ == "ModelProto":
        from terrafirma.capture.onnx import OnnxNetwork

        return OnnxNetwork(model)
    if hasattr(model, "coefs_") or hasattr(model, "steps") or hasattr(model, "hidden_layer_sizes"):
        from terrafirma.capture.sklearn import SklearnNetwork

        return SklearnNetwork(model)
    raise InvalidInput(
        f"model must be a torch.nn.Module, the path of an .onnx file or a fitted scikit-learn MLP. Got {type(model).__name__}; "
        "for any other framework make a Recorded of the arrays that it gives."
    )


def checked_layers(layers: str | Sequence[str] | None, reduce: Reduction) -> list[str] | None:
    """Names of layers as a list, and a reduction that there is."""
    if reduce not in REDUCTIONS:
        raise InvalidInput(f"reduce must be one of {', '.join(map(repr, REDUCTIONS))}. Got {reduce!r}.")
    names = [layers] if isinstance(layers, str) else layers
    listed = isinstance(names, Sequence) and len(names) > 0 and all(isinstance(name, str) for name in names)
    if names is not None and not listed:
        raise InvalidInput(
            f"layers must be a name, or a list of names. Got {layers!r:.80}; leave it out for the last ReLU."
        )
    return None if names is None else list(names)
