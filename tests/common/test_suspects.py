"""Requests that workers died of: alone from the second loss on, dead after two losses while alone."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import START, begin, begin_waiting, card, finish, submission, take_all
from server_view import OTHER, RID, Channel, T, assert_drained, dead_of, now_ms, record_of, waiting_in
from silence import age, lose, lose_often, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.keys import Stream
from streamfleet_common.schemas import Lane

ALL: tuple[Stream, ...] = ("high:again", "high", "normal:again", "normal", "bulk:again", "bulk")


async def test_the_way_of_a_poison(broker: Broker, raw: Any) -> None:
    channel = Channel(raw, RID)
    await broker.submit([submission(rid=RID)])
    way = []
    for number in range(1, 5):
        (delivery,) = await begin_waiting(broker, f"w{number}")
        way.append((delivery.entry.stream, delivery.attempts, delivery.crashes))
        swept = await lose(broker, raw, f"w{number}")
        assert (swept.requeued, swept.dead) == ((1, 0) if number < 4 else (0, 1))
        assert (swept.rids, swept.buried) == (((RID,), ()) if number < 4 else ((), (RID,)))
    assert way == [("normal", 1, 0), ("normal:again", 2, 1), ("solo", 3, 2), ("solo", 4, 3)]
    record = record_of(raw)
    assert (record.state, record.attempts, record.crashes, record.solo_losses) == ("dead", 4, 4, 2)
    # 4 starts, 3 times put back, one end.
    assert record.epoch == 8
    (message,) = channel.messages()
    assert record.end is not None
    assert message.endswith(record.end.body)
    end: Any = record.end.event()
    assert (end.state, end.error.error().retryable) == ("dead", False)
    assert_drained(raw)
    assert await begin_waiting(broker, "w5") == []


@pytest.mark.parametrize(("lane", "tenant"), [("high", "default"), ("normal", "acme"), ("bulk", "acme")])
async def test_what_a_dead_letter_says(broker: Broker, raw: Any, lane: Lane, tenant: str) -> None:
    one = submission("Boom", rid=RID, lane=lane, tenant=tenant)
    await broker.submit([one])
    accepted = record_of(raw).accepted_at_ms
    await lose_often(broker, raw, 4)
    assert dead_of(raw) == [
        {
            "rid": RID.encode(),
            "why": b"its workers died while they ran nothing else",
            "tenant": tenant.encode(),
            "lane": lane.encode(),
            "accepted": str(accepted).encode(),
            "attempts": b"4",
            "crashes": b"4",
            "solo": b"2",
            "worker": b"lost3",
            "digest": one.digest.encode(),
            "bytes": str(len(one.payload)).encode(),
        }
    ]
    assert (await broker.depth()).dead == 1


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_dead_letter_has_the_payload_if_the_fleet_says_so(
    broker: Broker, raw: Any, is_kept: bool
) -> None:
    await broker.announce(card(), keep_payload=is_kept)
    one = submission("Boom", rid=RID)
    await broker.submit([one])
    await begin_waiting(broker)
    for owner in ("w1", "w2", "w3", "w4"):
        await broker.hand_back(owner, crashed=True)
        await begin_waiting(broker, f"w{int(owner[1:]) + 1}")
    assert record_of(raw).state == "dead"
    (letter,) = dead_of(raw)
    assert letter.get("payload") == (one.payload if is_kept else None)


async def test_losses_in_company_convict_nobody(broker: Broker, raw: Any) -> None:
    """Two losses make a suspect. Whoever was there by chance runs alone, and ends."""
    batch = [submission() for _ in range(8)]
    await broker.submit(batch)
    await lose_often(broker, raw, 2)
    assert raw.xlen(f"{T}:s:solo") == 8
    for _ in range(8):
        taken = await broker.take("w1", START, streams=["solo"], count=8)
        ((_, delivery),) = taken.started
        assert not isinstance(delivery, str)
        assert delivery.crashes == 2
        assert await broker.finish([finish(delivery)]) == [True]
    records = await broker.status([one.envelope.rid for one in batch], "default")
    assert [(one.state, one.crashes, one.solo_losses) for one in records if one] == [("done", 2, 0)] * 8
    assert raw.xlen(f"{T}:dead") == 0
    assert_drained(raw)


async def test_one_loss_alone_is_not_enough(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 3)
    (delivery,) = await begin_waiting(broker)
    assert await broker.finish([finish(delivery)]) == [True]
    assert (record_of(raw).state, record_of(raw).solo_losses) == ("done", 1)


async def test_stops_on_purpose_make_no_suspect(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    for number in range(5):
        await begin_waiting(broker, f"w{number}")
        await broker.hand_back(f"w{number}", crashed=False)
    assert (record_of(raw).attempts, record_of(raw).crashes) == (5, 0)
    assert waiting_in(raw, "normal:again") == [RID]


# --- how they are taken


async def suspects(broker: Broker, raw: Any, *rids: str) -> None:
    """Make requests that wait to run alone."""
    await broker.submit([submission(rid=rid) for rid in rids])
    await lose_often(broker, raw, 2)


async def test_a_suspect_is_taken_alone(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID, OTHER)
    await broker.submit([submission(), submission()])
    taken = await broker.take("w1", START, streams=["solo", *ALL], count=8)
    assert [entry.rid for entry, _ in taken.started] == [RID]
    assert not taken.make_room


async def test_newcomers_first_if_asked_so(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID)
    await broker.submit([submission(rid=OTHER)])
    taken = await broker.take("w1", START, streams=["normal", "solo"], count=8)
    # The last of what is taken at once is the suspect, and nothing comes behind it.
    assert [entry.rid for entry, _ in taken.started][-1] == RID


async def test_one_owner_is_asked_to_make_room(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID)
    batch = [submission() for _ in range(6)]
    await broker.submit(batch)
    # The first who looks, without room for a suspect, gets nothing more.
    first = await broker.take("w1", START, streams=ALL, count=2)
    assert (first.make_room, first.started) == (True, [])
    # The others go on.
    for owner in ("w2", "w3"):
        other = await broker.take(owner, START, streams=ALL, count=2)
        assert (other.make_room, len(other.started)) == (False, 2)
    assert (await broker.take("w1", START, streams=ALL, count=2)).make_room
    # Once it runs nothing, it looks for suspects first.
    alone = await broker.take("w1", START, streams=["solo"], count=2)
    assert [entry.rid for entry, _ in alone.started] == [RID]
    after = await broker.take("w1", START, streams=ALL, count=2)
    assert (after.make_room, len(after.started)) == (False, 2)


async def test_another_is_asked_if_the_first_does_not_come(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID)
    assert (await broker.take("w1", START, streams=ALL, count=1)).make_room
    assert not (await broker.take("w2", START, streams=ALL, count=1)).make_room
    asked, _, until = raw.hget(f"{T}:sweep", "suspect").decode().partition("|")
    assert asked == "w1"
    assert now_ms(raw) < int(until) <= now_ms(raw) + 30_000
    raw.hset(f"{T}:sweep", "suspect", f"w1|{now_ms(raw) - 1}")
    assert (await broker.take("w2", START, streams=ALL, count=1)).make_room
    assert not (await broker.take("w1", START, streams=ALL, count=1)).make_room


async def test_the_second_suspect_asks_again(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID, OTHER)
    await broker.take("w1", START, streams=["solo"], count=1)
    assert (await broker.take("w2", START, streams=ALL, count=1)).make_room
    await broker.take("w2", START, streams=["solo"], count=1)
    # Both run: nobody is asked for anything.
    assert not (await broker.take("w3", START, streams=ALL, count=1)).make_room


async def test_whoever_asks_for_nothing_is_not_asked(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID)
    assert not (await broker.take("w1", START, streams=ALL, count=0)).make_room
    assert not raw.hexists(f"{T}:sweep", "suspect")


async def test_a_suspect_that_was_read_but_not_begun_stays_one(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID)
    await take_all(broker)
    age(raw)
    assert (await sweep(broker, raw)).requeued == 1
    assert (record_of(raw).crashes, record_of(raw).solo_losses) == (2, 0)
    assert waiting_in(raw, "solo") == [RID]


async def test_a_suspect_can_be_cancelled(broker: Broker, raw: Any) -> None:
    await suspects(broker, raw, RID, OTHER)
    await begin_waiting(broker)
    assert await broker.cancel([RID, OTHER], "default") == ["cancelled"] * 2
    assert_drained(raw)


async def test_an_innocent_keeps_its_count_to_the_end(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    await lose(broker, raw)
    (again,) = await begin_waiting(broker, "w2")
    await broker.finish([finish(again)])
    assert (record_of(raw).crashes, record_of(raw).solo_losses, record_of(raw).attempts) == (1, 0, 2)
    assert delivery.crashes == 0
