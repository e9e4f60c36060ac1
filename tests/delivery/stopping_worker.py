"""A worker that ends, or falls asleep, by its own hand between two steps of the protocol."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Bill, Delivery, Emission, Entry, Finish, Renewal, Swept, Taken
from streamfleet_worker import process

Step = Literal["read", "take", "emit", "finish", "renew", "sweep"]
Moment = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class Point:
    """Before or after the `number`th call of `step` that has to do with work; there the signal comes."""

    step: Step
    number: int
    moment: Moment
    signal: Literal["KILL", "STOP"]

    def __str__(self) -> str:
        return f"{self.step}-{self.number}-{self.moment}-{self.signal}"

    @classmethod
    def parse(cls, text: str) -> Point:
        step, number, moment, name = text.split("-")
        return cls(step, int(number), moment, name)  # type: ignore[arg-type]


class StoppingBroker(Broker):
    """The broker, with one such point."""

    def __init__(self, point: Point, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._point = point
        self._left = point.number
        self._has_begun = False

    async def read(self, *args: Any, **options: Any) -> list[Entry]:
        self._reach("read", "before")
        entries = await super().read(*args, **options)
        self._reach("read", "after", counts=bool(entries))
        return entries

    async def take(self, *args: Any, entries: Sequence[Entry] = (), **options: Any) -> Taken:
        self._reach("take", "before", counts=bool(entries))
        taken = await super().take(*args, entries=entries, **options)
        self._has_begun = self._has_begun or bool(taken.started)
        self._reach("take", "after", counts=bool(taken.started))
        return taken

    async def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        self._reach("emit", "before", counts=bool(emissions))
        ours = await super().emit(emissions)
        self._reach("emit", "after", counts=bool(emissions))
        return ours

    async def finish(self, finishes: Sequence[Finish], bills: Sequence[Bill] = ()) -> list[bool]:
        self._reach("finish", "before", counts=bool(finishes))
        ours = await super().finish(finishes, bills)
        self._reach("finish", "after", counts=bool(finishes))
        return ours

    async def renew(self, owner: str, deliveries: Sequence[Delivery]) -> Renewal:
        self._reach("renew", "before", counts=bool(deliveries))
        renewal = await super().renew(owner, deliveries)
        self._reach("renew", "after", counts=bool(deliveries))
        return renewal

    async def sweep(self, **options: Any) -> Swept:
        self._reach("sweep", "before", counts=self._has_begun)
        swept = await super().sweep(**options)
        self._reach("sweep", "after", counts=self._has_begun)
        return swept

    def _reach(self, step: Step, moment: Moment, *, counts: bool = True) -> None:
        if (step, moment) != (self._point.step, self._point.moment) or not counts:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), getattr(signal, f"SIG{self._point.signal}"))


def arm(text: str) -> None:
    """Let the worker of this process stop at a point, given as its text."""
    vars(process)["Broker"] = partial(StoppingBroker, Point.parse(text))
