"""What a guard costs beside its network: ``Guard.predict`` over the bare VGG16; and what it keeps of its promise.

VGG16 as in the paper's study: 13 convolutions with batch norm, a last ReLU layer of 4096 units; float32, batches of 128,
42 500 training samples. By default weights and images are drawn at random, and the training patterns are those of the other
benchmarks, 3.7 % of them wrong, as on CIFAR10.

``TERRAFIRMA_VGG16`` names a file with trained weights instead; ``TERRAFIRMA_RECORDINGS`` a folder with what that network did on
its data, ``train``, ``val`` and ``test.safetensors`` (``terrafirma.record(vgg16(), data, path=...)``). Guards of these are also
fitted for risks of 1, 2 and 5 % and measured on the test set.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.common import N_TRAIN, Clusters, Figure, Report, Watch, race
from terrafirma import Guard, PackedPatterns, Recorded, SubfunctionBound, layers

M, BATCH, RHO = 4096, 128, 128.0
WRONG = 0.037
CHANNELS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
MOST = 0.05  # of the bare network's time
RECORDINGS = os.environ.get("TERRAFIRMA_RECORDINGS")


def vgg16() -> nn.Sequential:
    """Build the network, or load it."""
    features: list[nn.Module] = []
    width = 3
    for step in CHANNELS:
        if step == "M":
            features.append(nn.MaxPool2d(2))
        else:
            features += [nn.Conv2d(width, int(step), 3, padding=1), nn.BatchNorm2d(int(step)), nn.ReLU(inplace=True)]
            width = int(step)
    head = [nn.Linear(512, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, 10)]
    parts = {"features": nn.Sequential(*features), "flatten": nn.Flatten(), "classifier": nn.Sequential(*head)}
    network = nn.Sequential(OrderedDict(parts))
    if "TERRAFIRMA_VGG16" in os.environ:
        weights = load_file(os.environ["TERRAFIRMA_VGG16"])
        network.load_state_dict({name: value.float() for name, value in weights.items()})
    return network.eval()


def run() -> Report:
    torch.manual_seed(0)
    network, x = vgg16(), torch.randn(BATCH, 3, 32, 32)
    if RECORDINGS is None:
        score, (train, validation) = SubfunctionBound(RHO), _drawn(layers(network, x[:2])[-1].name)
    else:
        score, (train, validation) = None, _recorded("train", "val")
    guard = Guard(network, score).fit(train, validation, verbose=False)

    def bare() -> torch.Tensor:
        with torch.no_grad():
            return network(x)

    with Watch() as watch:
        times = race({"bare": bare, "guarded": lambda: guard.predict(x)}, seconds=30.0, least=15, most=40)
    notes = watch.note("VGG16")
    overhead = times["guarded"] / times["bare"] - 1
    figures = [
        Figure("the bare network, one batch", 1e3 * times["bare"], "ms"),
        Figure("Guard.predict, one batch", 1e3 * times["guarded"], "ms"),
        Figure("overhead of Guard.predict", 100 * overhead, "%", at_most=100 * MOST),
    ]
    figures += _promises(train, validation) if RECORDINGS else []
    title = f"Guard.predict on VGG16: M = {M}, batch {BATCH}, float32, N = {N_TRAIN}"
    return Report("guard", title, figures, notes).finish()


def _drawn(layer: str) -> list[Recorded]:
    """Draw patterns to train and to validate on."""
    clusters = Clusters.seeded(M)
    return [
        Recorded(
            patterns=PackedPatterns.pack(clusters.draw(n)),
            outputs=np.zeros((n, 10), np.float32),
            labels=np.zeros(n, int),
            errors=clusters.wrong(n, WRONG),
            layer_names=(layer,),
        )
        for n in (N_TRAIN, 2000)
    ]


def _recorded(*names: str) -> list[Recorded]:
    return [Recorded.load(Path(RECORDINGS or "") / f"{name}.safetensors") for name in names]


def _promises(train: Recorded, validation: Recorded) -> list[Figure]:
    """Fit a guard for each risk and see what it accepts of the test set."""
    (test,) = _recorded("test")
    figures = [Figure("recorded network: error", 100 * float(np.mean(test.errors)), "%")]
    for risk in (0.01, 0.02, 0.05):
        found = Guard(None).fit(train, validation, risk=risk, verbose=False).evaluate(test)
        name = f"recorded network, risk {risk:.0%}"
        figures += [
            Figure(f"{name}: accepted", 100 * found.coverage, "%"),
            Figure(f"{name}: wrong among these", 100 * found.risk, "%", at_most=100 * risk),
        ]
    return figures


if __name__ == "__main__":
    run()
