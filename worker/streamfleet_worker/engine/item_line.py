"""The line of items that wait for a batch, and the rules by which one is launched. No model, no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import LaunchReason
    from streamfleet_worker.engine.item import ItemSpec

SLACK = 0.25
"""Where lengths may differ within a batch, the part of a row that may be filled up for want of others."""
SLACK_TOKENS = 16
"""Rows this short cost little more than none: they may be filled up by so much, whatever part that is."""
RECOVERY = 32
"""Batches without a fault after which a budget that was lowered is doubled."""


@dataclass(eq=False, slots=True)
class Item:
    """One item in the line, or in a batch. Times are seconds on the engine's clock."""

    spec: ItemSpec
    accepted_at: float
    """When the fleet accepted its request; of several the first."""
    bucket: int = 0
    """Its length, rounded up."""
    waits: bool = True


AnItem = TypeVar("AnItem", bound=Item)


@dataclass(eq=False, slots=True)
class _Bucket(Generic[AnItem]):
    """Waiting items of one group and one rounded length, the oldest first."""

    group: Hashable
    length: int
    heap: list[tuple[float, int, AnItem]] = field(default_factory=list)
    """With those that have left; they are dropped when they come to the top."""
    count: int = 0

    def oldest(self) -> AnItem | None:
        while self.heap and not self.heap[0][2].waits:
            heapq.heappop(self.heap)
        return self.heap[0][2] if self.heap else None

    def pop(self) -> AnItem | None:
        item = self.oldest()
        if item is not None:
            heapq.heappop(self.heap)
            item.waits = False
            self.count -= 1
        return item


