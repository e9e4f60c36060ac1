"""A queue made by hand, and a consumer of it with the worker around it played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import cast

from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry, NotStarted, Taken
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import AGAIN, LETTERS, Stream
from streamfleet_common.schemas import Start
from streamfleet_worker.consumer import ALL, Consumer

START = Start(worker="w1", model="m")
BLOCK_MS = 20
WAIT = (ALL, 1, BLOCK_MS)
"""The read that waits for work."""


class StubQueue:
    """Streams of entries; a read or a look takes from them as the server would."""

    def __init__(self) -> None:
        self.streams: dict[Stream, list[str]] = {stream: [] for stream in LETTERS}
        self.pending: dict[str, Entry] = {}
        self.reads: list[tuple[tuple[Stream, ...], int, int | None]] = []
        """Those that wait."""
        self.takes: list[tuple[tuple[Stream, ...], int, list[str]]] = []
        """Streams, how many new ones at most, and what was read before."""
        self.outcomes: dict[str, NotStarted] = {}
        self.looks = 0
        self.failures = 0
        self.lost_reads = 0
        self.lost_takes = 0
        self.released: list[str] = []
        self.wants_room = False
        """The answer to the next look is to make room."""
        self.down = False
        self.is_waited_for = False
        """A read waits for work."""
        self.arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        return sum(len(rids) for rids in self.streams.values())

    def put(self, stream: Stream, *rids: str) -> None:
        self.streams[stream] += rids
        self.arrived.set()

    async def read(
        self, owner: str, streams: Sequence[Stream], count: int, *, block_ms: int | None
    ) -> list[Entry]:
        self.reads.append((tuple(streams), count, block_ms))
        self._fail_if(self.down)
        if block_ms is not None and not any(self.streams[stream] for stream in streams):
            self.arrived.clear()
            self.is_waited_for = True
            try:
                async with asyncio.timeout(block_ms / 1000):
                    await self.arrived.wait()
            except TimeoutError:
                pass
            finally:
                self.is_waited_for = False
        # Of each stream so many, as Redis counts.
        entries = [entry for stream in streams for entry in self._give(stream, count)]
        if entries and self.lost_reads:
            self.lost_reads -= 1
            self._fail_if(True)
        return entries

    async def given(self, owner: str, *, known: Collection[str] = ()) -> list[Entry]:
        self._fail_if(self.down)
        self.looks += 1
        return [entry for entry in self.pending.values() if entry.place not in known]

    async def take(
        self,
        owner: str,
        start: Start,
        *,
        streams: Sequence[Stream],
        count: int,
        entries: Sequence[Entry] = (),
    ) -> Taken:
        self._fail_if(self.down)
        self.takes.append((tuple(streams), count, [entry.rid for entry in entries]))
        begun = list(entries)
        make_room, self.wants_room = self.wants_room and count > 0, False
        for stream in () if make_room else streams:
            most = 1 if stream == "solo" else count - len(begun) + len(entries)
            given = self._give(stream, min(most, count))
            begun += given
            if given and stream == "solo":
                break
        if begun and self.lost_takes:
            self.lost_takes -= 1
            self._fail_if(True)
        started = [
            (entry, self.outcomes.get(entry.rid) or Delivery(entry, owner, 1, 0, 0, 0, 1, 0))
            for entry in begun
        ]
        return Taken(started, make_room)

    async def release(self, held: Sequence[Entry]) -> list[bool]:
        self._fail_if(self.down)
        for entry in held:
            del self.pending[entry.rid]
            self.released.append(entry.rid)
            stays = entry.stream == "solo" or entry.stream in AGAIN
            again = entry.stream if stays else cast(Stream, f"{entry.stream}:again")
            self.streams[again].append(entry.rid)
        return [True] * len(held)

    def _give(self, stream: Stream, count: int) -> list[Entry]:
        rids, self.streams[stream] = self.streams[stream][:count], self.streams[stream][count:]
        entries = [Entry(rid, f"{rid}-0", stream, b"") for rid in rids]
        self.pending |= {entry.rid: entry for entry in entries}
        return entries

    def _fail_if(self, failing: bool) -> None:
        if failing:
            self.failures += 1
            raise BrokerUnavailable("gone")


class Post:
    """A consumer, the worker around it played by the test."""

    def __init__(self, queue: StubQueue, room: int = 8) -> None:
        self.room = room
        self.delivered: list[str] = []
        self.running: set[str] = set()
        self.batches: list[int] = []
        self.skipped: list[NotStarted] = []
        self.reconnects = 0
        self.now = 0.0
        self.consumer = Consumer(
            cast(Broker, queue),
            "w1",
            room=lambda: self.room,
            empty=lambda: not self.running,
            known=lambda: {entry.place for entry in queue.pending.values() if entry.rid in self.delivered},
            deliver=self._deliver,
            skipped=self.skipped.append,
            reconnected=self._reconnected,
            block_ms=BLOCK_MS,
            clock=lambda: self.now,
        )
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.task = asyncio.create_task(self.consumer.run(START))

    def end(self, *rids: str) -> None:
        """These have ended; their rows are free."""
        self.running -= set(rids)
        self.room += len(rids)
        self.consumer.wake()

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        rids = [delivery.entry.rid for delivery in deliveries]
        self.delivered += rids
        self.running |= set(rids)
        self.batches.append(len(deliveries))
        self.room -= len(deliveries)

    def _reconnected(self) -> None:
        self.reconnects += 1


def names(lane: str, count: int) -> list[str]:
    """As many requests of a lane."""
    return [f"{lane}{i}" for i in range(count)]
