"""What ``evaluate --require`` asks of a guard: ``risk@0.9<=0.02`` and the like."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrafirma.errors import InvalidInput

if TYPE_CHECKING:
    from terrafirma.guard.verdict import Evaluation

__all__ = ["Requirement"]

FIGURES: dict[str, Callable[[Evaluation], float | None]] = {
    "accuracy": lambda found: 1 - found.error,
    "error": lambda found: found.error,
    "coverage": lambda found: found.coverage,
    "risk": lambda found: found.risk,
    "aucea": lambda found: found.aucea,
    "auroc": lambda found: found.auroc,
}
FIGURES_AT: dict[str, Callable[[Evaluation, float], float]] = {
    "risk": lambda found, share: found.risk_at(share),
    "coverage": lambda found, risk: found.coverage_at(risk),
}
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
FORM = re.compile(r"\s*([a-z]+)(?:@([^<>=\s]+))?\s*(<=|>=|<|>)\s*([^<>=\s]+)\s*")


@dataclass(frozen=True)
class Requirement:
    """One figure, and what it must be.

    >>> Requirement.parse("risk@0.9<=0.02")
    Requirement(text='risk@0.9<=0.02', figure='risk', at=0.9, comparison='<=', limit=0.02)
    """

    text: str
    figure: str
    at: float | None
    comparison: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Read ``figure<=limit`` or ``figure@share<=limit``."""
        match = FORM.fullmatch(text)
        if match is None:
            raise cls._malformed(text)
        figure, at, comparison, limit = match.groups()
        if figure not in (FIGURES if at is None else FIGURES_AT):
            raise cls._malformed(text)
        try:
            share, number = None if at is None else float(at), float(limit)
        except ValueError as error:
            raise cls._malformed(text) from error
        if not math.isfinite(number) or not (share is None or 0 <= share <= 1):
            raise cls._malformed(text)
        return cls(text, figure, share, comparison, number)

    @staticmethod
    def _malformed(text: str) -> InvalidInput:
        return InvalidInput(
            f"A requirement must compare one of {', '.join(FIGURES)}, risk@SHARE or coverage@RISK with a number, by <=, <, >= "
            f'or >, for example "risk@0.9<=0.02". Got {text!r}.'
        )

    def value(self, found: Evaluation) -> float | None:
        """The figure; None where it is not defined: the risk of the accepted where none is, the AUROC where none is wrong."""
        value = FIGURES[self.figure](found) if self.at is None else FIGURES_AT[self.figure](found, self.at)
        return None if value is None or math.isnan(value) else float(value)

    def holds(self, value: float | None) -> bool:
        """Whether the figure is as it must be; one that is not defined is not."""
        return value is not None and bool(COMPARISONS[self.comparison](value, self.limit))
