"""How the sides of `generation.py` and of `one_shot.py` compare, from the rounds that they took in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One side: what it is called in the table, and how the ratio with ours is to be read."""

    title: str
    script: str
    goal: float | None = None
    ours_first: bool = True
    """The ratio is ours by it; else it by ours."""

    @property
    def goal_words(self) -> str:
        return f"≥ {self.goal:g}" if self.goal else ""

    def ratios(self, ours: Sequence[Rates], its: Sequence[Rates]) -> dict[str, dict[str, float]]:
        """By wall clock and by CPU time, of each round's two; nothing if there are no rounds of ours."""
        found = {}
        for by in ("wall", "cpu"):
            pairs = [(getattr(a, by), getattr(b, by)) for a, b in zip(ours, its, strict=False)]
            values = [a / b if self.ours_first else b / a for a, b in pairs]
            if values:
                median = statistics.median(values)
                found[by] = {"median": median, "least": min(values), "most": max(values)}
        return found


@dataclass(frozen=True)
class Rates:
    """What a side did in one round: for each second by the wall clock, and of all its processes' CPU time."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, amount: int, seconds: float, cpu_seconds: dict[str, float]) -> Rates:
        return cls(amount / seconds, amount / sum(cpu_seconds.values()))
