"""A request of one-shot work in the engine: what its items have come to, and what it ends with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamfleet_common.schemas import EndState, Timing
from streamfleet_worker.engine.base import Arrival, Finished, Key, Launch
from streamfleet_worker.engine.item_line import Item

if TYPE_CHECKING:
    from streamfleet_common.errors import StreamfleetError
    from streamfleet_worker.engine.item import Job

_NO_TIMING = Timing()


@dataclass(eq=False, slots=True)
class Shared(Item):
    """An item, and every request that waits for its result."""

    key: Hashable = None
    """What it shares with equal ones; None if it is like no other."""
    owners: list[tuple[Asked, int]] = field(default_factory=list)
    """With the item's place in each."""
    parts: list[Any] = field(default_factory=list)
    """What it has given so far, if it comes in parts."""
    ended: bool = False
    launch: Launch | None = None
    """The batch that it was last put into."""


@dataclass(eq=False, slots=True)
class Asked:
    """What a key comes to. Times are seconds on the engine's clock."""

    key: Key
    arrival: Arrival
    added_at: float
    results: list[Any]
    missing: int
    """Items that have no result yet."""
    items: dict[int, Shared] = field(default_factory=dict)
    """Those, by their place."""
    started_at: float | None = None
    batches: int = 0
    device_s: float = 0.0
    launch: Launch | None = None
    """Of the batches with an item of it the last."""

    @classmethod
    def of(cls, key: Key, arrival: Arrival, now: float) -> Asked:
        n = arrival.prepared.n
        return cls(key, arrival, now, [None] * n, n)

    @property
    def job(self) -> Job:
        job: Job = self.arrival.prepared
        return job

    def start(self, now: float) -> None:
        """A batch with an item of it begins."""
        if self.started_at is None:
            self.started_at = now

    def give(self, place: int, result: Any) -> bool:
        """Take an item's result; whether it was the last."""
        self.items.pop(place, None)
        self.results[place] = result
        self.missing -= 1
        return not self.missing

    def answer(self, now: float) -> Finished:
        """The last output, once nothing is missing.

        Raises:
            StreamfleetError: the results make no answer.
        """
        fields = self.job.answer(self.results)
        timing = self._timing(now)
        return Finished("done", usage=self.job.usage, timing=timing, launch=self.launch, **fields)

    def failed(
        self, state: EndState, now: float, error: StreamfleetError, retry_after_s: float | None = None
    ) -> Finished:
        """The last output of one that has no answer."""
        timing = self._timing(now)
        return Finished(state, timing=timing, error=error, retry_after_s=retry_after_s, launch=self.launch)

    def _timing(self, now: float) -> Timing:
        started = now if self.started_at is None else self.started_at
        return _NO_TIMING.changed(
            {
                "wait_ms": max(0.0, started - self.added_at) * 1000,
                "tokenize_ms": self.job.tokenize_s * 1000,
                "device_ms": self.device_s * 1000,
                "batches": self.batches,
            }
        )
