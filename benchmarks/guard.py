"""What a guard costs beside its network: ``Guard.predict`` over the bare VGG16, and what it takes to fit one.

VGG16 as in the paper's study: 13 convolutions with batch norm, a last ReLU layer of 4096 units; float32, batches of 128,
42 500 training samples. Weights and images decide nothing about time, so both are drawn at random, and the training
patterns are those of the other benchmarks; the time of the wrong ones (3.7 %, as on CIFAR10) is included.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.common import N_TRAIN, Clusters, Figure, Report, Watch, race
from terrafirma import Guard, PackedPatterns, Recorded, SubfunctionBound

M, BATCH, RHO = 4096, 128, 128.0
WRONG = 0.037
CHANNELS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
MOST = 0.05  # of the bare network's time


def vgg16() -> nn.Sequential:
    """Build the network, features and classifier in one row."""
    layers: list[nn.Module] = []
    width = 3
    for step in CHANNELS:
        if step == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(width, int(step), 3, padding=1), nn.BatchNorm2d(int(step)), nn.ReLU(inplace=True)]
            width = int(step)
    head = [nn.Linear(512, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, M), nn.ReLU(), nn.Dropout(), nn.Linear(M, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


def run() -> Report:
    torch.manual_seed(0)
    network, x = vgg16().eval(), torch.randn(BATCH, 3, 32, 32)
    clusters = Clusters.seeded(M)
    train, validation = (
        Recorded(
            patterns=PackedPatterns.pack(clusters.draw(n)),
            outputs=np.zeros((n, 10), np.float32),
            labels=np.zeros(n, int),
            errors=clusters.wrong(n, WRONG),
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
    title = f"Guard.predict on VGG16: M = {M}, batch {BATCH}, float32, N = {N_TRAIN}"
    return Report("guard", title, figures, notes).finish()


if __name__ == "__main__":
    run()
