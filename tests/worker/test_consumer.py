"""The consumer over a queue made by hand: what it reads, in which order, and what it does when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest

from eventually import eventually
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry, NotStarted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, Lane, Start
from streamfleet_worker import consumer as consumer_module
from streamfleet_worker.consumer import Consumer

START = Start(worker="w1", model="m")
BLOCK_MS = 20


class StubQueue:
    """Lanes of entries; a read takes from them as the server would."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, list[str]] = {lane: [] for lane in LANES}
        self.pending: dict[str, Entry] = {}
        self.reads: list[tuple[tuple[Lane, ...], int, int | None]] = []
        self.outcomes: dict[str, NotStarted] = {}
        self.starts: list[list[str]] = []
        self.looks = 0
        self.failures = 0
        self.lost_reads = 0
        self.lost_starts = 0
        self.down = False
        self.arrived = asyncio.Event()

    def put(self, lane: Lane, *rids: str) -> None:
        self.lanes[lane] += rids
        self.arrived.set()

    async def read(
        self, owner: str, lanes: Sequence[Lane], count: int, *, block_ms: int | None
    ) -> list[Entry]:
        self.reads.append((tuple(lanes), count, block_ms))
        self._fail_if(self.down)
        if block_ms is not None and not any(self.lanes[lane] for lane in lanes):
            self.arrived.clear()
            try:
                async with asyncio.timeout(block_ms / 1000):
                    await self.arrived.wait()
            except TimeoutError:
                return []
        taken = []
        for lane in lanes:
            rids, self.lanes[lane] = self.lanes[lane][:count], self.lanes[lane][count:]
            taken += [Entry(rid, f"{rid}-0", lane, b"") for rid in rids]
        self.pending |= {entry.rid: entry for entry in taken}
        if taken and self.lost_reads:
            self.lost_reads -= 1
            self._fail_if(True)
        return taken

    async def given(self, owner: str) -> list[Entry]:
        self._fail_if(self.down)
        self.looks += 1
        return list(self.pending.values())

    async def start(self, owner: str, entries: Sequence[Entry], start: Start) -> list[Delivery | NotStarted]:
        if self.lost_starts:
            self.lost_starts -= 1
            self._fail_if(True)
        self.starts.append([entry.rid for entry in entries])
        return [self.outcomes.get(entry.rid) or Delivery(entry, owner, 1, 0, 0, 0, 1, 0) for entry in entries]

    def _fail_if(self, failing: bool) -> None:
        if failing:
            self.failures += 1
            raise BrokerUnavailable("gone")


class Post:
    """A consumer, the worker around it played by the test."""

    def __init__(self, queue: StubQueue, room: int = 8) -> None:
        self.room = room
        self.delivered: list[str] = []
        self.batches: list[int] = []
        self.skipped: list[NotStarted] = []
        self.reconnects = 0
        self.now = 0.0
        self.consumer = Consumer(
            cast(Broker, queue),
            "w1",
            room=lambda: self.room,
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

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        self.delivered += [delivery.entry.rid for delivery in deliveries]
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
    reads = len(queue.reads)
    post.now = 7.0
    await eventually(lambda: post.consumer.polled_at == 7.0, "a look that finds no room")
    assert len(queue.reads) == reads
    assert sum(len(rids) for rids in queue.lanes.values()) == 25
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


async def test_with_less_room_than_lanes_it_looks_before_it_waits(queue: StubQueue, post: Post) -> None:
    post.room = 1
    post.begin()
    await eventually(lambda: len(queue.reads) >= 9, "some polls")
    for at, (lanes, count, block_ms) in enumerate(queue.reads[:8]):
        assert count == 1
        # Each lane alone and without waiting, then all together.
        assert (len(lanes), block_ms) == ((3, BLOCK_MS) if at % 4 == 3 else (1, None))


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
    await eventually(lambda: len(queue.reads) >= 9, "some polls")
    # One look into each lane at first, one wait for all of them ever after.
    assert [block for _, _, block in queue.reads[:3]] == [None] * 3
    assert set(queue.reads[3:]) == {(LANES, 2, BLOCK_MS)}


async def test_a_burst_is_shared_with_the_other_workers(queue: StubQueue, post: Post) -> None:
    post.consumer.share_with(2)
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [(LANES, 2, BLOCK_MS)], "idleness")
    queue.put("normal", *names("n", 8))
    await eventually(lambda: len(post.delivered) == 8, "all, since the other worker does not come")
    assert post.batches == [2, 2, 4]


async def test_alone_it_takes_a_burst_at_once(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [(LANES, 2, BLOCK_MS)], "idleness")
    queue.put("normal", *names("n", 8))
    await eventually(lambda: len(post.delivered) == 8, "all")
    assert post.batches == [2, 6]


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
    queue.put("normal", "a", "b")
    post.begin()
    await eventually(lambda: post.delivered == ["a", "b"], "what was lost")
    assert post.reconnects == 1


async def test_a_start_whose_reply_was_lost_is_made_good(queue: StubQueue, post: Post) -> None:
    queue.lost_starts = 2
    queue.put("normal", "a", "b")
    post.begin()
    await eventually(lambda: post.delivered == ["a", "b"], "what was lost")


async def test_what_it_holds_is_not_begun_again(queue: StubQueue, post: Post) -> None:
    queue.put("normal", "a")
    post.begin()
    await eventually(lambda: post.delivered == ["a"], "the first")
    queue.lost_reads = 1
    queue.put("normal", "b")
    await eventually(lambda: post.delivered == ["a", "b"], "the second")
    assert queue.starts == [["a"], ["b"]]


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
    await eventually(lambda: len(queue.reads) >= reads + 4, "more polls")
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
    await eventually(lambda: len(queue.reads) >= 4, "a poll")
    queue.down = True
    await eventually(lambda: queue.failures >= 2, "failures")
    post.now = 50.0
    failures = queue.failures
    await eventually(lambda: queue.failures > failures, "another failure")
    assert post.consumer.polled_at == 0.0
    queue.down = False
    await eventually(lambda: post.consumer.polled_at == 50.0, "a poll")
    assert post.reconnects == 1


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


async def test_stopped_in_a_read_it_deals_with_what_comes_and_reads_no_more(
    queue: StubQueue, post: Post
) -> None:
    post.begin()
    await eventually(lambda: queue.reads[-1:] == [(LANES, 2, BLOCK_MS)], "a read that waits")
    post.consumer.stop()
    queue.put("normal", "a")
    queue.put("bulk", "b")
    assert post.task is not None
    await post.task
    reads = len(queue.reads)
    assert len(post.delivered) == 2
    assert len(queue.reads) == reads
