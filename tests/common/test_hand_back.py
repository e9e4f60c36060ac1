"""All that a dead worker held, given to others at once."""

from __future__ import annotations

from typing import Any

from broker_parts import START, begin, begin_waiting, card, emission, finish, submission, take_all
from server_view import (
    OTHER,
    RID,
    T,
    assert_drained,
    consumers_of,
    everything,
    pending_in,
    record_of,
    waiting_in,
)
from silence import lose_often
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import RIDS_TOLD, HandedBack
from streamfleet_common.housekeeping import AT_ONCE
from streamfleet_common.keys import LETTERS
from streamfleet_common.schemas import Retry, new_rid


async def test_a_crash_counts_against_what_ran(broker: Broker, raw: Any) -> None:
    (running,) = await begin(broker, submission(rid=RID))
    await broker.submit([submission(rid=OTHER)])
    await take_all(broker)
    # No lease has run out: nobody has to wait for that.
    assert (await broker.hand_back("w1", crashed=True)).requests == 2
    ran, read = record_of(raw, RID), record_of(raw, OTHER)
    assert (ran.state, ran.epoch, ran.attempts, ran.crashes, ran.solo_losses) == ("queued", 2, 1, 1, 0)
    assert (read.state, read.epoch, read.attempts, read.crashes, read.solo_losses) == ("queued", 1, 0, 0, 0)
    assert sorted(waiting_in(raw, "normal:again")) == [RID, OTHER]
    assert await broker.finish([finish(running)]) == [False]


async def test_it_tells_whose_requests_were_lost_and_which_were_buried(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 3)
    third = new_rid()
    await broker.submit([submission(rid=third), submission(rid=OTHER)])
    await begin_waiting(broker)
    back = await broker.hand_back("w1", crashed=True)
    assert (back.requests, back.buried) == (3, (RID,))
    assert set(back.rids) == {third, OTHER}


async def test_a_stop_on_purpose_counts_against_nothing(broker: Broker, raw: Any) -> None:
    await begin(broker, submission(rid=RID, retry=Retry(backoff_ms=60_000)))
    assert (await broker.hand_back("w1", crashed=False)).requests == 1
    record = record_of(raw)
    assert (record.state, record.epoch, record.attempts, record.crashes) == ("queued", 2, 1, 0)
    # Nor does it wait for its next try: nothing has failed.
    assert waiting_in(raw, "normal:again") == [RID]


async def test_others_keep_theirs(broker: Broker, raw: Any) -> None:
    (theirs,) = await begin(broker, submission(), owner="w2")
    (prefix,) = await begin(broker, submission(), owner="w11")
    before = everything(raw)
    assert (await broker.hand_back("w1", crashed=True)).requests == 0
    assert everything(raw) == before
    assert await broker.finish([finish(theirs), finish(prefix)]) == [True, True]


async def test_of_every_stream(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 2)
    for lane in ("high", "normal", "bulk"):
        await broker.submit([submission(lane=lane), submission(lane=lane)])
        entries = await broker.read("w0", [lane], 1, block_ms=None)
        await broker.release(entries)
    assert len(await begin_waiting(broker)) == 7
    assert sum(len(pending_in(raw, stream)) > 0 for stream in LETTERS) == 7
    assert (await broker.hand_back("w1", crashed=True)).requests == 7
    assert sum(len(pending_in(raw, stream)) for stream in LETTERS) == 0
    assert record_of(raw).solo_losses == 1
    assert len(await begin_waiting(broker, "w2")) == 7


async def test_the_worker_is_forgotten(broker: Broker, raw: Any) -> None:
    await broker.announce(card("w1"))
    await broker.announce(card("w2"))
    await begin(broker, submission(), owner="w2")
    await begin(broker, submission())
    await begin(broker, submission(lane="high"))
    raw.hset(f"{T}:control", "drain:w1", "1")
    await broker.hand_back("w1", crashed=True)
    assert await broker.cards() == [card("w2")]
    assert all("w1" not in consumers_of(raw, stream) for stream in LETTERS)
    assert "w2" in consumers_of(raw, "normal")
    assert not raw.hexists(f"{T}:control", "drain:w1")


async def test_more_than_one_call_can_take(broker: Broker, raw: Any) -> None:
    count = 2 * AT_ONCE + 1
    await begin(broker, *(submission() for _ in range(count // 2)))
    await begin(broker, *(submission(lane="bulk") for _ in range(count - count // 2)))
    back = await broker.hand_back("w1", crashed=True)
    assert (back.requests, len(back.rids), back.buried) == (count, RIDS_TOLD, ())
    assert await broker.hand_back("w1", crashed=True) == HandedBack()
    assert consumers_of(raw, "normal") == consumers_of(raw, "bulk") == []
    taken = await broker.take("w2", START, streams=["normal:again", "bulk:again"], count=count)
    assert len(taken.started) == count


async def test_garbage_and_ghosts_are_cleared(broker: Broker, raw: Any) -> None:
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    cancelled, trimmed = submission(rid=RID), submission(rid=OTHER, lane="bulk")
    await broker.submit([cancelled, trimmed])
    await take_all(broker)
    raw.xtrim(f"{T}:s:bulk", maxlen=0, approximate=False)
    await broker.cancel([RID, OTHER], "default")
    await broker.hand_back("w1", crashed=True)
    assert raw.xlen(f"{T}:dead") == 1
    assert_drained(raw)


async def test_a_text_that_was_begun_may_have_to_fail(broker: Broker, raw: Any) -> None:
    shown, hidden = await begin(
        broker,
        submission(rid=RID, stream=True, on_restart="fail"),
        submission(rid=OTHER, stream=True, on_restart="fail"),
    )
    await broker.emit([emission(shown, 1, b"x")])
    assert (await broker.hand_back("w1", crashed=True)).requests == 2
    assert record_of(raw, RID).state == "failed"
    assert record_of(raw, RID).crashes == 1
    assert record_of(raw, OTHER).state == "queued"
    assert await broker.finish([finish(shown), finish(hidden)]) == [False, False]
