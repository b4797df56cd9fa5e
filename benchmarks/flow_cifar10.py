"""Train the residual flow on CIFAR10 images for some minutes, and say how many bits per dimension it needs.

``python -m benchmarks.flow_cifar10 --minutes 5 --out FOLDER``. ``TERRAFIRMA_CIFAR10`` names a folder with the official Python
batches (``data_batch_1`` to ``data_batch_5``, ``test_batch``), or an .npy file of uint8 images (n, 3, 32, 32), of which
the last tenth are test images. Without it, random images are used: they tell the speed, and 8 bits per dimension.

Training is kept in ``FOLDER/training.safetensors`` after each epoch: the same command goes on from there. The fitted score
is written to ``FOLDER/score.safetensors``, for ``terrafirma.scores.load``.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from terrafirma import Recorded, storage
from terrafirma.scores.flow.blocks import Flow
from terrafirma.scores.flow.log_det import Truncated
from terrafirma.scores.flow.scaling import Scaling
from terrafirma.scores.flow.training import KIND, Plan, train_flow
from terrafirma.scores.residual_flow import ResidualFlow

SHAPE = (3, 32, 32)
WATCHED = 1000  # test images whose bits are printed after each epoch
TIMED = 20  # batches that tell how many epochs fit into the time
Images = npt.NDArray[np.uint8]


def _latin1(text: str, encoding: str) -> bytes:
    """How newer Pythons write bytes for older ones."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"CIFAR10 batches hold bytes as latin1. Got {encoding!r}.")
    return text.encode("latin1")


class _OnlyArrays(pickle.Unpickler):
    """Plain containers and numpy arrays; a file that asks for anything else is refused."""

    KNOWN: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": np._core.multiarray._reconstruct,
        "numpy._core.multiarray._reconstruct": np._core.multiarray._reconstruct,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        "_codecs.encode": _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.KNOWN:
            raise pickle.UnpicklingError(f"CIFAR10 batches hold plain containers and arrays. Got {module}.{name}.")
        return self.KNOWN[f"{module}.{name}"]


def images_of(where: str | None) -> tuple[Images, Images]:
    """Training and test images."""
    if where is None:
        drawn = np.random.default_rng(0).integers(0, 256, (55_000, *SHAPE), dtype=np.uint8)
        return drawn[:50_000], drawn[50_000:]
    path = Path(where)
    if path.is_file():
        images = np.load(path, allow_pickle=False)
        return images[: -(len(images) // 10)], images[-(len(images) // 10) :]
    return np.concatenate([_batch(path / f"data_batch_{i}") for i in range(1, 6)]), _batch(path / "test_batch")


def _batch(path: Path) -> Images:
    with path.open("rb") as file:
        content = _OnlyArrays(file, encoding="bytes").load()
    return np.ascontiguousarray(content[b"data"].reshape(-1, *SHAPE), dtype=np.uint8)


@torch.no_grad()
def bits(flow: Flow, images: Images, device: torch.device) -> float:
    """Bits per dimension of a flow that is still learning: single precision, one probe."""
    found = 0.0
    for start in range(0, len(images), 250):
        batch = torch.from_numpy(images[start : start + 250]).to(device)
        z, log_volume = Scaling(None, None).scoring(batch)
        density = flow.log_density(z.float(), Truncated(0, probes=1)) + log_volume
        found -= float(density.sum())
    return found / len(images) / math.prod(SHAPE) / math.log(2)


def plan_of(score: ResidualFlow, epochs: int) -> Plan:
    """The training of the score's ``fit``, for so many epochs."""
    return Plan(SHAPE, score.blocks, score.width, epochs, score.batch_size, score.learning_rate, score.seed)


def epochs_for(minutes: float, score: ResidualFlow, train: Images, device: torch.device) -> int:
    """As many as fit into the time, by the speed of some batches; those of the checkpoint, if there is one."""
    if Path(str(score.checkpoint)).exists():
        _, settings = storage.read_arrays(str(score.checkpoint), KIND)
        return int(settings["of"]["plan"]["epochs"])
    times = []
    part = train[: TIMED * score.batch_size]
    train_flow(plan_of(score, 3), part, Scaling(None, None), device, None, lambda *_: times.append(time.perf_counter()))
    a_batch = (times[2] - times[1]) / TIMED
    return max(1, int(60 * minutes / (a_batch * len(train) / score.batch_size)))


def run() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--out", type=Path, default=Path("flow-cifar10"))
    options.add_argument("--blocks", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--batch-size", type=int, default=256)
    options.add_argument("--learning-rate", type=float, default=2e-3)
    options.add_argument("--scored", type=int, default=1000, help="test images scored in the end, in double precision")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    train, test = images_of(os.environ.get("TERRAFIRMA_CIFAR10"))
    settings = {name: getattr(given, name) for name in ("blocks", "width", "batch_size", "learning_rate")}
    score = ResidualFlow(**settings, device=str(device), checkpoint=given.out / "training.safetensors")
    score.epochs = epochs_for(given.minutes, score, train, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__} on {name}; {len(train)} images, {score.epochs} epochs; {settings}", flush=True)

    last = time.perf_counter()

    def on_epoch(epoch: int, losses: list[float], flow: Flow) -> None:
        nonlocal last
        now = time.perf_counter()
        seen = bits(flow, test[:WATCHED], device)
        print(
            f"epoch {epoch:3d}: {losses[-1]:.4f} bits per dimension in training, {seen:.4f} on test images; "
            f"{len(train) / (now - last):.0f} images/s, {time.perf_counter() - now:.1f} s for the test images",
            flush=True,
        )
        last = time.perf_counter()

    train_flow(plan_of(score, score.epochs), train, Scaling(None, None), device, str(score.checkpoint), on_epoch)
    start = time.perf_counter()
    score.fit(Recorded(inputs=train))  # takes up the finished training
    score.save(given.out / "score.safetensors")
    fitted = time.perf_counter()
    found = score.unreliability(Recorded(inputs=test[: given.scored]))
    scored = time.perf_counter() - fitted
    print(
        f"in the end {found.mean():.4f} bits per dimension on {len(found)} test images (spread {found.std():.3f}), in "
        f"double precision: {len(found) / scored:.0f} images/s; weights frozen and written in {fitted - start:.1f} s"
    )


if __name__ == "__main__":
    run()
