"""The invariants of delivery, each as a function from a history to what breaks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chaos.history import History
from chaos.promises import (
    ends_once,
    logs_close_with_the_end,
    one_worker_an_epoch,
    places_have_no_holes,
    texts_are_whole,
    the_right_prompt,
)
from chaos.upkeep import (
    bounded_residue,
    crashes_are_losses,
    entries_are_open,
    limits_are_kept,
    only_poison_dies,
    recovery_is_prompt,
    tenants_stay_apart,
)

INVARIANTS: dict[str, Callable[[History], Iterator[tuple[str, str]]]] = {
    "I1": ends_once,
    "I2": logs_close_with_the_end,
    "I3": places_have_no_holes,
    "I4": texts_are_whole,
    "I5": one_worker_an_epoch,
    "I6": entries_are_open,
    "I7": limits_are_kept,
    "I8": crashes_are_losses,
    "I9": only_poison_dies,
    "I10": the_right_prompt,
    "I11": recovery_is_prompt,
    "I12": bounded_residue,
    "I13": tenants_stay_apart,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """What broke which invariant; `rid` is "" where it is no single request."""

    invariant: str
    rid: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.rid or '-'}: {self.what}"


def check(history: History) -> list[Violation]:
    """Everything that breaks an invariant."""
    return [
        Violation(name, rid, what) for name, broken in INVARIANTS.items() for rid, what in broken(history)
    ]


def summary(violations: list[Violation]) -> str:
    """How many there are of each."""
    counts: dict[str, int] = defaultdict(int)
    for violation in violations:
        counts[violation.invariant] += 1
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
