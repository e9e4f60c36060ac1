"""The consumer over a queue made by hand: what it reads, in which order, and what it does when it fails."""

from __future__ import annotations

import asyncio

import pytest

from eventually import eventually
from streamfleet_common.deliveries import Entry
from streamfleet_common.keys import LETTERS
from streamfleet_common.schemas import LANES
from streamfleet_worker import consumer as consumer_module
from streamfleet_worker.consumer import ALL, AUDIT_S
from stub_queue import BLOCK_MS, WAIT, Post, StubQueue, names


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
    await eventually(lambda: queue.is_waited_for, "idleness")
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
    await eventually(lambda: queue.is_waited_for, "idleness")
    queue.put("normal", *names("n", 8))
    await eventually(lambda: len(post.delivered) == 8, "all, since the other worker does not come")
    assert post.batches == [4, 4]


async def test_alone_it_takes_a_burst_at_once(queue: StubQueue, post: Post) -> None:
    post.begin()
    await eventually(lambda: queue.is_waited_for, "idleness")
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
    await eventually(lambda: queue.is_waited_for, "idleness")
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
    await eventually(lambda: queue.is_waited_for, "idleness")
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
    await eventually(lambda: queue.is_waited_for, "idleness")
    queue.put("normal", "a")
    await eventually(lambda: post.delivered == ["a"], "the first")
    await eventually(lambda: queue.is_waited_for, "idleness")
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
    async with asyncio.timeout(60):
        await post.task


async def test_stopped_in_a_read_it_gives_back_what_comes_and_reads_no_more(
    queue: StubQueue, post: Post
) -> None:
    post.begin()
    await eventually(lambda: queue.is_waited_for, "a read that waits")
    calls = len(queue.reads), len(queue.takes)
    post.consumer.stop()
    queue.put("normal", "a", "b")
    queue.put("bulk", "c")
    assert post.task is not None
    await post.task
    assert (post.delivered, queue.released) == ([], ["a", "c"])
    assert (len(queue.reads), len(queue.takes)) == calls
