"""The consumer: claims work for free capacity, and nothing beyond it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from streamfleet_common.broker import Broker, Delivery, Entry
from streamfleet_common.connections import BLOCK_MS
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, Start
from streamfleet_worker.lanes import LaneRotation

MAX_BACKOFF_S = 5.0

log = structlog.get_logger()


class Consumer:
    """Reads entries, starts them, and hands over the deliveries that are ours.

    `capacity` says how many more requests the worker would run now; `deliver` takes them over.
    """

    def __init__(
        self,
        broker: Broker,
        owner: str,
        start: Start,
        capacity: Callable[[], int],
        deliver: Callable[[list[Delivery]], Awaitable[None]],
        *,
        block_ms: int = BLOCK_MS,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._start = start
        self._capacity = capacity
        self._deliver = deliver
        self._block_ms = block_ms
        self._lanes = LaneRotation()
        self._room = asyncio.Event()
        self._stopping = False
        self.polled_at = asyncio.get_running_loop().time()
        """Loop time of the last completed read, or of the last look that found no room."""
        self.not_started: Counter[str] = Counter()
        """Entries read but not started, by reason."""

    def wake(self) -> None:
        """There may be room again."""
        self._room.set()

    def stop(self) -> None:
        """Read no more. `run` returns once the read that is under way has been dealt with."""
        self._stopping = True
        self._room.set()

    async def run(self) -> None:
        """Consume until stopped. Outlives any failure of Redis."""
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopping:
            self._room.clear()
            room = self._capacity()
            if room <= 0:
                self.polled_at = loop.time()
                await self._wait_for_room()
                continue
            try:
                entries = await self._read(room)
                self.polled_at = loop.time()
                if entries:
                    await self._begin(entries)
                failures = 0
            except BrokerUnavailable as error:
                failures += 1
                pause_s = random.uniform(0, min(MAX_BACKOFF_S, 0.1 * 2**failures))
                log.warning("no work can be read", error=str(error), retry_in_s=round(pause_s, 2))
                await asyncio.sleep(pause_s)

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._block_ms / 1000):
                await self._room.wait()
        except TimeoutError:
            pass  # look around once in a while, so that `polled_at` shows that we are alive

    async def _read(self, room: int) -> list[Entry]:
        entries: list[Entry] = []
        order = self._lanes.turn()
        for lane in order:
            entries += await self._broker.read(self._owner, [lane], room - len(entries), block_ms=None)
            if len(entries) >= room:
                break
        if entries or self._stopping:
            return entries
        # COUNT holds for each stream of a read, so each may give a third of the room. (With room for less
        # than three, work that comes at the same instant in several lanes can exceed it by two.)
        share = max(1, room // len(LANES))
        return await self._broker.read(self._owner, order, share, block_ms=self._block_ms)

    async def _begin(self, entries: list[Entry]) -> None:
        started = await self._broker.start(self._owner, entries, self._start)
        deliveries = []
        for entry, outcome in zip(entries, started, strict=True):
            if isinstance(outcome, Delivery):
                deliveries.append(outcome)
            else:
                self.not_started[outcome] += 1
                log.info("entry not started", rid=entry.rid[:34], entry=entry.eid, reason=outcome)
        if deliveries:
            await self._deliver(deliveries)
