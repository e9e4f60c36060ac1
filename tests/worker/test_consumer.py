"""The consumer over a queue made by hand: what it reads, in which order, and what it does when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest

from eventually import eventually
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry, NotStarted, Taken
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import AGAIN, LETTERS, Stream
from streamfleet_common.schemas import LANES, Start
from streamfleet_worker import consumer as consumer_module
from streamfleet_worker.consumer import ALL, AUDIT_S, Consumer

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
            try:
                async with asyncio.timeout(block_ms / 1000):
                    await self.arrived.wait()
            except TimeoutError:
                return []
        # Of each stream so many, as Redis counts.
        entries = [entry for stream in streams for entry in self._give(stream, count)]
        if entries and self.lost_reads:
            self.lost_reads -= 1
            self._fail_if(True)
        return entries

    async def given(self, owner: str) -> list[Entry]:
        self._fail_if(self.down)
        self.looks += 1
        return list(self.pending.values())

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
            again = entry.stream if entry.stream in AGAIN else cast(Stream, f"{entry.stream}:again")
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
            holds=lambda entry: entry.rid in self.delivered,
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


@pytest.fixture
def queue() -> StubQueue:
    return StubQueue()


@pytest.fixture
async def post(queue: StubQueue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Post]:
    monkeypatch.setattr(consumer_module, "MAX_BACKOFF_S", 0.01)
    made = Post(queue)
    yield made
    made.consumer.stop()
    if made.task is not None:
        await made.task


def names(lane: str, count: int) -> list[str]:
    return [f"{lane}{i}" for i in range(count)]


async def test_never_more_than_there_is_room_for(queue: StubQueue, post: Post) -> None:
    post.room = 5
    for lane in LANES:
        queue.put(lane, *names(lane, 10))
    post.begin()
    await eventually(lambda: len(post.delivered) == 5, "a full batch")
    calls = len(queue.reads), len(queue.takes)
    post.now = 7.0
    await eventually(lambda: post.consumer.polled_at == 7.0, "a look that finds no room")
    assert (len(queue.reads), len(queue.takes)) == calls
    assert queue.waiting == 25
    post.room = 2
    post.consumer.wake()
    await eventually(lambda: len(post.delivered) == 7, "the room filled")
    assert post.room == 0


async def test_what_one_lane_gives_is_taken_off_the_room_for_the_next(queue: StubQueue, post: Post) -> None:
    post.room = 5
    for lane in LANES:
        queue.put(lane, *names(lane, 3))
    post.begin()
    await eventually(lambda: post.room <= 0, "a full batch")
    assert post.batches == [5]
    assert post.room == 0


@pytest.mark.parametrize("room", [1, 3, 5])
async def test_what_comes_to_all_streams_at_one_instant_does_not_exceed_the_room(
    queue: StubQueue, post: Post, room: int
) -> None:
    post.room = room
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    for stream in ALL:
        queue.put(stream, stream)
    await eventually(lambda: post.room <= 0, "a full batch")
    assert post.room == 0
    assert post.delivered == list(ALL[:room])
    # The others may have it at once, though this worker had been given it.
    assert queue.released == list(ALL[room:])
    post.end(*post.delivered)
    await eventually(lambda: len(post.delivered) == min(6, 2 * room), "the rest, or some of it")


async def test_lanes_are_read_by_weight_and_in_order_of_acceptance(queue: StubQueue, post: Post) -> None:
    for lane in LANES:
        queue.put(lane, *names(lane, 30))
    post.room = 1
    post.begin()
    for turn in range(1, 14):
        await eventually(lambda: len(post.delivered) == turn, "one more")  # noqa: B023
        post.room = 1
        post.consumer.wake()
    first = post.delivered[:13]
    assert sorted(rid for rid in first if rid.startswith("high")) == sorted(names("high", 8))
    assert [rid for rid in first if rid.startswith("normal")] == names("normal", 4)
    assert [rid for rid in first if rid.startswith("bulk")] == names("bulk", 1)
    post.room = 0


async def test_idle_it_asks_once_a_block(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: len(queue.reads) >= 6, "some polls")
    # One look and one wait, for all streams each.
    assert set(queue.reads) == {WAIT}
    assert {(frozenset(streams), count) for streams, count, _ in queue.takes} == {(frozenset(LETTERS), 8)}
    assert abs(len(queue.takes) - len(queue.reads)) <= 1


async def test_a_burst_is_shared_with_the_other_workers(queue: StubQueue, post: Post) -> None:
    post.consumer.share_with(2)
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    queue.put("normal", *names("n", 8))
    await eventually(lambda: len(post.delivered) == 8, "all, since the other worker does not come")
    assert post.batches == [4, 4]


async def test_alone_it_takes_a_burst_at_once(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    queue.put("normal", *names("n", 8))
    await eventually(lambda: len(post.delivered) == 8, "all")
    assert post.batches == [8]


async def test_under_load_no_share_is_kept_for_others(queue: StubQueue, post: Post) -> None:
    post.consumer.share_with(4)
    post.room = 0
    queue.put("normal", *names("n", 20))
    post.begin()
    await eventually(lambda: post.task is not None, "the start")
    post.room = 8
    post.consumer.wake()
    await eventually(lambda: len(post.delivered) == 8, "a full batch")
    assert post.batches == [8]


async def test_a_read_whose_reply_was_lost_is_made_good(queue: StubQueue, post: Post) -> None:
    queue.lost_reads = 1
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    queue.put("normal", "a", "b")
    await eventually(lambda: post.delivered == ["a", "b"], "what was lost")
    await eventually(lambda: post.reconnects == 1, "the news of it")


async def test_a_look_whose_reply_was_lost_is_made_good(queue: StubQueue, post: Post) -> None:
    queue.lost_takes = 2
    queue.put("normal", "a", "b")
    post.begin()
    await eventually(lambda: post.delivered == ["a", "b"], "what was lost")


async def test_work_whose_reply_was_lost_without_a_word_is_found_in_time(
    queue: StubQueue, post: Post
) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    # A call that was repeated behind our back: the second one had nothing new to tell.
    queue.pending["ghost"] = Entry("ghost", "ghost-0", "normal", b"")
    post.now = AUDIT_S - 0.1
    await eventually(lambda: post.consumer.polled_at == post.now, "a look")
    assert queue.looks == 0
    post.now = AUDIT_S
    await eventually(lambda: post.delivered == ["ghost"], "the ghost's work")
    await eventually(lambda: len(queue.reads) >= 5, "more polls")
    assert queue.looks == 1


async def test_what_it_holds_is_not_begun_again(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    queue.put("normal", "a")
    await eventually(lambda: post.delivered == ["a"], "the first")
    await eventually(lambda: queue.reads[-1:] == [WAIT], "idleness")
    queue.lost_reads = 1
    queue.put("normal", "b")
    await eventually(lambda: post.delivered == ["a", "b"], "the second")
    assert queue.pending.keys() == {"a", "b"}, "both are given, and one of them is not wanted again"
    assert [read for _, _, read in queue.takes if read] == [["a"], ["b"]]


async def test_the_doubt_lasts_as_long_as_the_server_may_hold_a_read(queue: StubQueue, post: Post) -> None:
    queue.down = True
    post.begin()
    await eventually(lambda: queue.failures >= 2, "failures")
    queue.down = False
    await eventually(lambda: queue.looks >= 3, "looks")
    # What a read of ours, held open by the server, is given in the meantime:
    queue.pending["ghost"] = Entry("ghost", "ghost-0", "normal", b"")
    await eventually(lambda: post.delivered == ["ghost"], "the ghost's work")
    post.now += 2 * BLOCK_MS / 1000
    looks = queue.looks
    reads = len(queue.reads)
    await eventually(lambda: len(queue.reads) >= reads + 2, "more polls")
    assert queue.looks <= looks + 2, "one last look, and no more"


async def test_what_cannot_be_started_is_told_and_left(queue: StubQueue, post: Post) -> None:
    queue.outcomes = {"a": "stray", "b": "expired", "d": "gone", "e": "lost"}
    queue.put("normal", "a", "b", "c", "d", "e")
    post.begin()
    await eventually(lambda: len(post.skipped) == 4, "all told")
    assert post.skipped == ["stray", "expired", "gone", "lost"]
    assert post.delivered == ["c"]
    assert post.room == 7


async def test_polled_at_stands_still_while_redis_is_away(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: len(queue.reads) >= 2, "a poll")
    queue.down = True
    await eventually(lambda: queue.failures >= 2, "failures")
    post.now = 50.0
    failures = queue.failures
    await eventually(lambda: queue.failures > failures, "another failure")
    assert post.consumer.polled_at == 0.0
    queue.down = False
    await eventually(lambda: post.consumer.polled_at == 50.0, "a poll")
    await eventually(lambda: post.reconnects == 1, "the news of it")


async def test_stop_ends_a_pause_between_failures(
    queue: StubQueue, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "MAX_BACKOFF_S", 1e6)
    monkeypatch.setattr("random.uniform", lambda _low, _high: 1e6)
    queue.down = True
    post.begin()
    await eventually(lambda: queue.failures == 1, "a failure")
    post.consumer.stop()
    assert post.task is not None
    async with asyncio.timeout(5):
        await post.task


async def test_stopped_in_a_read_it_gives_back_what_comes_and_reads_no_more(
    queue: StubQueue, post: Post
) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [WAIT], "a read that waits")
    takes = len(queue.takes)
    post.consumer.stop()
    queue.put("normal", "a", "b")
    queue.put("bulk", "c")
    assert post.task is not None
    await post.task
    assert (post.delivered, queue.released) == ([], ["a", "c"])
    assert (queue.reads, len(queue.takes)) == ([WAIT], takes)


# --- what came back, and what is suspected


async def test_what_came_back_goes_before_newcomers(queue: StubQueue, post: Post) -> None:
    queue.put("high", "new")
    queue.put("bulk:again", "old")
    queue.put("normal:again", "older")
    post.room = 2
    post.begin()
    await eventually(lambda: len(post.delivered) == 2, "a full batch")
    assert post.delivered == ["older", "old"]


async def test_idle_it_takes_a_suspect_before_anything_else_and_nothing_beside_it(
    queue: StubQueue, post: Post
) -> None:
    queue.put("solo", "suspect", "other")
    queue.put("high", *names("high", 3))
    post.begin()
    await eventually(lambda: post.delivered == ["suspect"], "the suspect")
    for now in (3.0, 4.0):
        post.now = now
        post.consumer.wake()
        await eventually(lambda: post.consumer.polled_at == now, "a look that finds no room")  # noqa: B023
    assert (post.delivered, post.room) == (["suspect"], 7)
    post.end("suspect")
    await eventually(lambda: post.delivered == ["suspect", "other"], "the next suspect")
    post.end("other")
    await eventually(lambda: len(post.delivered) == 5, "all the rest, in company again")


async def test_busy_it_takes_no_suspect(queue: StubQueue, post: Post) -> None:
    queue.put("high", "a")
    post.begin()
    await eventually(lambda: post.delivered == ["a"], "the first")
    queue.put("solo", "suspect")
    takes = len(queue.takes)
    await eventually(lambda: len(queue.takes) >= takes + 2, "more looks")
    assert post.delivered == ["a"]
    assert all("solo" not in streams for streams, _, _ in queue.takes[1:])
    assert all("solo" not in streams for streams, _, _ in queue.reads), "it would have to come alone"


async def test_asked_to_make_room_it_takes_nothing_more_until_it_runs_nothing(
    queue: StubQueue, post: Post
) -> None:
    queue.put("high", "a", "b")
    post.begin()
    await eventually(lambda: len(post.delivered) == 2, "company")
    await eventually(lambda: queue.reads[-1:] == [WAIT], "a read that waits")
    queue.wants_room = True
    queue.put("solo", "suspect")
    queue.put("high", "c")
    # The read that waits had been given it before the question came.
    await eventually(lambda: "c" in post.delivered, "what had been read")
    await eventually(lambda: post.consumer._alone, "the answer")
    queue.put("high", "d")
    takes = len(queue.takes)
    post.end("a", "b")
    post.now = 5.0
    await eventually(lambda: post.consumer.polled_at == 5.0, "a look that finds no room")
    assert len(queue.takes) == takes
    post.end("c")
    await eventually(lambda: post.delivered[3:] == ["suspect"], "the suspect, alone")
    post.end("suspect")
    await eventually(lambda: post.delivered[4:] == ["d"], "all others")


async def test_room_made_for_nobody_is_given_up(queue: StubQueue, post: Post) -> None:
    queue.put("high", "a")
    post.begin()
    await eventually(lambda: post.delivered == ["a"], "company")
    queue.wants_room = True
    await eventually(lambda: post.consumer._alone, "the answer")
    queue.put("high", "b")
    post.end("a")
    # Another worker has taken the suspect meanwhile.
    await eventually(lambda: post.delivered == ["a", "b"], "ordinary work")


async def test_a_suspect_whose_reply_was_lost_still_runs_alone(queue: StubQueue, post: Post) -> None:
    queue.lost_takes = 1
    queue.put("solo", "suspect")
    # Given to a read of ours that the server held open meanwhile.
    queue.pending["ghost"] = Entry("ghost", "ghost-0", "normal", b"")
    post.begin()
    await eventually(lambda: bool(post.delivered), "what was lost")
    assert post.delivered == ["suspect"]
    post.end("suspect")
    await eventually(lambda: post.delivered == ["suspect", "ghost"], "the rest")


async def test_waits_are_handed_to_the_rotation(queue: StubQueue, post: Post) -> None:
    post.consumer.waited((0, 0, 60_000))
    for lane in LANES:
        queue.put(lane, *names(lane, 20))
    post.room = 1
    post.begin()
    for turn in range(1, 9):
        await eventually(lambda: len(post.delivered) == turn, "one more")  # noqa: B023
        post.room = 1
        post.consumer.wake()
    assert sum(rid.startswith("bulk") for rid in post.delivered[:8]) == 4, "every second turn"
    post.room = 0
