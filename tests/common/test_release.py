"""Giving work back: in order, and with nothing counted against it."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import START, altered, begin, begin_waiting, emission, finish, submission, take_all
from server_view import (
    OTHER,
    RID,
    Channel,
    T,
    assert_drained,
    events_of,
    everything,
    fields_of,
    pending_in,
    record_of,
    waiting_in,
)
from silence import lose_often
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.schemas import Lane, Retry


@pytest.mark.parametrize("lane", ["high", "normal", "bulk"])
async def test_what_was_only_read_goes_back_untouched(broker: Broker, raw: Any, lane: Lane) -> None:
    one = submission(rid=RID, lane=lane)
    await broker.submit([one])
    before = fields_of(raw, RID)
    (entry,) = await take_all(broker)
    assert await broker.release([entry]) == [True]
    after = fields_of(raw, RID)
    assert after[2][0] == lane[0].upper()
    assert after == [before[0], "1", after[2], *before[3:]]
    assert waiting_in(raw, lane) == []
    assert waiting_in(raw, f"{lane}:again") == [RID]
    assert pending_in(raw, lane) == pending_in(raw, f"{lane}:again") == []
    (again,) = await take_all(broker, "w2")
    assert (again.rid, again.payload, again.stream) == (RID, one.payload, f"{lane}:again")


async def test_what_runs_goes_back_with_nothing_counted(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, stream=True)
    (old,) = await begin(broker, one)
    await broker.emit([emission(old, 1, b"x")])
    before = record_of(raw)
    assert await broker.release([old]) == [True]
    after = record_of(raw)
    assert (after.state, after.epoch, after.owner) == ("queued", 2, "")
    assert (after.attempts, after.crashes, after.solo_losses) == (1, 0, 0)
    assert (after.accepted_at_ms, after.deadline_at_ms) == (before.accepted_at_ms, before.deadline_at_ms)
    # Whoever gave it back has no say in it any more.
    assert await broker.emit([emission(old, 2, b"x")]) == [False]
    assert await broker.finish([finish(old)]) == [False]
    assert (await broker.renew("w1", [old])).ours == [False]
    (new,) = await begin_waiting(broker, "w2")
    assert (new.epoch, new.attempts, new.crashes, new.entry.payload) == (3, 2, 0, one.payload)
    assert await broker.finish([finish(new)]) == [True]
    assert events_of(raw) == ["1-0", "1-1", "3-0", "4-1"]
    assert_drained(raw)


async def test_it_goes_before_the_newcomers_in_its_old_order(broker: Broker) -> None:
    batch = [submission() for _ in range(6)]
    rids = [one.envelope.rid for one in batch]
    await broker.submit(batch[:4])
    entries = await take_all(broker)
    running = await broker.start("w1", entries[:2], START)
    await broker.submit(batch[4:])
    held = [one for one in running if isinstance(one, Delivery)] + entries[2:]
    assert await broker.release(held) == [True] * 4
    taken = await broker.take("w2", START, streams=["normal:again", "normal"], count=6)
    assert [entry.rid for entry, _ in taken.started] == rids


async def test_a_suspect_stays_one(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 2)
    (entry,) = await take_all(broker)
    assert entry.stream == "solo"
    assert await broker.release([entry]) == [True]
    (delivery,) = await begin_waiting(broker)
    assert delivery.entry.stream == "solo"
    assert await broker.release([delivery]) == [True]
    record = record_of(raw)
    assert (record.crashes, record.solo_losses, record.attempts) == (2, 0, 3)
    assert waiting_in(raw, "solo") == [RID]


async def test_one_that_is_begun_once_only_ends_as_failed(broker: Broker, raw: Any) -> None:
    channel = Channel(raw, RID)
    (delivery,) = await begin(broker, submission(rid=RID, retry=Retry(attempts=1)))
    assert await broker.release([delivery]) == [True]
    (message,) = channel.messages()
    record = record_of(raw)
    assert (record.state, record.epoch, record.attempts, record.crashes) == ("failed", 2, 1, 0)
    assert record.end is not None
    assert message.endswith(record.end.body)
    end: Any = record.end.event()
    assert end.error.error().retryable
    assert "stopped" in end.error.message
    assert_drained(raw)


async def test_only_read_it_was_not_begun(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(attempts=1))])
    for owner in ("w1", "w2", "w3"):
        assert await broker.release(await take_all(broker, owner)) == [True]
    (delivery,) = await begin_waiting(broker)
    assert (delivery.attempts, delivery.epoch) == (1, 4)


@pytest.mark.parametrize("is_shown", [True, False])
async def test_one_that_would_rather_fail_than_begin_anew(broker: Broker, raw: Any, is_shown: bool) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True, on_restart="fail"))
    if is_shown:
        await broker.emit([emission(delivery, 1, b"x")])
    assert await broker.release([delivery]) == [True]
    # Where nothing was shown, nothing begins anew.
    assert record_of(raw).state == ("failed" if is_shown else "queued")


async def test_what_is_not_ours_stays(broker: Broker, raw: Any) -> None:
    ours, ended, others = await begin(broker, submission(rid=RID), submission(), submission(rid=OTHER))
    await broker.finish([finish(ended)])
    before = everything(raw)
    strangers: list[Delivery | Entry] = [
        altered(ours, owner="w2"),
        altered(ours, epoch=2),
        altered(ours, eid="1-1"),
        altered(others, owner=""),
        ended,
        ended.entry,
        Entry("00" + "ee" * 16, "1-1", "normal", b""),
        Entry("", "1-1", "normal", b""),
    ]
    assert await broker.release(strangers) == [False] * len(strangers)
    assert everything(raw) == before


async def test_a_running_request_is_given_back_by_its_owner_only(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    before = everything(raw)
    # Whoever has but the entry does not know the epoch, so it cannot speak for the owner.
    assert await broker.release([delivery.entry]) == [False]
    assert everything(raw) == before


async def test_twice_is_once(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    assert await broker.release([delivery, delivery]) == [True, False]
    assert await broker.release([delivery]) == [False]
    await broker.submit([submission(rid=OTHER)])
    entries = await broker.read("w1", ["normal"], 1, block_ms=None)
    assert await broker.release(entries * 2) == [True, False]
    assert waiting_in(raw, "normal:again") == [RID, OTHER]
    assert raw.xlen(f"{T}:s:normal") == 0


async def test_a_stranger_in_the_batch_changes_nothing(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    held: list[Delivery | Entry] = [delivery.entry, altered(delivery, epoch=2), delivery]
    assert await broker.release(held) == [False, False, True]
    assert waiting_in(raw, "normal:again") == [RID]


async def test_what_was_trimmed_cannot_go_back(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=OTHER)])
    (entry,) = await take_all(broker)
    (delivery,) = await begin(broker, submission(rid=RID))
    raw.xtrim(f"{T}:s:normal", maxlen=0, approximate=False)
    assert await broker.release([delivery, entry]) == [False, False]
    # It is its owner's still.
    assert await broker.finish([finish(delivery)]) == [True]
