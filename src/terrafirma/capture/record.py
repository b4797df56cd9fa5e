"""Run a network over data once and keep what scores need of it: patterns, outputs, labels, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from terrafirma.capture.batches import DataHash, batches
from terrafirma.capture.dropout import checked_dropout
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
    features: bool | str | Sequence[str] = False,
    inputs: bool = False,
    dropout: float | Iterable[float] = (),
    passes: int = 10,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool | None = None,
) -> Recorded:
    """Run a network over data, once, and keep its activation patterns, outputs, labels and errors; on demand, more.

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
    features : bool, or name or names
        Whether to keep what the layers give, as floats. Or the layers, named as above, whose features to keep, whichever
        layers the patterns are of; maps are then averaged over positions, channel by channel, whatever ``reduce`` is.
        ``Recorded.layers`` holds them all, ``Recorded.features`` those of the last one that ran, and ``Recorded.head`` the
        network's last linear layer if that maps these to the outputs.
    inputs : bool
        Whether to keep the inputs, which must be one array.
    dropout : float or floats
        Probabilities between 0 and 1. At each of them the network (a torch module) runs ``passes`` times more, with every
        ``nn.Dropout``, ``Dropout1d``, ``Dropout2d`` and ``Dropout3d`` in it dropping at that probability, whatever its
        own is, and all else in evaluation mode; ``Recorded.stochastic`` holds the outputs. What is dropped depends on
        ``seed`` and on a sample's number in the data, not on batches, devices or torch's random numbers.
    passes : int
        Forward passes at each dropout probability, at least 2.
    seed : int
        Of the dropout masks.
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
    featured = (
        features
        if isinstance(features, bool)
        else _checked_names(features, "features", "give True for those of layers")
    )
    dropping = checked_dropout(dropout, passes, seed)
    stream = batches(data, check_count("batch_size", batch_size, least=1))
    fingerprint = network.fingerprint()
    parts = None
    if path is not None:
        drops = None if dropping is None else [list(dropping.probabilities), dropping.passes, dropping.seed]
        settings = {"model": fingerprint, "layers": chosen, "reduce": reduce, "features": featured, "dropout": drops}
        settings["inputs"] = bool(inputs)
        parts = Parts.beside(Path(path), settings)
    seen = DataHash()
    capture = Capture(network, error, stream.n_samples, parts, seen, keep_inputs=inputs)
    run_through(capture, stream, chosen, reduce, features=featured, dropout=dropping, progress=progress)
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
    return None if layers is None else _checked_names(layers, "layers", "leave it out for the last ReLU")


def _checked_names(given: str | Sequence[str], argument: str, step: str) -> list[str]:
    """One name or several as a list."""
    names = [given] if isinstance(given, str) else given
    if not (isinstance(names, Sequence) and len(names) > 0 and all(isinstance(name, str) for name in names)):
        raise InvalidInput(f"{argument} must be a name, or a list of names. Got {given!r:.80}; {step}.")
    return list(names)
