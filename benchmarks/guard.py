"""What a guard costs beside its network: ``Guard.predict`` over the bare VGG16; and what it keeps of its promise.

VGG16 as in the paper's study: 13 convolutions with batch norm, a last ReLU layer of 4096 units; float32, batches of 128,
42 500 training samples. Weights and images decide nothing about time, so both are drawn at random, and the training
patterns are those of the other benchmarks; the time of the wrong ones (3.7 %, as on CIFAR10) is included.

Where ``TERRAFIRMA_RECORDINGS`` names a folder with ``train``, ``val`` and ``test.safetensors`` (``terrafirma.record(net, data,
path=...)``), a guard of these is fitted for risks of 1, 2 and 5 % and measured on the test set.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.common import N_TRAIN, Clusters, Figure, Report, Watch, race
from terrafirma import Guard, PackedPatterns, Recorded, SubfunctionBound, layers

M, BATCH, RHO = 4096, 128, 128.0
WRONG = 0.037
CHANNELS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
MOST = 0.05  # of the bare network's time


def vgg16() -> nn.Sequential:
    """Build the network, features and classifier in one row."""
    stack: list[nn.Module] = []
    width = 3
    for step in CHANNELS:
        if step == "M":
            stack.append(nn.MaxPool2d(2))
        else:
            stack += [nn.Conv2d(width, int(step), 3, padding=1), nn.BatchNorm2d(int(step)), nn.ReLU(inplace=True)]
            width = int(step)
    head = [nn.Linear(512, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, 10)]
    return nn.Sequential(*stack, nn.Flatten(), *head)


def run() -> Report:
    torch.manual_seed(0)
    network, x = vgg16().eval(), torch.randn(BATCH, 3, 32, 32)
    last = layers(network, x[:2])[-1].name
    clusters = Clusters.seeded(M)
    train, validation = (
        Recorded(
            patterns=PackedPatterns.pack(clusters.draw(n)),
            outputs=np.zeros((n, 10), np.float32),
            labels=np.zeros(n, int),
            errors=clusters.wrong(n, WRONG),
            layer_names=(last,),
        )
        for n in (N_TRAIN, 2000)
    )
    guard = Guard(network, SubfunctionBound(RHO)).fit(train, validation, verbose=False)

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
    if "TERRAFIRMA_RECORDINGS" in os.environ:
        figures += _promises(Path(os.environ["TERRAFIRMA_RECORDINGS"]))
    title = f"Guard.predict on VGG16: M = {M}, batch {BATCH}, float32, N = {N_TRAIN}"
    return Report("guard", title, figures, notes).finish()


def _promises(folder: Path) -> list[Figure]:
    """Fit a guard for each risk and see what it accepts."""
    train, val, test = (Recorded.load(folder / f"{name}.safetensors") for name in ("train", "val", "test"))
    figures = [Figure("recorded network: error", 100 * float(np.mean(test.errors)), "%")]
    for risk in (0.01, 0.02, 0.05):
        found = Guard(None).fit(train, val, risk=risk, verbose=False).evaluate(test)
        name = f"recorded network, risk {risk:.0%}"
        figures += [
            Figure(f"{name}: accepted", 100 * found.coverage, "%"),
            Figure(f"{name}: wrong among these", 100 * found.risk, "%", at_most=100 * risk),
        ]
    return figures


if __name__ == "__main__":
    run()
