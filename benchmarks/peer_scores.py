"""pytorch-ood's versions of our scores, run in an environment of their own; and the loop that both sides run in.

Called by ``benchmarks.scores`` as ``python benchmarks/peer_scores.py NAME DATA OUT``. It imports nothing of terrafirma, so
that it runs where only torch and pytorch-ood are.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

WARM_UP = 2000  # rows: all is loaded, compiled, and every class has some
K = 50  # neighbours, pytorch-ood's default and ours
DIM = 256  # of ViM's subspace, half the units
EPSILON = 0.0014  # of ODIN, the paper's and the default of both
BATCH = 128  # samples at a time where pytorch-ood loops over classes: what suits it best; all at once takes far longer
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    """Training data and queries of one classifier: features, logits, the linear layer between them; arrays or tensors."""

    features: Any
    labels: Any
    logits: Any
    query_features: Any
    query_logits: Any
    weights: Any
    bias: Any

    @classmethod
    def load(cls, path: str) -> Data:
        """Read what ``save`` wrote."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})

    def save(self, path: Path) -> None:
        """Write a file that either side reads."""
        np.savez(path, **vars(self))

    def first(self, n: int) -> Data:
        """The first ``n`` samples and queries."""
        return replace(
            self, **{name: value[:n] for name, value in vars(self).items() if name not in ("weights", "bias")}
        )

    def map(self, function: Callable[[Any], Any]) -> Data:
        """The same with every array turned into something else."""
        return Data(**{name: function(value) for name, value in vars(self).items()})


# ------------------------------------------------------------------------------------- the loop of both sides


def serve(fit: Callable[[T], Any], score: Callable[[Any, T], Any], data: T, small: T, out: str) -> None:
    """Warm up; then answer each line of the input with one run: a line of JSON, seconds to fit and to score, bytes at the peak.

    Scores go to the file ``out``. The peak is that of resident memory beyond what was there before (Linux only), in the first
    run alone: to see it, memory that was kept for later must go, which takes time to get back.
    """
    score(fit(small), small)
    for turn, _ in enumerate(sys.stdin):
        gc.collect()
        before = _start_peak() if turn == 0 else None
        start = time.perf_counter()
        fitted = fit(data)
        between = time.perf_counter()
        found = score(fitted, data)
        end = time.perf_counter()
        peak = 0 if before is None else _memory("VmHWM") - before
        np.save(out, np.asarray(found, dtype=np.float64))
        print(json.dumps({"fit": between - start, "score": end - between, "peak": peak}), flush=True)
        del fitted, found


def _start_peak() -> int | None:
    """Make the peak what is resident now, and say how much that is."""
    if not RESET.exists():
        return None
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # memory that was freed but kept would hide what a run takes
        libc.malloc_trim(0)
    RESET.write_text("5", encoding="ascii")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    line = next(line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# ---------------------------------------------------------------------------------------------- pytorch-ood


class Contestant(NamedTuple):
    """How pytorch-ood fits a score, and how it scores the queries, from features and logits that are there already."""

    fit: Callable[[Data], Any]
    score: Callable[[Any, Data], Any]


def contestants() -> dict[str, Contestant]:
    """All that pytorch-ood and terrafirma both have, by our names."""
    from pytorch_ood import detector

    return {
        "max_response": _on_logits(detector.MaxSoftmax),
        "entropy": _on_logits(detector.Entropy),
        "energy": _on_logits(detector.EnergyBased),
        "max_logit": _on_logits(detector.MaxLogit),
        "gen": _on_logits(detector.GEN),
        "temperature": _on_logits(detector.TemperatureScaling),
        "react": Contestant(
            lambda data: detector.ReAct(None, head_of(data)).fit_feature_maps(data.features, data.labels),
            lambda fitted, data: fitted.predict_feature_maps(data.query_features),
        ),
        "odin": Contestant(
            lambda data: detector.ODIN(head_of(data), eps=EPSILON),
            lambda fitted, data: fitted.predict(data.query_features),
        ),
        "knn": _on_features(lambda _: detector.KNN(None, k=K)),
        "vim": _on_features(lambda data: detector.ViM(None, DIM, data.weights, data.bias)),
        "mahalanobis": _on_features(lambda _: detector.Mahalanobis(None), BATCH),
        "relative_mahalanobis": _on_features(lambda _: detector.RMD(None), BATCH),
        "class_distance": Contestant(
            lambda data: detector.MultiMahalanobis([head_of(data)]).fit_structured([data.features], data.labels),
            lambda fitted, data: _in_batches(lambda part: fitted.predict_structured([part]), data, BATCH),
        ),
    }


def _on_logits(kind: Any) -> Contestant:
    """A detector with its own defaults; few of them learn anything."""
    return Contestant(
        lambda data: kind(None).fit_logits(data.logits, data.labels),
        lambda fitted, data: fitted.predict_logits(data.query_logits),
    )


def _on_features(make: Callable[[Data], Any], batch: int | None = None) -> Contestant:
    return Contestant(
        lambda data: make(data).fit_features(data.features, data.labels),
        lambda fitted, data: _in_batches(fitted.predict_features, data, batch),
    )


def _in_batches(score: Callable[[Any], Any], data: Data, batch: int | None) -> Any:
    import torch

    return torch.cat([score(part) for part in data.query_features.split(batch or len(data.query_features))])


def head_of(data: Data) -> Any:
    """The last linear layer as a network of its own."""
    import torch

    network = torch.nn.Linear(*reversed(data.weights.shape))
    network.load_state_dict({"weight": torch.as_tensor(data.weights), "bias": torch.as_tensor(data.bias)})
    return network.eval()


def main(name: str, path: str, out: str) -> None:
    import torch

    # torchvision, which pytorch-ood imports, looks for operators that it lacks where it was built for another torch
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    contestant = contestants()[name]
    data = Data.load(path).map(torch.from_numpy)

    def score(fitted: Any, data: Data) -> Any:
        with torch.no_grad():
            return contestant.score(fitted, data).numpy()

    serve(contestant.fit, score, data, data.first(WARM_UP), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
