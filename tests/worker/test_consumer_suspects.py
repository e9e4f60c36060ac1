"""The consumer over a queue made by hand: what came back, and what is suspected and runs alone."""

from __future__ import annotations

from eventually import eventually
from streamfleet_common.deliveries import Entry
from streamfleet_common.schemas import LANES
from streamfleet_worker.consumer import AUDIT_S
from stub_queue import Post, StubQueue, names


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
    await eventually(lambda: queue.is_waited_for, "a read that waits")
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


async def test_busy_it_gives_a_suspect_back_whose_reply_was_lost(queue: StubQueue, post: Post) -> None:
    queue.put("high", "a")
    post.begin()
    await eventually(lambda: post.delivered == ["a"], "company")
    queue.pending["suspect"] = Entry("suspect", "suspect-0", "solo", b"")
    queue.pending["ghost"] = Entry("ghost", "ghost-0", "normal", b"")
    post.now = AUDIT_S
    await eventually(lambda: "ghost" in post.delivered, "the other one")
    assert (post.delivered, queue.released) == (["a", "ghost"], ["suspect"])


async def test_beside_a_suspect_it_gives_everything_back(queue: StubQueue, post: Post) -> None:
    queue.put("solo", "suspect")
    post.begin()
    await eventually(lambda: post.delivered == ["suspect"], "the suspect")
    queue.pending["ghost"] = Entry("ghost", "ghost-0", "normal", b"")
    queue.pending["other"] = Entry("other", "other-0", "solo", b"")
    post.now = AUDIT_S
    await eventually(lambda: queue.released == ["ghost", "other"], "what was given without a word")
    assert post.delivered == ["suspect"]


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
