"""Streams that somebody trimmed, deleted or acknowledged by hand: every request still comes to an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker_parts import START, begin, begin_waiting, card, emission, finish, submission, take_all
from script_changes import change
from server_view import (
    OTHER,
    RID,
    Channel,
    T,
    assert_drained,
    consumers_of,
    now_ms,
    pending_in,
    record_of,
    waiting_in,
)
from silence import age, backdate, calm, lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Swept

FAR_MS = 60_000


def trim(raw: Any, stream: str = "normal") -> None:
    raw.xtrim(f"{T}:s:{stream}", maxlen=0, approximate=False)


async def test_a_trimmed_stream_ends_all_it_held(broker: Broker, raw: Any) -> None:
    """10 that run, of which 5 have lost their owner, and 10 that wait."""
    rids = [submission().envelope.rid for _ in range(20)]
    channels = [Channel(raw, rid) for rid in rids]
    await broker.submit([submission(rid=rid) for rid in rids])
    backdate(raw)
    await broker.announce(card("alive"), life_ms=FAR_MS)
    alive = await broker.read("alive", ["normal"], 5, block_ms=None)
    running = await broker.start("alive", alive, START)
    gone = await broker.start("gone", await broker.read("gone", ["normal"], 5, block_ms=None), START)
    assert len(running) == len(gone) == 5
    trim(raw)

    swept = await sweep(broker, raw)
    assert (swept.failed, swept.requeued) == (15, 0)
    assert await sweep(broker, raw) == Swept()
    for rid in rids[5:]:
        record = record_of(raw, rid)
        assert (record.state, record.crashes) == ("failed", 0)
        assert record.end is not None
        event: Any = record.end.event()
        assert "deleted or trimmed" in event.error.message
        assert event.error.error().retryable
    # Whoever lives has its requests in memory, and finishes them.
    assert [record_of(raw, rid).state for rid in rids[:5]] == ["running"] * 5
    assert await broker.finish([finish(one) for one in running if not isinstance(one, str)]) == [True] * 5
    assert [len(channel.messages()) for channel in channels] == [1] * 20
    age(raw)
    await sweep(broker, raw)
    assert_drained(raw)


async def test_a_young_entry_may_only_be_on_its_way(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    trim(raw)
    assert (await sweep(broker, raw)).failed == 0
    change(broker, "sweep", ("> 2000", ">= 0"))
    assert (await sweep(broker, raw)).failed == 1


async def test_not_in_times_of_grace(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    backdate(raw)
    trim(raw)
    assert await broker.sweep() == Swept(grace=True)
    assert record_of(raw).state == "queued"


async def test_a_card_that_ran_out_is_no_sign_of_life(broker: Broker, raw: Any) -> None:
    await broker.announce(card(), life_ms=FAR_MS)
    await broker.submit([submission(rid=RID)])
    backdate(raw)
    await begin_waiting(broker)
    trim(raw)
    assert (await sweep(broker, raw)).failed == 0
    value = raw.hget(f"{T}:workers", "w1").partition(b"|")[2]
    raw.hset(f"{T}:workers", "w1", f"{now_ms(raw) - 1}|".encode() + value)
    assert (await sweep(broker, raw)).failed == 1
    assert_drained(raw)


async def test_a_live_owner_that_never_ends_meets_the_deadline(broker: Broker, raw: Any) -> None:
    await broker.announce(card(), life_ms=FAR_MS)
    await begin(broker, submission(rid=RID))
    trim(raw)
    raw.zadd(f"{T}:open", {RID: now_ms(raw) - 1})
    assert (await sweep(broker, raw)).expired == 1
    age(raw)
    await sweep(broker, raw)
    assert_drained(raw)


async def test_a_trimmed_entry_in_the_hands_of_a_silent_owner(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    backdate(raw)
    await begin_waiting(broker)
    age(raw)
    trim(raw)
    swept = await sweep(broker, raw)
    assert (swept.failed, swept.requeued, swept.stray) == (1, 0, 0)
    assert (record_of(raw).state, record_of(raw).crashes) == ("failed", 0)
    assert_drained(raw)


async def test_a_deleted_stream(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    backdate(raw)
    await broker.start("w1", await broker.read("w1", ["normal"], 1, block_ms=None), START)
    raw.delete(f"{T}:s:normal")
    assert (await sweep(broker, raw)).failed == 2
    await broker.create_groups()
    assert_drained(raw)


async def test_one_acknowledged_by_hand_is_begun_again(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    backdate(raw)
    (old,) = await begin_waiting(broker)
    raw.xack(f"{T}:s:normal", "w", old.entry.eid)
    await broker.announce(card(), life_ms=FAR_MS)
    # Its owner lives, and has it in memory.
    assert await sweep(broker, raw) == Swept()
    await broker.announce(card(), life_ms=0)
    assert (await sweep(broker, raw)).requeued == 1
    # Nobody knows that its owner died of it.
    assert (record_of(raw).state, record_of(raw).crashes) == ("queued", 0)
    assert await broker.finish([finish(old)]) == [False]
    (new,) = await begin_waiting(broker, "w2")
    assert await broker.finish([finish(new)]) == [True]
    assert_drained(raw)


async def test_one_acknowledged_by_hand_that_may_not_be_begun_again(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True, on_restart="fail")])
    backdate(raw)
    (old,) = await begin_waiting(broker)
    await broker.emit([emission(old, 1, b"x")])
    raw.xack(f"{T}:s:normal", "w", old.entry.eid)
    swept = await sweep(broker, raw)
    assert (swept.failed, swept.requeued) == (1, 0)
    assert record_of(raw).state == "failed"


async def test_all_of_a_large_queue_is_audited(broker: Broker, raw: Any) -> None:
    await broker.submit([submission() for _ in range(350)])
    backdate(raw)
    trim(raw)
    failed = 0
    for _ in range(10):
        failed += (await sweep(broker, raw)).failed
    assert failed == 350
    assert_drained(raw)


async def test_a_group_made_anew_gives_all_out_again(broker: Broker, raw: Any) -> None:
    running, dying = await begin(broker, submission(rid=RID), submission(rid=OTHER))
    late = submission()
    await broker.submit([late])
    raw.xgroup_destroy(f"{T}:s:normal", "w")
    await broker.create_groups()
    # What runs is told to be somebody else's, what waits is not missed.
    taken = await broker.take("w2", START, streams=["normal"], count=9)
    outcomes = [outcome if isinstance(outcome, str) else outcome.entry.rid for _, outcome in taken.started]
    assert outcomes == ["lost", "lost", late.envelope.rid]
    assert (await broker.renew("w1", [running])).ours == [True]
    assert await broker.finish([finish(running)]) == [True]
    # One whose owner is gone ages in the hands of whoever was given it, and is found by that.
    swept = await lose(broker, raw, "w2")
    assert swept.requeued == 2
    assert (record_of(raw, OTHER).crashes, record_of(raw, late.envelope.rid).crashes) == (1, 1)
    assert await broker.finish([finish(dying)]) == [False]
    assert await broker.finish([finish(one) for one in await begin_waiting(broker, "w3")]) == [True] * 2
    assert_drained(raw)


# --- consumers


async def test_consumers_long_idle_are_forgotten(broker: Broker, raw: Any) -> None:
    (held,) = await begin(broker, submission(rid=RID), owner="busy")
    (done,) = await begin(broker, submission(), owner="idle")
    await broker.finish([finish(done)])
    await sweep(broker, raw)
    assert {"busy", "idle"} <= set(consumers_of(raw, "normal"))  # neither has been idle for long
    change(broker, "sweep", ("values.idle > 600000", "values.idle >= 0"))
    await sweep(broker, raw)
    assert {"busy", "idle"} <= set(consumers_of(raw, "normal"))  # and one looked a moment ago
    raw.hset(f"{T}:sweep", "cleaned", now_ms(raw) - 60_001)
    await sweep(broker, raw)
    assert consumers_of(raw, "normal") == ["busy"]
    assert [entry["eid"] for entry in pending_in(raw, "normal")] == [held.entry.eid]
    assert await broker.finish([finish(held)]) == [True]


@pytest.mark.parametrize("way", ["leaves", "is handed back"])
async def test_a_consumer_that_is_forgotten_takes_nothing_with_it(broker: Broker, raw: Any, way: str) -> None:
    """A worker leaves while the last entries are on their way to it; 1000 times."""
    rids: list[str] = []
    for _ in range(1000 // 4):
        batch = [submission() for _ in range(4)]
        rids += [one.envelope.rid for one in batch]
        await broker.submit(batch, max_queue_depth=1000)
        forget = (
            broker.announce(card(), life_ms=0) if way == "leaves" else broker.hand_back("w1", crashed=False)
        )
        await asyncio.gather(
            broker.read("w1", ["normal"], 1, block_ms=None),
            broker.take("w1", START, streams=["normal"], count=1),
            forget,
            broker.take("w1", START, streams=["normal"], count=1),
            broker.read("w1", ["normal"], 1, block_ms=None),
        )
    assert raw.xlen(f"{T}:s:normal") + raw.xlen(f"{T}:s:normal:again") == raw.zcard(f"{T}:open") == 1000
    await broker.hand_back("w1", crashed=False)
    left = await begin_waiting(broker, "w2")
    assert sorted(one.entry.rid for one in left) == sorted(rids)
    assert await broker.finish([finish(one) for one in left]) == [True] * 1000
    assert_drained(raw)
    assert await take_all(broker, "w3") == []
    calm(raw)
    assert waiting_in(raw, "normal") == []
