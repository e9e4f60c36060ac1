"""The consumer: claims work for free capacity, and nothing beyond it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import structlog

from streamfleet_common.broker import Broker
from streamfleet_common.connections import BLOCK_MS
from streamfleet_common.deliveries import Delivery, Entry, NotStarted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import AGAIN, Stream
from streamfleet_common.schemas import LANES, Start
from streamfleet_worker.lanes import LaneRotation

MAX_BACKOFF_S = 5.0
AUDIT_S = 5.0
ALL: tuple[Stream, ...] = (*AGAIN, *LANES)

log = structlog.get_logger()


class Consumer:
    """Takes requests, and hands over the deliveries that are ours.

    Args:
        broker: where the work is.
        owner: the name under which it is claimed.
        room: how many more requests the worker would run now.
        empty: whether the worker runs nothing.
        known: the places of the deliveries that the worker has already.
        deliver: takes deliveries over.
        skipped: is told why an entry that was read is not run.
        reconnected: is called when Redis is back after a failure.
        block_ms: how long a read waits for work.
        audit_s: how often it asks what it was given, in case a reply was lost and nobody noticed.
        clock: seconds, monotonic; for `polled_at` and the audits.
    """

    def __init__(
        self,
        broker: Broker,
        owner: str,
        *,
        room: Callable[[], int],
        empty: Callable[[], bool],
        known: Callable[[], Collection[str]],
        deliver: Callable[[list[Delivery]], Awaitable[None]],
        skipped: Callable[[NotStarted], None],
        reconnected: Callable[[], None],
        block_ms: int = BLOCK_MS,
        audit_s: float = AUDIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._room = room
        self._empty = empty
        self._known = known
        self._deliver = deliver
        self._skipped = skipped
        self._reconnected = reconnected
        self._block_ms = block_ms
        self._audit_s = audit_s
        self._clock = clock
        self._lanes = LaneRotation()
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._unsure = False
        self._unsure_until = 0.0
        self._alone = False
        self._peers = 1
        self._audited_at = clock()
        self.polled_at = clock()
        """When a look for work was last completed, or found needless for want of room."""

    def wake(self) -> None:
        """There may be room again."""
        self._woken.set()

    def share_with(self, workers: int) -> None:
        """So many workers, this one included, take work from the queue now."""
        self._peers = workers

    def waited(self, ms: Sequence[int]) -> None:
        """How long the oldest request of each lane has waited."""
        self._lanes.waited(ms)

    def stop(self) -> None:
        """Take no more. `run` returns once the look that is under way is over; what it brings goes back."""
        self._stopping.set()
        self._woken.set()

    async def run(self, start: Start) -> None:
        """Consume until stopped. Outlives any failure of Redis. `start` opens every streaming request."""
        failures = 0
        while not self._stopping.is_set():
            self._woken.clear()
            room = self._free()
            if room <= 0:
                self.polled_at = self._clock()
                # Not for ever, so that `polled_at` goes on to show that we are alive.
                await _wait(self._woken, self._block_ms / 1000)
                if self._stopping.is_set() or not self._must_ask():
                    continue
            try:
                # Asked however full it is: what a lost reply has begun would soon count as lost by us.
                await (self._look(room, start) if room > 0 else self._audit(start))
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

    def _free(self) -> int:
        if self._alone:
            # A suspect runs, or is to run, with nobody beside it.
            if not self._empty():
                return 0
            self._alone = False
        return self._room()

    async def _look(self, room: int, start: Start) -> None:
        if self._must_ask() and await self._audit(start):
            return
        if await self._take(start, room) or self._alone or self._stopping.is_set():
            return
        # Of the suspects none is waited for, since it would have to come alone.
        entries = await self._broker.read(self._owner, ALL, 1, block_ms=self._block_ms)
        self.polled_at = self._clock()
        # One of each stream, where work came to several at one instant; and asked to stop meanwhile, none.
        keep = 0 if self._stopping.is_set() else room
        if surplus := entries[keep:]:
            await self._broker.release(surplus)
            del entries[keep:]
        if entries:
            # A burst wakes every idle worker at once. Each takes its share now; whoever comes back takes what
            # the others have left.
            share = -(-room // self._peers)
            await self._take(start, max(0, share - len(entries)), entries)

    def _must_ask(self) -> bool:
        return self._unsure or self._clock() - self._audited_at >= self._audit_s

    async def _audit(self, start: Start) -> bool:
        """Begin, or give back, what was given to us without our hearing of it; whether there was any."""
        self._audited_at = self._clock()
        # Asked before the look, so that the last of these comes after the time of doubt.
        self._unsure = self._clock() < self._unsure_until
        unseen = await self._broker.given(self._owner, known=self._known())
        if not unseen:
            return False
        suspects = [entry for entry in unseen if entry.stream == "solo"]
        # However many, they are ours already; but a suspect runs alone, and the others wait for it.
        if self._empty():
            self._unsure = self._unsure or bool(suspects)
            await self._take(start, 0, suspects[:1] or unseen)
            return True
        if unfit := unseen if self._alone else suspects:
            self._unsure = True  # of the others, if there are any
            await self._give_back(unfit, start)
        else:
            await self._take(start, 0, unseen)
        return True

    async def _give_back(self, entries: Sequence[Entry], start: Start) -> None:
        """Return what may not run beside what does. Nothing is counted against it."""
        were_only_read = await self._broker.release(entries)
        begun = [entry for entry, only_read in zip(entries, were_only_read, strict=True) if not only_read]
        if begun:
            # By a look whose reply was lost. Begun again, each tells its epoch, without which it is not ours.
            outcomes = await self._broker.start(self._owner, begun, start)
            await self._broker.release([one for one in outcomes if isinstance(one, Delivery)])

    async def _take(self, start: Start, count: int, entries: Sequence[Entry] = ()) -> bool:
        """Begin entries that were read, and up to `count` others; whether there were any."""
        streams: list[Stream] = [*AGAIN, *self._lanes.turn()]
        if not entries and self._empty():
            streams.insert(0, "solo")
        taken = await self._broker.take(self._owner, start, streams=streams, count=count, entries=entries)
        self.polled_at = self._clock()
        self._alone = self._alone or taken.make_room
        deliveries = []
        for entry, outcome in taken.started:
            if isinstance(outcome, Delivery):
                deliveries.append(outcome)
                self._alone = self._alone or entry.stream == "solo"
            else:
                log.info("entry not started", rid=entry.rid[:34], entry=entry.eid, reason=outcome)
                self._skipped(outcome)
        if deliveries:
            await self._deliver(deliveries)
        return bool(taken.started)

    def _doubt(self) -> None:
        # A reply was lost: it may have claimed entries, and a read that the server still holds open may
        # claim more until its time is up.
        self._unsure = True
        self._unsure_until = self._clock() + 2 * self._block_ms / 1000


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
