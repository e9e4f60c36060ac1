"""The producer's steps of the protocol on a queue in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card
from streamfleet_common.deliveries import Swept
from streamfleet_common.depth import MAX_QUEUE_DEPTH, Depth
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.frames import Frame
from streamfleet_common.housekeeping import LEASE_MS
from streamfleet_common.keys import Keys
from streamfleet_common.records import Record
from streamfleet_common.schemas import State
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_producer.testing.memory_channels import MemoryChannels
from streamfleet_producer.testing.memory_queue import MemoryQueue


class MemoryBroker(Broker):
    """What a client asks of Redis, answered by a `MemoryQueue`. A worker's steps are none of it.

    `cards` are those of the workers that live, looked at whenever they are asked for.
    """

    def __init__(self, queue: str, memory: MemoryQueue, channels: MemoryChannels, cards: list[Card]) -> None:
        self.keys = Keys(queue)
        self._memory = memory
        self._channels = channels
        self._cards = cards

    async def submit(
        self,
        submissions: Sequence[Submission],
        *,
        max_queue_depth: int = MAX_QUEUE_DEPTH,  # noqa: ARG002 (a worker has set one)
    ) -> list[Submitted]:
        await self._trip()
        return [self._memory.submit(submission) for submission in submissions]

    async def cancel(self, rids: Sequence[str], tenant: str) -> list[State | None]:
        await self._trip()
        return [self._memory.cancel(rid, tenant) for rid in rids]

    async def status(self, rids: Sequence[str], tenant: str) -> list[Record | None]:
        await self._trip()
        return [self._memory.record(rid, tenant) for rid in rids]

    async def events(self, rid: str, after: str = "-") -> list[Frame]:
        await self._trip()
        return self._memory.events(rid, after)

    async def cards(self) -> list[Card]:
        await self._trip()
        served = self.keys.queue == self._memory.keys.queue
        return sorted(self._cards, key=lambda card: card.worker) if served else []

    async def queues(self) -> list[str]:
        await self._trip()
        return [self._memory.keys.queue]

    async def depth(self) -> Depth:
        await self._trip()
        return self._memory.depth()

    async def ping(self) -> None:
        await self._trip()

    async def sweep(self, *, lease_ms: int = LEASE_MS, lazy: bool = False) -> Swept:  # noqa: ARG002
        """Nothing is ever overdue here: the queue has a timer for each deadline."""
        await self._trip()
        return Swept()

    async def _trip(self) -> None:
        # As long as the way to Redis and back: others have their turn.
        await asyncio.sleep(0)
        if self._channels.is_down:
            raise BrokerUnavailable("the scripted fleet's Redis is down, as the test has told it to be")
