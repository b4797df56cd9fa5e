"""Monte Carlo dropout: how much the network's confidence varies when units drop out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from terrafirma.core._checks import check_share
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded, errors_of
from terrafirma.scores.base import Score
from terrafirma.scores.logits import check_logits
from terrafirma.scores.max_response import MaxResponse

__all__ = ["McDropout"]


class McDropout(Score):
    """Variance over stochastic passes of the largest probability; the dropout probability ``p`` among those recorded.

    ``variant="published"``: in single precision, and p chosen by the errors of one stochastic pass instead of the network's.
    """

    name: ClassVar[str] = "mc_dropout"
    paper: ClassVar[str] = "Gal & Ghahramani, ICML 2016; Geifman & El-Yaniv, NIPS 2017"
    cost: ClassVar[str] = "10 passes for each p, of all but training samples"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"p": (0.5, 0.1, 0.25, 0.75, 0.9)}
    needs = frozenset({"stochastic"})
    p_: float

    def __init__(self, p: float | None = None, variant: str | None = None) -> None:
        self.p = p
        self.variant = variant

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.p is not None:
            check_share("p", self.p, "the probability that a unit drops out")

    @property
    def dropouts(self) -> tuple[float, ...]:
        """The probability in use; before ``fit``, all that are searched."""
        known = getattr(self, "p_", self.p)
        return self.grid["p"] if known is None else (known,)

    def open_settings(self, recorded: Recorded) -> list[dict[str, Any]]:
        """The recorded probabilities, those of the grid first."""
        if not recorded.stochastic:
            return super().open_settings(recorded)[:1]
        if self.p is not None:
            self._check_recorded(self.p, recorded)
            return [{"p": float(self.p)}]
        usual = [p for p in self.grid["p"] if p in recorded.stochastic]
        return [{"p": p} for p in (*usual, *sorted(recorded.stochastic.keys() - set(usual)))]

    def score(self, recorded: Recorded) -> FloatArray:
        """The variance over passes."""
        response = MaxResponse(self.variant)
        return np.asarray(np.var([response.of_logits(outputs) for outputs in self._passes(recorded)], axis=0))

    def selection_errors(self, validation: Recorded) -> FloatArray:
        """The network's errors; as published, those of the first pass."""
        if self.variant != "published":
            return super().selection_errors(validation)
        labels = validation.need("labels", by=f"The published choice of p of the score {self.name}")
        return errors_of(self._passes(validation)[0], labels)

    def _passes(self, recorded: Recorded) -> list[FloatArray]:
        self._check_recorded(self.p_, recorded)
        passes = recorded.stochastic[self.p_]
        if passes.ndim != 3 or len(passes) < 2:
            raise InvalidInput(
                f"stochastic[{self.p_}] must have shape (passes, n, classes), of at least two passes. Got {passes.shape}."
            )
        return [check_logits(outputs) for outputs in passes]

    def _check_recorded(self, p: float, recorded: Recorded) -> None:
        if p not in recorded.stochastic:
            raise InvalidInput(
                f"p must be a dropout probability that was recorded ({', '.join(map(str, sorted(recorded.stochastic)))}). "
                f"Got {p}; record again with dropout=({p},)."
            )
