"""The consumer: claims work for free capacity, and nothing beyond it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import structlog

from streamfleet_common.broker import Broker
from streamfleet_common.connections import BLOCK_MS
from streamfleet_common.deliveries import Delivery, Entry, NotStarted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, Start
from streamfleet_worker.lanes import LaneRotation

MAX_BACKOFF_S = 5.0

log = structlog.get_logger()


class Consumer:
    """Reads entries, starts them, and hands over the deliveries that are ours.

    Args:
        broker: where the work is.
        owner: the name under which it is claimed.
        room: how many more requests the worker would run now.
        holds: whether the worker has a delivery of this entry already.
        deliver: takes deliveries over.
        skipped: is told why an entry that was read is not run.
        reconnected: is called when Redis is back after a failure.
        block_ms: how long a read waits for work.
        clock: seconds, monotonic; for `polled_at`.
    """

    def __init__(
        self,
        broker: Broker,
        owner: str,
        *,
        room: Callable[[], int],
        holds: Callable[[Entry], bool],
        deliver: Callable[[list[Delivery]], Awaitable[None]],
        skipped: Callable[[NotStarted], None],
        reconnected: Callable[[], None],
        block_ms: int = BLOCK_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._room = room
        self._holds = holds
        self._deliver = deliver
        self._skipped = skipped
        self._reconnected = reconnected
        self._block_ms = block_ms
        self._clock = clock
        self._lanes = LaneRotation()
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._unsure = False
        self._unsure_until = 0.0
        self._idle = False
        self._peers = 1
        self._share: int | None = None
        self.polled_at = clock()
        """When a read was last completed, or found needless for want of room."""

    def wake(self) -> None:
        """There may be room again."""
        self._woken.set()

    def share_with(self, workers: int) -> None:
        """So many workers, this one included, take work from the queue now."""
        self._peers = workers

    def stop(self) -> None:
        """Read no more. `run` returns once the read that is under way has been dealt with."""
        self._stopping.set()
        self._woken.set()

    async def run(self, start: Start) -> None:
        """Consume until stopped. Outlives any failure of Redis. `start` opens every streaming request."""
        failures = 0
        while not self._stopping.is_set():
            self._woken.clear()
            room = self._room()
            if room <= 0:
                self.polled_at = self._clock()
                self._share = None
                # Not for ever, so that `polled_at` goes on to show that we are alive.
                await _wait(self._woken, self._block_ms / 1000)
                continue
            try:
                entries = await self._read(room)
                self.polled_at = self._clock()
                if entries:
                    await self._begin(entries, start)
            except BrokerUnavailable as error:
                self._doubt()
                failures += 1
                pause_s = random.uniform(0, min(MAX_BACKOFF_S, 0.1 * 2**failures))
                log.warning("no work can be read", error=str(error), retry_in_s=round(pause_s, 2))
                await _wait(self._stopping, pause_s)
            else:
                if failures:
                    self._reconnected()
                failures = 0

    # --- reading

    async def _read(self, room: int) -> list[Entry]:
        if self._unsure:
            # Asked before the read, so that the last of these looks comes after the time of doubt.
            self._unsure = self._clock() < self._unsure_until
            if unseen := await self._unseen():
                return unseen
        # COUNT holds for each stream of a read, so with less room than lanes, work that comes to several
        # at one instant can exceed it: the lanes are then looked into one by one first, always.
        if not self._idle or room < len(LANES):
            entries = await self._look(min(room, self._share or room))
            self._share = None
            if entries or self._stopping.is_set():
                return entries
        return await self._await_work(room)

    async def _look(self, room: int) -> list[Entry]:
        entries: list[Entry] = []
        for lane in self._lanes.turn():
            entries += await self._broker.read(self._owner, [lane], room - len(entries), block_ms=None)
            if len(entries) >= room or self._stopping.is_set():
                break
        return entries

    async def _await_work(self, room: int) -> list[Entry]:
        # A burst wakes every idle worker at once. Each takes its share in this read and the next; whoever
        # comes back a third time takes what the others have left.
        count = max(1, min(room // len(LANES), self._share_of(room)))
        entries = await self._broker.read(self._owner, LANES, count, block_ms=self._block_ms)
        self._idle = not entries
        if entries:
            self._share = max(1, self._share_of(room) - len(entries))
        return entries

    def _share_of(self, room: int) -> int:
        return -(-room // self._peers)

    def _doubt(self) -> None:
        # A reply was lost: it may have claimed entries, and a read that the server still holds open may
        # claim more until its time is up.
        self._unsure = True
        self._unsure_until = self._clock() + 2 * self._block_ms / 1000
        self._idle = False

    async def _unseen(self) -> list[Entry]:
        """What was given to us but never arrived here."""
        given = await self._broker.given(self._owner)
        return [entry for entry in given if not self._holds(entry)]

    async def _begin(self, entries: list[Entry], start: Start) -> None:
        started = await self._broker.start(self._owner, entries, start)
        deliveries = []
        for entry, outcome in zip(entries, started, strict=True):
            if isinstance(outcome, Delivery):
                deliveries.append(outcome)
            else:
                log.info("entry not started", rid=entry.rid[:34], entry=entry.eid, reason=outcome)
                self._skipped(outcome)
        if deliveries:
            await self._deliver(deliveries)


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
