"""Beginning what was read."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import START, begin, emission, finish, submission, take_all
from eventually import eventually
from server_view import (
    RID,
    Channel,
    T,
    assert_drained,
    everything,
    fields_of,
    log_of,
    now_ms,
)
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.schemas import End

PROTOCOLS = ("resp2", "resp3")


async def test_start_claims_and_announces(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, tenant="acme", stream=True, deadline_ms=60_000, result_ttl_ms=5000)
    await broker.submit([one])
    queued = fields_of(raw, RID)
    channel = Channel(raw, RID, "acme")
    (entry,) = await take_all(broker)
    before = now_ms(raw)
    (delivery,) = await broker.start("w1", [entry], START)
    after = now_ms(raw)

    accepted = int(queued[8])
    assert isinstance(delivery, Delivery)
    assert before <= delivery.now_ms <= after
    assert delivery == Delivery(
        entry=Entry(RID, queued[2][1:], "normal", one.payload),
        owner="w1",
        epoch=1,
        now_ms=delivery.now_ms,
        accepted_at_ms=accepted,
        deadline_at_ms=accepted + 60_000,
        attempts=1,
        crashes=0,
    )
    assert delivery.key == (RID, 1)
    assert fields_of(raw, RID) == [
        f"R{accepted + 60_000}", "1", queued[2], "w1", str(delivery.now_ms), "1", "0", "0", *queued[8:]
    ]  # fmt: skip
    now = delivery.now_ms
    frame = f"1-0,{accepted},{now},{now},1 ".encode() + codec.encode(START)
    assert log_of(raw, RID) == [("1-0", frame)]
    assert channel.messages() == [frame]
    # The log lives until the deadline and the result's time to live after it.
    assert (
        0 < accepted + 65_000 - raw.pexpiretime(f"{T}:ev:{RID}") + (now - accepted) <= 1000 + now - accepted
    )
    assert raw.xpending(f"{T}:s:normal", "w")["pending"] == raw.zcard(f"{T}:open") == 1


async def test_a_request_that_does_not_stream_has_no_log(broker: Broker, raw: Any) -> None:
    channel = Channel(raw, RID)
    (delivery,) = await begin(broker, submission(rid=RID))
    assert delivery.epoch == 1
    assert not raw.exists(f"{T}:ev:{RID}")
    assert channel.messages() == []


async def test_start_again_gives_the_same_epoch(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    entries = await take_all(broker)
    (first,) = await broker.start("w1", entries, START)
    before = everything(raw)
    (second,) = await broker.start("w1", entries, START)
    assert isinstance(first, Delivery)
    assert isinstance(second, Delivery)
    assert (second.epoch, second.attempts, second.fence) == (first.epoch, first.attempts, first.fence)
    assert everything(raw) == before


async def test_the_same_entry_twice_in_a_batch_is_started_once(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    (entry,) = await take_all(broker)
    first, second = await broker.start("w1", [entry, entry], START)
    assert first == second
    assert [id_ for id_, _ in log_of(raw, RID)] == ["1-0"]


async def test_another_owner_is_told_that_it_lost(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    before = everything(raw)
    assert await broker.start("w2", [delivery.entry], START) == ["lost"]
    assert everything(raw) == before


async def test_an_entry_of_an_ended_request_is_gone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    entries = await take_all(broker)
    await broker.cancel([RID], "default")
    assert await broker.start("w1", entries * 2, START) == ["gone", "gone"]
    assert_drained(raw)


async def test_a_superseded_entry_is_gone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    eid = raw.xadd(f"{T}:s:normal", {"r": RID, "p": b"x"}).decode()
    first, second = await take_all(broker)
    assert second.eid == eid
    started, gone = await broker.start("w1", [first, second], START)
    assert isinstance(started, Delivery)
    assert gone == "gone"
    assert [id_.decode() for id_, _ in raw.xrange(f"{T}:s:normal")] == [first.eid]
    assert raw.xpending(f"{T}:s:normal", "w")["pending"] == 1


async def test_a_late_start_expires(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, stream=True, deadline_ms=1, result_ttl_ms=5000)
    channel = Channel(raw, RID)
    await broker.submit([one])
    accepted = int(fields_of(raw, RID)[8])
    entries = await take_all(broker)
    await eventually(lambda: now_ms(raw) > accepted + 1)
    assert await broker.start("w1", entries * 2, START) == ["expired", "expired"]

    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert (record.state, record.epoch, record.attempts, record.started_at_ms) == ("expired", 1, 0, 0)
    assert record.end is not None
    event = record.end.event()
    assert isinstance(event, End)
    assert (event.state, event.finish_reason, event.attempt) == ("expired", "expired", 0)
    assert (event.queued_at_ms, event.started_at_ms) == (accepted, 0)
    assert event.ended_at_ms > accepted
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert [id_ for id_, _ in log_of(raw, RID)] == ["1-1"]
    assert len(channel.messages()) == 1
    assert_drained(raw)
    assert await broker.start("w1", entries, START) == ["gone"]


GARBAGE: list[dict[Any, Any]] = [
    {"x": "y"},
    {"r": RID},
    {"r": b"\xff\xfe", "p": b""},
    {"r": "", "p": b""},
    {"r": "a" * 10_000, "p": b"x"},
    {b"\x00": b"\xff"},
]


@pytest.mark.parametrize("lane", ["high", "normal", "bulk"])
async def test_garbage_in_a_lane_goes_to_the_dead_letter_once(broker: Broker, raw: Any, lane: str) -> None:
    ids = [raw.xadd(f"{T}:s:{lane}", fields) for fields in GARBAGE]
    entries = await take_all(broker)
    assert len(entries) == len(GARBAGE)
    assert [entry.rid for entry in entries[:2]] == ["", RID]
    assert await broker.start("w1", entries, START) == ["stray"] * len(GARBAGE)
    dead = [fields for _, fields in raw.xrange(f"{T}:dead")]
    assert [fields[b"entry"] for fields in dead] == ids
    assert {fields[b"stream"] for fields in dead} == {lane.encode()}
    assert {fields[b"why"] for fields in dead} == {b"no record of this request"}
    assert dead[1][b"rid"] == RID.encode()
    # Asked once more, after a lost reply.
    assert await broker.start("w1", entries, START) == ["stray"] * len(GARBAGE)
    assert raw.xlen(f"{T}:dead") == len(GARBAGE)
    assert (await broker.depth()).dead == len(GARBAGE)
    assert_drained(raw)
    assert await take_all(broker, "w2") == []


async def test_entries_of_one_id_in_two_lanes_are_two(broker: Broker, raw: Any) -> None:
    for lane in ("high", "bulk"):
        raw.xadd(f"{T}:s:{lane}", {"x": "y"}, id="5-5")
    assert await broker.start("w1", await take_all(broker), START) == ["stray", "stray"]
    assert raw.xlen(f"{T}:dead") == 2
    assert_drained(raw)


async def test_garbage_does_not_hold_up_the_rest_of_a_batch(broker: Broker, raw: Any) -> None:
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    batch = [submission(stream=True) for _ in range(3)]
    await broker.submit(batch)
    raw.set(f"{T}:r:{batch[1].envelope.rid}", b"garbage")
    raw.set(f"{T}:ev:{batch[2].envelope.rid}", b"no stream")
    stray, ours, gone, logless = await broker.start("w1", await take_all(broker), START)
    assert (stray, gone) == ("stray", "gone")
    assert isinstance(ours, Delivery)
    assert isinstance(logless, Delivery)
    assert await broker.emit([emission(ours, 1, b"x"), emission(logless, 1, b"x")]) == [True, True]
    assert await broker.finish([finish(logless), finish(ours)]) == [True, True]
