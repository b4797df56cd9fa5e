"""Training of a flow by maximum likelihood, resumed where it was interrupted.

All that is random in an epoch is seeded by its number, so that a checkpoint needs no state of generators: weights, the
optimiser's moments and what has been lost so far are all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terrafirma import storage
from terrafirma.core._threads import row_ranges
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.scores.flow.blocks import Flow
from terrafirma.scores.flow.log_det import Roulette
from terrafirma.scores.flow.scaling import Scaling

__all__ = ["Plan", "few_threads", "largest", "train_flow"]

KIND = "FlowTraining"
FIRST_ROWS = 1024  # that every ActNorm learns from before training
LONGEST = 1.0  # gradients are cut to this length
HASHED_ROWS = 4096
WORTH_THREADS = 1 << 20  # numbers

OnEpoch = Callable[[int, list[float], Flow], None]


@dataclass(frozen=True)
class Plan:
    """What a training is, besides its data: a checkpoint of another one is refused."""

    shape: tuple[int, ...]
    blocks: int
    width: int
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def train_flow(
    plan: Plan,
    data: npt.NDArray[Any],
    scaling: Scaling,
    device: torch.device,
    checkpoint: str | None = None,
    on_epoch: OnEpoch | None = None,
) -> tuple[Flow, list[float]]:
    """A trained flow, and its bits per dimension in each epoch.

    ``checkpoint`` is read if it is there and written after each epoch; on a CPU what is resumed ends in the same weights,
    bit for bit. ``on_epoch`` sees the epochs done, their bits per dimension and the flow; what it raises ends the training.
    """
    run = _Run(plan, data, scaling, device)
    of = {} if checkpoint is None else {"data": _digest(data), "plan": asdict(plan) | {"shape": list(plan.shape)}}
    if checkpoint is not None and Path(checkpoint).exists():
        run.resume(checkpoint, of)
    else:
        run.start()
        if checkpoint is not None:
            run.save(checkpoint, of)  # rather now than after an hour, if it cannot be written
    while len(run.losses) < plan.epochs:
        with few_threads(plan.batch_size * largest(plan.shape, plan.width)):
            run.epoch()
        if checkpoint is not None:
            run.save(checkpoint, of)
        if on_epoch is not None:
            on_epoch(len(run.losses), run.losses, run.flow)
    return run.flow, run.losses


def largest(shape: tuple[int, ...], width: int) -> int:
    """Numbers in the largest array that a sample becomes on its way through a flow."""
    return max(width, shape[0]) * math.prod(shape[1:])


@contextmanager
def few_threads(numbers: int) -> Iterator[None]:
    """One thread where arrays hold fewer ``numbers`` than pay for several, which would mostly wait for each other."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before if numbers >= WORTH_THREADS else 1)
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """A training on its way."""

    def __init__(self, plan: Plan, data: npt.NDArray[Any], scaling: Scaling, device: torch.device) -> None:
        self.plan, self.data, self.scaling, self.device = plan, data, scaling, device
        self.flow = Flow(plan.shape, plan.blocks, plan.width, plan.seed).to(device)
        self.optimiser = torch.optim.Adam(self.flow.parameters(), lr=plan.learning_rate)
        self.losses: list[float] = []
        self.steps_each = -(-len(data) // plan.batch_size)

    def start(self) -> None:
        """What comes before the first epoch."""
        rng, generator = self._random(0)
        first = rng.permutation(len(self.data))[:FIRST_ROWS]
        self.flow.begin(self.scaling.training(self._batch(first), generator)[0])

    def epoch(self) -> None:
        """Go through all data once, in batches as equal as can be."""
        done = len(self.losses)
        rng, generator = self._random(done + 1)
        log_det = Roulette(rng, generator)
        total = torch.zeros((), device=self.device)
        batches = np.array_split(rng.permutation(len(self.data)), self.steps_each)
        for number, rows in enumerate(batches):
            for layer in self.flow.lipschitz():
                layer.iterate()
            x, log_volume = self.scaling.training(self._batch(rows), generator)
            bits = -(self.flow.log_density(x, log_det) + log_volume).mean() / (x[0].numel() * math.log(2))
            self._step(bits, (done + number / self.steps_each) / self.plan.epochs)
            total += bits.detach() * len(rows)
        self.losses.append(float(total) / len(self.data))
        if not math.isfinite(self.losses[-1]):
            raise InvalidInput(
                f"learning_rate must be small enough for training to stay finite. Got {self.plan.learning_rate}, and "
                f"{self.losses[-1]} bits per dimension in epoch {done + 1}; lower it."
            )

    def _step(self, bits: Tensor, progress: float) -> None:
        """One step of Adam, ever shorter along half a cosine."""
        self.optimiser.zero_grad()
        bits.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.flow.parameters(), LONGEST)
        self.optimiser.param_groups[0]["lr"] = self.plan.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
        self.optimiser.step()

    def _batch(self, rows: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(self.data[np.sort(rows)]).to(self.device)

    def _random(self, epoch: int) -> tuple[np.random.Generator, torch.Generator]:
        """The generators of an epoch: one for what is drawn once a batch, one for what is drawn for each sample."""
        rng = np.random.default_rng([self.plan.seed, epoch])
        return rng, torch.Generator(self.device).manual_seed(int(rng.integers(2**62)))

    def save(self, path: str, of: Mapping[str, Any]) -> None:
        """Write all that is needed to go on."""
        arrays = {f"flow/{name}": value.cpu().numpy() for name, value in self.flow.state_dict().items()}
        for number, moments in self.optimiser.state_dict()["state"].items():
            arrays |= {f"optimiser/{number}/{name}": value.cpu().numpy() for name, value in moments.items()}
        storage.write_arrays(path, KIND, arrays, {"of": dict(of), "losses": self.losses})

    def resume(self, path: str, of: Mapping[str, Any]) -> None:
        """Take up what ``save`` wrote, if it is of the same training."""
        arrays, settings = storage.read_arrays(path, KIND)
        try:
            other = _differences(settings["of"], of)
            if other:
                raise InvalidInput(
                    "checkpoint must be None, a new file, or one of training with the same data and settings. "
                    f"Got {path}, which is of other {', '.join(other)}; name another file."
                )
            self.flow.load_state_dict(_tensors(arrays, "flow/"))
            state = self.optimiser.state_dict()
            moments: dict[int, dict[str, Tensor]] = {}
            for key, value in _tensors(arrays, "optimiser/").items():
                number, _, name = key.partition("/")
                moments.setdefault(int(number), {})[name] = value
            self.optimiser.load_state_dict({**state, "state": moments})
            self.losses = [float(loss) for loss in settings["losses"]]
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise BadFile(f"{path} does not hold a whole training ({error!r:.200}). Name another file.") from error


def _tensors(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> dict[str, Tensor]:
    found = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
    return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs between two trainings, in words."""
    plans = [name for name in b["plan"] if a["plan"][name] != b["plan"][name]]
    return plans or (["data"] if a["data"] != b["data"] else [])


def _digest(data: npt.NDArray[Any]) -> str:
    """SHA-256 of the training data, in their order."""
    digest = hashlib.sha256(f"{data.dtype.str} {data.shape}".encode())
    for rows in row_ranges(len(data), HASHED_ROWS):
        digest.update(np.ascontiguousarray(data[rows]).data)
    return digest.hexdigest()