class ItemLine(Generic[AnItem]):
    """Sorts items into buckets by group and length, and makes batches of them.

    A batch is launched when its bucket can fill it, or when the oldest item of all has come to its age: so
    work that has waited elsewhere waits no more, and nothing is passed over. It is filled from its own
    bucket, the oldest first; then from the next smaller ones, if lengths may differ.

    Args:
        max_batch_size: items in a batch.
        max_batch_tokens: tokens in a batch, those that fill rows up included; one item may always run.
        max_delay_s: age of an item, since its acceptance, at which it is launched, whoever is with it.
        length_step: lengths are rounded up to a multiple of it.
        exact: all rows of a batch have the same rounded length.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_delay_s: float,
        length_step: int = 1,
        exact: bool = False,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = self._budget = max_batch_tokens
        self._max_delay_s = max_delay_s
        self._step = length_step
        self._exact = exact
        self._buckets: dict[tuple[Hashable, int], _Bucket[AnItem]] = {}
        self._numbers = itertools.count()
        self._good = 0
        self._may_be_full = False
        """Whether a bucket may have become full since they were last counted."""
        self.is_draining = False
        """Nothing more comes: every item is of age."""
        self.waiting = 0
        """Items in the line."""
        self.reason: LaunchReason = "full"
        """Why the last batch was taken when it was. A full one would have been taken at any age."""

    @property
    def budget(self) -> int:
        """Tokens in a batch now."""
        return self._budget

    def add(self, item: AnItem) -> None:
        """Let an item wait."""
        item.bucket = -(-item.spec.length // self._step) * self._step
        item.waits = True
        place = (item.spec.group, item.bucket)
        bucket = self._buckets.get(place)
        if bucket is None:
            bucket = self._buckets[place] = _Bucket(*place)
        heapq.heappush(bucket.heap, (item.accepted_at, next(self._numbers), item))
        bucket.count += 1
        self.waiting += 1
        self._may_be_full = True

    def hasten(self, item: AnItem, accepted_at: float) -> None:
        """Let an item that waits be as old as this, which is older than it was."""
        item.accepted_at = accepted_at
        bucket = self._buckets[item.spec.group, item.bucket]
        # Its old entry is passed over once the item has left.
        heapq.heappush(bucket.heap, (accepted_at, next(self._numbers), item))

    def remove(self, item: AnItem) -> None:
        """Let an item go, if it still waits."""
        if not item.waits:
            return
        item.waits = False
        self.waiting -= 1
        place = (item.spec.group, item.bucket)
        bucket = self._buckets[place]
        bucket.count -= 1
        if not bucket.count:
            del self._buckets[place]
        elif len(bucket.heap) > 2 * bucket.count + 16:
            # What has left takes no more memory than what is there.
            bucket.heap = [entry for entry in bucket.heap if entry[2].waits]
            heapq.heapify(bucket.heap)

    def take(self, now: float, *, full: bool = False) -> list[AnItem]:
        """The next batch; empty if none is to be launched yet. With `full` none but one that is full."""
        bucket = self._full() if full else self._due(now)
        if bucket is None:
            return []
        would_wait = bucket.heap[0][0] + self._max_delay_s > now
        rows = self._rows(bucket.length)
        batch: list[AnItem] = []
        for source in self._sources(bucket):
            while len(batch) < rows and (item := source.pop()) is not None:
                batch.append(item)
            if not source.count:
                del self._buckets[source.group, source.length]
        self.waiting -= len(batch)
        self.reason = "full" if len(batch) == rows else "drain" if would_wait else "delay"
        return batch

    def due_in(self, now: float) -> float | None:
        """Seconds until a batch is to be launched: 0 is now, None is not before an `add`."""
        oldest = self._oldest()
        if oldest is None:
            return None
        if self._is_of_age(oldest, now) or self._full() is not None:
            return 0.0
        return oldest.heap[0][0] + self._max_delay_s - now

    @property
    def is_full(self) -> bool:
        """Whether there is a full batch."""
        return self._full() is not None

    def lower_budget(self, batch: Sequence[AnItem]) -> None:
        """This batch was too much for the memory: make smaller ones for a while."""
        tokens = len(batch) * max(1, *(item.bucket for item in batch))
        self._budget = max(1, min(self._budget, tokens) // 2)
        self._good = 0
        self._may_be_full = True

    def fared_well(self) -> None:
        """A batch has run without a fault."""
        if self._budget < self._max_batch_tokens:
            self._good += 1
            if self._good >= RECOVERY:
                self._good = 0
                self._budget = min(2 * self._budget, self._max_batch_tokens)

    # --- rules

    def _due(self, now: float) -> _Bucket[AnItem] | None:
        """The bucket to launch from."""
        oldest = self._oldest()
        if oldest is not None and self._is_of_age(oldest, now):
            return oldest
        return self._full()

    def _is_of_age(self, oldest: _Bucket[AnItem], now: float) -> bool:
        return self.is_draining or now >= oldest.heap[0][0] + self._max_delay_s

    def _full(self) -> _Bucket[AnItem] | None:
        """Of the buckets that can fill a batch the one with the oldest item."""
        if not self._may_be_full:
            return None
        groups: dict[Hashable, list[_Bucket[AnItem]]] = {}
        for bucket in self._buckets.values():
            groups.setdefault(bucket.group, []).append(bucket)
        full: list[_Bucket[AnItem]] = []
        for buckets in groups.values():
            buckets.sort(key=_length)
            shortest = count = 0
            for bucket in buckets:
                count += bucket.count
                while buckets[shortest].length < self._least(bucket.length):
                    count -= buckets[shortest].count
                    shortest += 1
                if count >= self._rows(bucket.length):
                    full.append(bucket)
        self._may_be_full = bool(full)
        return min(full, key=_age) if full else None

    def _oldest(self) -> _Bucket[AnItem] | None:
        return min(self._buckets.values(), key=_age) if self._buckets else None

    def _rows(self, length: int) -> int:
        return min(self._max_batch_size, max(1, self._budget // max(1, length)))

    def _least(self, length: int) -> float:
        """The least that may be filled up to this length."""
        return length if self._exact else min(length * (1 - SLACK), length - SLACK_TOKENS)

    def _sources(self, bucket: _Bucket[AnItem]) -> list[_Bucket[AnItem]]:
        """The bucket, and those that may fill its batch up, the longest first."""
        least = self._least(bucket.length)
        return sorted(
            (
                other
                for other in self._buckets.values()
                if least <= other.length <= bucket.length and other.group == bucket.group
            ),
            key=_length,
            reverse=True,
        )


def _length(bucket: _Bucket[Any]) -> int:
    return bucket.length


def _age(bucket: _Bucket[Any]) -> tuple[float, int]:
    bucket.oldest()  # so that the first of the heap still waits
    return bucket.heap[0][:2]
