"""Reading and beginning in one step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker_parts import START, begin, finish, submission, take_all
from server_view import OTHER, RID, T, assert_drained, calls_of, events_of, pending_in, record_of
from silence import lose
from streamfleet_common.broker import Broker
from streamfleet_common.calls import BATCH
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Taken
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import LETTERS, Stream
from streamfleet_common.schemas import Lane

PROTOCOLS = ("resp2", "resp3")


def rids_of(taken: Taken) -> list[str]:
    return [entry.rid for entry, _ in taken.started]


async def test_what_is_taken_runs(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, tenant="acme", stream=True)
    await broker.submit([one])
    accepted = record_of(raw).accepted_at_ms
    taken = await broker.take("w1", START, streams=["normal"], count=5)
    ((entry, delivery),) = taken.started
    assert not taken.make_room
    assert (entry.rid, entry.stream, entry.payload) == (RID, "normal", one.payload)
    assert isinstance(delivery, Delivery)
    assert delivery.entry == entry
    assert (delivery.owner, delivery.epoch, delivery.attempts, delivery.crashes) == ("w1", 1, 1, 0)
    assert (delivery.accepted_at_ms, delivery.deadline_at_ms) == (accepted, accepted + 600_000)
    assert accepted <= delivery.now_ms < accepted + 600_000
    record = record_of(raw)
    assert (record.state, record.owner, record.started_at_ms) == ("running", "w1", delivery.now_ms)
    assert events_of(raw) == ["1-0"]
    assert [entry["owner"] for entry in pending_in(raw, "normal")] == ["w1"]
    assert await broker.finish([finish(delivery)]) == [True]
    assert_drained(raw)


@pytest.mark.parametrize(
    ("streams", "wanted"),
    [
        (["normal", "high", "bulk"], "nnhhb"),
        (["high", "normal", "bulk"], "hhnnb"),
        (["bulk", "high"], "bbhh"),
        (["normal:again", "bulk"], "bb"),
        ([], ""),
    ],
)
async def test_streams_are_emptied_in_the_order_asked(
    broker: Broker, raw: Any, streams: list[Stream], wanted: str
) -> None:
    lanes: list[Lane] = ["high", "normal", "bulk"]
    await broker.submit([submission(lane=lane) for lane in lanes * 2])
    taken = await broker.take("w1", START, streams=streams, count=5)
    assert "".join(LETTERS[entry.stream] for entry, _ in taken.started) == wanted
    # Of two of a lane, the earlier one first.
    by_lane: dict[str, list[int]] = {}
    for entry, delivery in taken.started:
        assert isinstance(delivery, Delivery)
        by_lane.setdefault(entry.stream, []).append(delivery.accepted_at_ms)
    assert all(times == sorted(times) for times in by_lane.values())


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
async def test_the_room_is_for_all_streams_together(broker: Broker, raw: Any, count: int) -> None:
    await broker.submit([submission(lane=lane) for lane in ("high", "normal", "bulk", "bulk")])
    taken = await broker.take("w1", START, streams=["high", "normal", "bulk"], count=count)
    assert len(taken.started) == min(count, 4)
    assert sum(len(pending_in(raw, stream)) for stream in LETTERS) == min(count, 4)


async def test_entries_that_were_read_come_first(broker: Broker) -> None:
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    read = await broker.read("w1", ["normal"], 1, block_ms=None)
    taken = await broker.take("w1", START, streams=["normal"], count=1, entries=read)
    assert rids_of(taken) == [RID, OTHER]
    assert taken.started[0][0] == read[0]
    assert all(isinstance(outcome, Delivery) for _, outcome in taken.started)


async def test_what_became_of_others_is_told(broker: Broker, raw: Any) -> None:
    (lost,) = await begin(broker, submission())
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    read = await take_all(broker, "w2")
    await broker.cancel([RID], "default")
    taken = await broker.take("w2", START, streams=["normal"], count=5, entries=[lost.entry, *read])
    outcomes = [outcome if isinstance(outcome, str) else outcome.entry.rid for _, outcome in taken.started]
    assert outcomes == ["lost", "stray", "gone", OTHER]


async def test_garbage_is_taken_and_told(broker: Broker, raw: Any) -> None:
    raw.xadd(f"{T}:s:normal", {"r": b"\xff", "p": b""})
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    await broker.submit([submission(rid=RID)])
    taken = await broker.take("w1", START, streams=["normal"], count=5)
    assert [outcome if isinstance(outcome, str) else "" for _, outcome in taken.started] == [
        "stray",
        "stray",
        "",
    ]
    assert raw.xlen(f"{T}:dead") == 2


async def test_what_was_taken_unheard_is_found_again(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True), submission(rid=OTHER)])
    first = await broker.take("w1", START, streams=["normal"], count=5)
    # Its reply is lost: whoever asks what it was given, and begins that, gets the same epochs.
    given = await broker.given("w1")
    again = await broker.take("w1", START, streams=["normal"], count=5, entries=given)
    assert [(entry, outcome.key) for entry, outcome in again.started if isinstance(outcome, Delivery)] == [
        (entry, outcome.key) for entry, outcome in first.started if isinstance(outcome, Delivery)
    ]
    assert len(again.started) == 2
    assert events_of(raw) == ["1-0"]
    assert record_of(raw).attempts == 1


@pytest.mark.parametrize("harm", ["flushed", "destroyed", "deleted"])
async def test_a_group_that_vanished_is_made_again_within_the_call(
    broker: Broker, raw: Any, harm: str
) -> None:
    if harm == "flushed":
        raw.flushall()
    await broker.submit([submission(rid=RID), submission(rid=OTHER, lane="high")])
    if harm == "destroyed":
        raw.xgroup_destroy(f"{T}:s:normal", "w")
    elif harm == "deleted":
        raw.delete(f"{T}:s:normal:again")
    taken = await broker.take("w1", START, streams=["high:again", "high", "normal:again", "normal"], count=5)
    assert rids_of(taken) == [OTHER, RID]


async def test_a_stream_of_another_kind_does_not_hold_up_the_others(broker: Broker, raw: Any) -> None:
    raw.delete(f"{T}:s:high")
    raw.set(f"{T}:s:high", "x")
    await broker.submit([submission(rid=RID)])
    assert rids_of(await broker.take("w1", START, streams=["high", "normal"], count=5)) == [RID]
    # Where there is nothing else, it is told.
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.take("w1", START, streams=["high", "normal"], count=5)
    assert caught.value.reason == "refused"


async def test_one_call_does_it_all(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(lane=lane) for lane in ("high", "normal", "bulk")])
    await broker.take("w1", START, streams=["high"], count=1)
    raw.config_resetstat()
    await broker.take("w1", START, streams=["high", "normal", "bulk"], count=3)
    assert calls_of(raw, "evalsha") == 1


async def test_more_room_than_one_call_can_fill(broker: Broker) -> None:
    # Begun in one call, so many would need more values than Lua can unpack.
    await broker.submit([submission() for _ in range(4096)], max_queue_depth=5000)
    taken = await broker.take("w1", START, streams=["normal"], count=4096)
    assert len(taken.started) == BATCH
    assert all(isinstance(one, Delivery) for _, one in taken.started)


async def test_many_takers_share_without_overlap(broker: Broker, connections: Connections, raw: Any) -> None:
    batch = [submission() for _ in range(60)]
    await broker.submit(batch)
    takers = [Broker(connections, "q") for _ in range(8)]
    taken = await asyncio.gather(
        *(
            one.take(f"w{number}", START, streams=["normal"], count=count)
            for number, one in enumerate(takers)
            for count in (1, 3, 6)
        )
    )
    rids = [rid for one in taken for rid in rids_of(one)]
    assert sorted(rids) == sorted(one.envelope.rid for one in batch)
    assert len(set(rids)) == len(rids) == 60


async def test_again_is_read_before_the_lane(broker: Broker, raw: Any) -> None:
    await begin(broker, submission(rid=RID))
    await broker.submit([submission(rid=OTHER)])
    await lose(broker, raw)
    taken = await broker.take("w2", START, streams=["normal:again", "normal"], count=1)
    assert rids_of(taken) == [RID]
