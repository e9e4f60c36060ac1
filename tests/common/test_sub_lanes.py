"""Lanes that are split by tenant: who waits where, who is read when, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from broker_parts import START, STREAMS, begin_waiting, card, finish, retry, submission
from server_view import OTHER, RID, T, assert_drained, fields_of, waiting_in
from silence import LEASE_MS, calm, lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.housekeeping import AT_ONCE
from streamfleet_common.keys import AGAIN, MAX_SUB_LANES, Keys, Stream, parse_place, place_of, sub_lane_of
from streamfleet_common.schemas import LANES

LOOK: tuple[Stream, ...] = (*AGAIN, *LANES)
# By `printf NAME | sha1sum`, the first 8 digits modulo 8.
SUB_LANES = {"default": 2, "acme": 3, "beta": 5, "globex": 4, "a.b-c_9": 6}


async def split(broker: Broker, sub_lanes: int) -> None:
    await broker.announce(card(max_queue_depth=1000), sub_lanes=sub_lanes, lease_ms=LEASE_MS)


async def look(broker: Broker, count: int, owner: str = "w1") -> list[Delivery]:
    taken = await broker.take(owner, START, streams=LOOK, count=count)
    return [one for _, one in taken.started if isinstance(one, Delivery)]


def lanes_of(deliveries: list[Delivery]) -> Counter[int]:
    return Counter(one.entry.sub_lane for one in deliveries)


@pytest.mark.parametrize("tenant", SUB_LANES)
@pytest.mark.parametrize("lane", LANES)
async def test_a_tenant_waits_in_the_sub_lane_of_its_name(
    broker: Broker, raw: Any, tenant: str, lane: str
) -> None:
    await split(broker, 8)
    await broker.submit([submission(rid=RID, tenant=tenant, lane=lane)])
    number = SUB_LANES[tenant]
    assert sub_lane_of(tenant, 8) == number
    assert waiting_in(raw, f"{lane}:{number}") == [RID]
    ((eid, _),) = raw.xrange(f"{T}:s:{lane}:{number}")
    assert fields_of(raw, RID)[2] == f"{lane[0]}{number}.{eid.decode()}"
    (delivery,) = await look(broker, 1)
    assert (delivery.entry.stream, delivery.entry.sub_lane, delivery.entry.eid) == (
        lane,
        number,
        eid.decode(),
    )
    assert await broker.finish([finish(delivery)]) == [True]
    assert raw.xlen(f"{T}:s:{lane}:{number}") == 0
    assert raw.xpending(f"{T}:s:{lane}:{number}", "w")["pending"] == 0


async def test_one_sub_lane_is_the_lane_itself(broker: Broker, raw: Any) -> None:
    await split(broker, 1)
    await broker.submit([submission(rid=RID, tenant="acme")])
    assert waiting_in(raw, "normal") == [RID]
    assert fields_of(raw, RID)[2].startswith("n1")
    assert "." not in fields_of(raw, RID)[2]
    assert raw.hmget(f"{T}:control", "sub_lanes", "sub_lanes_top") == [None, None]
    assert not raw.keys(f"{T}:s:*:[0-9]*")


@pytest.mark.parametrize(
    ("waiting", "count", "wanted"),
    [
        ({"acme": 10, "beta": 10}, 8, {3: 4, 5: 4}),
        ({"acme": 10, "beta": 1}, 8, {3: 7, 5: 1}),
        ({"acme": 1, "beta": 10, "globex": 10}, 7, {3: 1, 5: 3, 4: 3}),
        ({"acme": 2}, 8, {3: 2}),
        ({"default": 3, "acme": 3, "beta": 3, "globex": 3}, 4, {2: 1, 3: 1, 5: 1, 4: 1}),
    ],
    ids=str,
)
async def test_each_sub_lane_that_holds_something_gives_as_many(
    broker: Broker, waiting: dict[str, int], count: int, wanted: dict[int, int]
) -> None:
    await split(broker, 8)
    for tenant, number in waiting.items():
        await broker.submit([submission(tenant=tenant) for _ in range(number)])
    assert lanes_of(await look(broker, count)) == wanted


async def test_turns_go_on_over_all_workers(broker: Broker) -> None:
    await split(broker, 8)
    for tenant in ("acme", "beta", "globex"):
        await broker.submit([submission(tenant=tenant) for _ in range(6)])
    order: list[int] = []
    for number in range(9):
        order += [one.entry.sub_lane for one in await look(broker, 1, f"w{number}")]
    # However few places a worker has: 3, 4 and 5 hold something.
    assert order == [3, 4, 5] * 3
    # What was over last time is not the same one's again.
    first, second = lanes_of(await look(broker, 4)), lanes_of(await look(broker, 4))
    assert first == {3: 2, 4: 1, 5: 1}
    assert second == {3: 1, 4: 2, 5: 1}


async def test_a_flood_costs_a_quiet_tenant_no_more_than_every_other_turn(broker: Broker) -> None:
    """A virtual run: each turn frees one place, and the loud one asks for 100 times as much."""

    async def waits(is_flooded: bool) -> list[int]:
        turns: list[int] = []
        asked: dict[str, int] = {}
        for turn in range(300):
            if is_flooded and turn % 2 == 0:
                await broker.submit([submission(tenant="acme") for _ in range(2)])
            if turn % 100 == 50:
                one = submission(tenant="beta")
                asked[one.envelope.rid] = turn
                await broker.submit([one])
            for delivery in await look(broker, 1):
                if delivery.entry.sub_lane == 5:
                    turns.append(turn - asked[delivery.entry.rid] + 1)
                await broker.finish([finish(delivery)])
        return turns

    await broker.announce(card(max_queue_depth=10_000), sub_lanes=8)
    alone, beside = await waits(False), await waits(True)
    assert alone == [1, 1, 1]
    assert len(beside) == 3
    assert max(beside) <= 2


async def test_without_sub_lanes_the_flood_goes_first(broker: Broker) -> None:
    await broker.announce(card(max_queue_depth=10_000))
    await broker.submit([submission(tenant="acme") for _ in range(50)])
    await broker.submit([submission(rid=RID, tenant="beta")])
    assert RID not in [one.entry.rid for one in await look(broker, 50)]


@pytest.mark.parametrize("to", [1, 2, 5, 16])
async def test_nothing_is_left_behind_when_their_number_changes(broker: Broker, raw: Any, to: int) -> None:
    await split(broker, 8)
    await broker.submit([submission(tenant=tenant) for tenant in SUB_LANES for _ in range(2)])
    running = await look(broker, 3)
    await split(broker, to)
    await broker.submit([submission(tenant=tenant) for tenant in SUB_LANES])
    await sweep(broker, raw)
    deliveries = running + await look(broker, 100)
    assert len(deliveries) == 3 * len(SUB_LANES)
    assert (await broker.depth()).running == len(deliveries)
    assert (await broker.renew("w1", deliveries)).ours == [True] * len(deliveries)
    assert await broker.finish([finish(one) for one in deliveries]) == [True] * len(deliveries)
    await sweep(broker, raw)
    assert raw.hmget(f"{T}:control", "sub_lanes", "sub_lanes_top") == [str(to).encode()] * 2
    for number in range(1, max(to, 8)):
        stream = f"{T}:s:normal:{number}"
        assert raw.xlen(stream) == 0
        # What is read no more has no readers either.
        assert len(raw.xinfo_groups(stream)) == (number < to)
    assert_drained(raw)


async def test_what_runs_keeps_its_sub_lane(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    await broker.submit([submission(tenant="a.b-c_9")])
    (delivery,) = await look(broker, 1)
    await split(broker, 1)
    await sweep(broker, raw)
    assert raw.hget(f"{T}:control", "sub_lanes_top") == b"7"  # the eighth was empty
    assert await broker.finish([finish(delivery)]) == [True]
    await sweep(broker, raw)
    assert raw.hget(f"{T}:control", "sub_lanes_top") == b"1"


async def test_a_pending_entry_keeps_its_sub_lane(broker: Broker, raw: Any) -> None:
    """Somebody deletes the entry of what runs; its worker still has it, and may renew and finish it."""
    await split(broker, 4)
    await broker.submit([submission(tenant="acme")])
    (delivery,) = await look(broker, 1)
    raw.xdel(f"{T}:s:normal:{delivery.entry.sub_lane}", delivery.entry.eid)
    await split(broker, 1)
    await sweep(broker, raw)
    assert raw.hget(f"{T}:control", "sub_lanes_top") == str(delivery.entry.sub_lane + 1).encode()
    assert await broker.finish([finish(delivery)]) == [True]
    await sweep(broker, raw)
    assert raw.hget(f"{T}:control", "sub_lanes_top") == b"1"


@pytest.mark.parametrize("way", ["lost", "handed back", "released", "tried again", "only read"])
async def test_what_comes_back_from_a_sub_lane(broker: Broker, raw: Any, way: str) -> None:
    await split(broker, 8)
    await broker.submit([submission(rid=RID, tenant="acme")])
    if way == "only read":
        (entry,) = await broker.read("w1", STREAMS, 5, block_ms=None)
        assert (entry.stream, entry.sub_lane) == ("normal", 3)
        assert await broker.release([entry]) == [True]
    else:
        (delivery,) = await look(broker, 1)
        if way == "lost":
            assert (await lose_in(broker, raw, 3)).requeued == 1
        elif way == "handed back":
            assert (await broker.hand_back("w1", crashed=True)).requests == 1
        elif way == "released":
            assert await broker.release([delivery]) == [True]
        else:
            assert await broker.finish([retry(delivery)]) == [True]
        assert await broker.finish([finish(delivery)]) == [False]
    assert waiting_in(raw, "normal:again") == [RID]
    assert raw.xlen(f"{T}:s:normal:3") == 0
    assert raw.xpending(f"{T}:s:normal:3", "w")["pending"] == 0
    (again,) = await look(broker, 1, "w2")
    assert await broker.finish([finish(again)]) == [True]
    assert_drained(raw)


async def lose_in(broker: Broker, raw: Any, number: int) -> Any:
    """The owner of what runs in a sub-lane falls silent, and a sweep finds out."""
    key = f"{T}:s:normal:{number}"
    for entry in raw.xpending_range(key, "w", "-", "+", 10):
        raw.xclaim(key, "w", entry["consumer"], 0, [entry["message_id"]], idle=LEASE_MS + 1000, justid=True)
    return await sweep(broker, raw)


async def test_one_call_of_a_sweep_takes_no_more_of_many_sub_lanes_than_of_one(
    broker: Broker, raw: Any
) -> None:
    await split(broker, 8)
    count = 2 * AT_ONCE // 3
    await broker.submit([submission(tenant=tenant) for tenant in ("acme", "beta") for _ in range(count)])
    assert len(await look(broker, 2 * count)) == 2 * count
    for number in (3, 5):
        key = f"{T}:s:normal:{number}"
        for entry in raw.xpending_range(key, "w", "-", "+", count):
            raw.xclaim(key, "w", "w1", 0, [entry["message_id"]], idle=LEASE_MS + 1000, justid=True)
    calm(raw)
    script = broker._calls._scripts["sweep"]
    _, requeued, _, _, _, more, *_ = raw.eval(
        script.text, 1, broker.keys.tag, LEASE_MS, AT_ONCE, b"", b"", b"", b""
    )
    assert (requeued, more) == (AT_ONCE, 1)
    assert (await sweep(broker, raw)).requeued == 2 * count - AT_ONCE


async def test_a_note_that_was_deleted_comes_back_though_no_worker_splits_any_more(
    broker: Broker, raw: Any
) -> None:
    await split(broker, 8)
    raw.hdel(f"{T}:control", "sub_lanes_top")
    await split(broker, 1)  # it knows of nothing to be undone
    await broker.submit([submission(rid=RID, tenant="acme")])
    await sweep(broker, raw)
    assert [one.entry.rid for one in await look(broker, 1)] == [RID]


async def test_what_was_given_without_a_word_is_found(broker: Broker) -> None:
    await split(broker, 8)
    await broker.submit([submission(tenant=tenant) for tenant in ("acme", "beta")])
    taken = await look(broker, 5)
    fresh = Broker(broker._connections, "q")  # knows of no sub-lanes yet
    found = await fresh.given("w1")
    assert {entry.place for entry in found} == {one.entry.place for one in taken}
    assert await fresh.given("w1", known=[taken[0].entry.place]) == [
        entry for entry in found if entry.place != taken[0].entry.place
    ]
    assert (await Broker(broker._connections, "q").depth()).running == 2


async def test_a_worker_that_waits_is_woken_by_any_sub_lane(broker: Broker) -> None:
    await split(broker, 8)
    assert await look(broker, 1) == []
    reading = asyncio.create_task(broker.read("w1", LOOK, 1, block_ms=500))
    await broker.submit([submission(rid=RID, tenant="a.b-c_9")])
    entries = await reading
    while not entries:
        entries = await broker.read("w1", LOOK, 1, block_ms=500)
    assert [(entry.rid, entry.sub_lane) for entry in entries] == [(RID, 6)]


async def test_a_lost_entry_is_found_in_a_sub_lane(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    await broker.submit([submission(rid=RID, tenant="acme"), submission(rid=OTHER, tenant="beta")])
    raw.delete(f"{T}:s:normal:3")
    place = fields_of(raw, RID)[2]
    record = raw.get(f"{T}:r:{RID}")
    raw.set(f"{T}:r:{RID}", record.replace(place.encode(), b"n3.1-1"))
    assert (await sweep(broker, raw)).failed == 1
    assert [one.state for one in await broker.status([RID], "acme") if one] == ["failed"]
    assert [one.state for one in await broker.status([OTHER], "beta") if one] == ["queued"]


async def test_the_oldest_of_all_sub_lanes_is_the_lanes(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    await broker.submit([submission(tenant="beta"), submission(tenant="acme", lane="bulk")])
    raw.xadd(f"{T}:s:normal:3", {"x": "y"}, id="1-1")
    high, normal, bulk = (await sweep(broker, raw)).waited_ms
    assert high == 0
    assert normal > 10**12
    assert 0 <= bulk < 10**6
    assert raw.hget(f"{T}:sweep", "oldest:normal") == b"1"


async def test_garbage_in_a_sub_lane_goes_to_the_dead_letters(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    eid = raw.xadd(f"{T}:s:bulk:6", {"x": "y"})
    assert await look(broker, 5) == []
    ((_, letter),) = raw.xrange(f"{T}:dead")
    assert (letter[b"stream"], letter[b"entry"]) == (b"bulk:6", eid)


async def test_a_note_that_was_deleted_is_found_again(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    await broker.submit([submission(rid=RID, tenant="acme")])
    raw.delete(f"{T}:control")
    assert await look(broker, 5) == []
    place = fields_of(raw, RID)[2]
    # An entry so young may be on its way; this one is as old as can be.
    raw.xdel(f"{T}:s:normal:3", place.partition(".")[2])
    raw.delete(f"{T}:s:normal:3")
    raw.xgroup_create(f"{T}:s:normal:3", "w", id="0", mkstream=True)
    raw.xadd(f"{T}:s:normal:3", {"r": RID, "p": b"x"}, id="1-1")
    record = raw.get(f"{T}:r:{RID}")
    raw.set(f"{T}:r:{RID}", record.replace(place.encode(), b"n3.1-1"))
    await sweep(broker, raw)
    assert [one.entry.rid for one in await look(broker, 5)] == [RID]


async def test_a_worker_that_leaves_is_forgotten_everywhere(broker: Broker, raw: Any) -> None:
    await split(broker, 4)
    await broker.submit([submission(tenant=tenant) for tenant in SUB_LANES])
    deliveries = await look(broker, 10)
    assert await broker.finish([finish(one) for one in deliveries]) == [True] * len(deliveries)
    await broker.announce(card(), life_ms=0, sub_lanes=4)
    for key in raw.keys(f"{T}:s:*"):
        assert raw.xinfo_consumers(key, "w") == [], key


@pytest.mark.parametrize("sub_lanes", [0, -1, MAX_SUB_LANES + 1])
async def test_a_number_that_is_not_possible(broker: Broker, sub_lanes: int) -> None:
    with pytest.raises(InvalidRequest, match="sub-lanes are not possible"):
        await split(broker, sub_lanes)


@pytest.mark.parametrize("written", ["0", "-3", "junk", "2.5", "1.5e9", "1000000"])
@pytest.mark.parametrize("top", ["64", "1000000000", "63.5"])
async def test_what_is_written_by_hand_loses_nothing(
    broker: Broker, raw: Any, written: str, top: str
) -> None:
    raw.hset(f"{T}:control", mapping={"sub_lanes": written, "sub_lanes_top": top})
    answers = await broker.submit([submission(tenant=tenant) for tenant in SUB_LANES])
    assert {answer.outcome for answer in answers} == {"accepted"}
    assert len(await look(broker, 100)) == len(SUB_LANES)
    await sweep(broker, raw)
    assert (await broker.depth()).running == len(SUB_LANES)


def test_places() -> None:
    assert place_of("normal", "5-0") == "n5-0"
    assert place_of("bulk", "5-0", 12) == "b12.5-0"
    for stream in STREAMS:
        assert parse_place(place_of(stream, "1795964638596-0")) == (stream, 0, "1795964638596-0")
    for lane in LANES:
        for number in (1, 7, 63):
            assert parse_place(place_of(lane, "5-0", number)) == (lane, number, "5-0")
    assert Keys("q").stream("high", 3) == f"{T}:s:high:3"
    with pytest.raises(Undecodable):
        parse_place("x5-0")


def test_the_names_of_the_tests_fall_apart() -> None:
    assert len(set(SUB_LANES.values())) == len(SUB_LANES)


async def test_suspects_and_repeated_work_are_not_split(broker: Broker, raw: Any) -> None:
    await split(broker, 8)
    await broker.submit([submission(rid=RID, tenant="acme")])
    for number in range(2):
        await begin_waiting(broker, f"w{number}")
        await (lose_in(broker, raw, 3) if number == 0 else lose(broker, raw, f"w{number}"))
    assert waiting_in(raw, "solo") == [RID]
