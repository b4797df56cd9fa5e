"""ODIN: the maximum response of softened outputs, on inputs that were moved towards the predicted class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy.typing as npt

from terrafirma.core._checks import check_positive
from terrafirma.core.patterns import FloatArray
from terrafirma.recorded import Recorded
from terrafirma.scores.base import Score, check_moves
from terrafirma.scores.logits import check_logits, max_response

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Odin"]


class Odin(Score):
    """``1 - p_1`` of the softmax of ``logits / temperature``, at inputs moved by ``epsilon`` to where ``p_1`` is larger.

    Known inputs gain more by that than unknown ones. It takes gradients: ``model``, the torch module that was recorded, and
    recorded inputs, in whose units ``epsilon`` is: the paper's 0.0014 is of pixels in [0, 1], so about 0.006 of CIFAR's pixels
    once these are normalised. Without ``model`` inputs stay as they are, and this is a maximum response at a temperature.
    """

    name: ClassVar[str] = "odin"
    paper: ClassVar[str] = "Liang et al., ICLR 2018"
    cost: ClassVar[str] = (
        "a query O(C); with model= two passes and one back, and a fit on validation data 24 and 4 back"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "temperature": (1000.0, 1.0, 10.0, 100.0),
        "epsilon": (0.0014, 0.0, 0.0005, 0.001, 0.002, 0.004),
    }
    needs = frozenset({"outputs"})
    temperature_: float
    epsilon_: float

    def __init__(self, temperature: float | None = None, epsilon: float | None = None, model: Any = None) -> None:
        self.temperature = temperature
        self.epsilon = epsilon
        self.model = model
        if model is not None:
            self.needs = self.needs | {"inputs", "gradients"}

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.temperature is not None:
            check_positive("temperature", self.temperature, "logits are divided by it")
        if self.epsilon is not None or self.model is not None:
            from terrafirma.capture.gradients import check_nudge

            check_nudge(self.epsilon, self.model)
        check_moves(self.name, self.epsilon, self.model)

    def open_settings(self, recorded: Recorded) -> list[dict[str, Any]]:
        """Without a network, inputs stay as they are."""
        settings = super().open_settings(recorded)
        free = self.epsilon is None and self.model is None
        return [setting for setting in settings if setting["epsilon"] == 0] if free else settings

    def trials(self, train: Recorded, validation: Recorded | None) -> Iterator[tuple[Self, FloatArray]]:
        """Each setting in turn; one gradient serves all steps of a temperature."""
        settings = self.open_settings(train if validation is None else validation)
        if validation is None or len(settings) == 1:
            yield from super().trials(train, validation)
            return
        for temperature in dict.fromkeys(setting["temperature"] for setting in settings):
            trials = [self.with_setting(setting) for setting in settings if setting["temperature"] == temperature]
            outputs = trials[0]._outputs(validation, [trial.epsilon_ for trial in trials])
            for trial, found in zip(trials, outputs, strict=True):
                yield trial, max_response(check_logits(found) / temperature)

    def score(self, recorded: Recorded) -> FloatArray:
        """The softened maximum response."""
        (outputs,) = self._outputs(recorded, [self.epsilon_])
        return max_response(check_logits(outputs) / self.temperature_)

    def _outputs(self, recorded: Recorded, epsilons: Sequence[float]) -> list[npt.NDArray[Any]]:
        """Outputs at inputs moved by each step; those that were recorded, where nothing moves."""
        outputs = recorded.need("outputs", by=f"The score {self.name}")
        steps = [epsilon for epsilon in epsilons if epsilon > 0]
        moved: dict[float, npt.NDArray[Any]] = {}
        if steps:
            from terrafirma.capture.gradients import nudges

            inputs = recorded.need("inputs", by=f"The score {self.name}")
            found = nudges(self.model, inputs, self._surprise, steps, expected=outputs)
            moved = {step: one.outputs for step, one in zip(steps, found, strict=True)}
        return [moved.get(epsilon, outputs) for epsilon in epsilons]

    def _surprise(self, outputs: Tensor, _: Mapping[str, Tensor]) -> Tensor:
        """``log((1 - p_1) / p_1)`` of the softened softmax: as ``-log p_1``, but its slope never vanishes."""
        softened = outputs / self.temperature_
        top = softened.argmax(1, keepdim=True)
        return softened.scatter(1, top, -math.inf).logsumexp(1) - softened.gather(1, top)[:, 0]
