"""Waiting requests that are moved to another lane: which, where to, and that each still runs once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker_parts import DONE, START, begin, begin_waiting, card, finish, retry, submission, take_all
from lossy_proxy import LossyProxy
from server_view import OTHER, RID, T, assert_drained, everything, fields_of, record_of, waiting_in
from silence import LEASE_MS, lose_often, sweep, wake
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.moves import Move
from streamfleet_common.schemas import LANES, Lane, Retry

LANE_PAIRS = [(one, other) for one in LANES for other in LANES if one != other]


async def outcomes(broker: Broker, *rids: str, to: Lane = "bulk", **wanted: Any) -> list[str]:
    return [one.outcome for one in await broker.move(rids, to=to, **wanted)]


async def runs_once(broker: Broker, raw: Any, *rids: str) -> None:
    """Each is taken and done once, and then nothing is left."""
    deliveries = await begin_waiting(broker)
    assert sorted(one.entry.rid for one in deliveries) == sorted(rids)
    assert all(await broker.finish([finish(one) for one in deliveries]))
    assert {record_of(raw, rid).state for rid in rids} == {"done"}
    assert await take_all(broker) == []
    assert_drained(raw)


@pytest.mark.parametrize(("source", "to"), LANE_PAIRS)
async def test_it_waits_behind_those_of_the_other_lane(
    broker: Broker, raw: Any, source: Lane, to: Lane
) -> None:
    first, second = submission(lane=to), submission(lane=source)
    await broker.submit([first, submission(rid=RID, lane=source, stream=True), second])
    before = fields_of(raw, RID)
    assert await outcomes(broker, RID, to=to, source=source) == ["moved"]
    assert waiting_in(raw, to) == [first.envelope.rid, RID]
    assert waiting_in(raw, source) == [second.envelope.rid]
    (eid,) = [eid for eid, fields in raw.xrange(f"{T}:s:{to}") if fields[b"r"] == RID.encode()]
    # By hand: nothing else of the record changes, the epoch least of all.
    after = [*before]
    after[2], after[9] = f"{to[0]}{eid.decode()}", to[0]
    assert fields_of(raw, RID) == after
    assert raw.hget(f"{T}:tenants", "default") == b"3"
    await runs_once(broker, raw, RID, first.envelope.rid, second.envelope.rid)


async def test_the_payload_goes_with_it(broker: Broker, raw: Any) -> None:
    one = submission("prompt \x00\n|", rid=RID)
    await broker.submit([one])
    await broker.move([RID], to="high")
    taken = await broker.take("w1", START, streams=("high",), count=1)
    ((entry, _),) = taken.started
    assert (entry.rid, entry.payload) == (RID, one.payload)


async def test_a_batch_keeps_its_order(broker: Broker, raw: Any) -> None:
    many = [submission() for _ in range(230)]
    await broker.submit(many)
    rids = [one.envelope.rid for one in many]
    assert [one.rid for one in await broker.waiting("normal")] == rids
    assert set(await outcomes(broker, *rids)) == {"moved"}
    assert waiting_in(raw, "bulk") == rids
    assert waiting_in(raw, "normal") == []


async def test_a_second_move_finds_it_there(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    assert await outcomes(broker, RID, RID) == ["moved", "there"]
    before = everything(raw)
    assert await outcomes(broker, RID, source="normal") == ["there"]
    assert everything(raw) == before
    assert await outcomes(broker, RID, to="high", source="normal") == ["elsewhere"]
    assert everything(raw) == before
    await runs_once(broker, raw, RID)


async def test_a_lost_reply_moves_once(lossy: Broker, proxy: LossyProxy, raw: Any, impatient: None) -> None:
    await lossy.submit([submission(rid=RID), submission(rid=OTHER)])
    proxy.lose_reply(lossy._calls._scripts["move"].sha.encode(), 1)
    assert await outcomes(lossy, RID, source="normal") == ["there"]
    assert proxy.lost.is_set()
    assert waiting_in(raw, "bulk") == [RID]
    await runs_once(lossy, raw, RID, OTHER)


async def test_what_a_worker_has_is_left_alone(broker: Broker, raw: Any) -> None:
    (first,) = await begin(broker, submission(rid=RID))
    # By hand, so that its record alone still tells.
    raw.xack(f"{T}:s:normal", "w", first.entry.eid)
    await broker.submit([submission(rid=OTHER)])
    (entry,) = await broker.read("w2", ("normal",), 1, block_ms=None)
    before = everything(raw)
    # The first runs, the other was read and is about to be begun.
    assert await outcomes(broker, RID, OTHER) == ["running", "running"]
    assert everything(raw) == before
    (begun,) = await broker.start("w2", [entry], START)
    assert isinstance(begun, Delivery)


async def test_whoever_holds_the_old_entry_gets_nothing(broker: Broker, raw: Any) -> None:
    """As where a worker had it, lost it, and it was moved before that worker came back."""
    await broker.submit([submission(rid=RID)])
    eid = fields_of(raw, RID)[2][1:]
    await broker.move([RID], to="bulk")
    assert await broker.start("w1", [Entry(RID, eid, "normal", b"")], START) == ["gone"]
    await runs_once(broker, raw, RID)


async def test_what_came_back_goes_before_the_newcomers(broker: Broker, raw: Any) -> None:
    (one,) = await begin(broker, submission(rid=RID))
    assert await broker.release([one]) == [True]
    newcomer = submission(lane="bulk")
    await broker.submit([newcomer])
    assert await outcomes(broker, RID) == ["moved"]
    assert waiting_in(raw, "bulk:again") == [RID]
    assert waiting_in(raw, "normal:again") == []
    await runs_once(broker, raw, RID, newcomer.envelope.rid)


async def test_what_waits_for_its_next_try_comes_back_to_the_other_lane(broker: Broker, raw: Any) -> None:
    (one,) = await begin(broker, submission("x|y\nz", rid=RID, retry=Retry(backoff_ms=60_000)))
    await broker.finish([retry(one)])
    assert (await broker.waiting("normal"))[0].rid == RID
    payload = raw.get(f"{T}:r:{RID}").partition(b"\n")[2]
    due = raw.zscore(f"{T}:later", RID)
    assert await outcomes(broker, RID) == ["moved"]
    assert (raw.get(f"{T}:r:{RID}").partition(b"\n")[2], raw.zscore(f"{T}:later", RID)) == (payload, due)
    wake(raw)
    await sweep(broker, raw)
    assert waiting_in(raw, "bulk:again") == [RID]
    await runs_once(broker, raw, RID)


async def test_a_suspect_stays_alone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 2)
    assert waiting_in(raw, "solo") == [RID]
    assert await outcomes(broker, RID) == ["suspect"]
    assert waiting_in(raw, "solo") == [RID]
    assert await broker.waiting("normal") == []


async def test_others_requests_and_ended_ones_are_left_alone(broker: Broker, raw: Any) -> None:
    (done,) = await begin(broker, submission(rid=OTHER))
    await broker.finish([finish(done, DONE)])
    await broker.submit([submission(rid=RID, tenant="acme")])
    before = everything(raw)
    assert await outcomes(broker, RID, OTHER, tenant="beta") == ["gone", "gone"]
    assert await broker.move([OTHER, "00" + "e" * 32], to="bulk") == [
        Move(OTHER, "ended", "done"),
        Move("00" + "e" * 32, "gone"),
    ]
    assert everything(raw) == before
    assert await outcomes(broker, RID, tenant="acme") == ["moved"]
    assert [one.tenant for one in await broker.waiting("bulk", tenant="acme")] == ["acme"]
    assert await broker.waiting("bulk", tenant="beta") == []


async def test_it_waits_in_the_sub_lane_of_its_tenant(broker: Broker, raw: Any) -> None:
    # As in `test_sub_lanes`: of eight, acme's is the third and beta's the fifth.
    await broker.submit([submission(rid=RID, tenant="acme")])
    await broker.announce(card(max_queue_depth=1000), sub_lanes=8, lease_ms=LEASE_MS)
    await broker.submit([submission(rid=OTHER, tenant="beta")])
    assert await outcomes(broker, RID, OTHER) == ["moved", "moved"]
    assert waiting_in(raw, "bulk:3") == [RID]
    assert waiting_in(raw, "bulk:5") == [OTHER]
    assert fields_of(raw, RID)[2].startswith("b3.")
    assert waiting_in(raw, "normal") == waiting_in(raw, "normal:5") == []
    await broker._ask_streams(lambda pipe, name: pipe.xlen(name))  # learns how many there are
    await runs_once(broker, raw, RID, OTHER)


async def test_an_entry_that_somebody_deleted_is_left_to_the_audit(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    raw.delete(f"{T}:s:normal")
    before = everything(raw)
    assert await outcomes(broker, RID) == ["lost"]
    assert everything(raw) == before


async def test_who_waits_longest_is_noted_by_acceptance(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    accepted = record_of(raw).accepted_at_ms
    await broker.submit([submission(lane="bulk")])
    raw.hset(f"{T}:sweep", "oldest:bulk", accepted + 5)
    await broker.move([RID], to="bulk")
    assert int(raw.hget(f"{T}:sweep", "oldest:bulk")) == accepted
    raw.hset(f"{T}:sweep", "oldest:high", accepted - 5)
    await broker.move([RID], to="high")
    assert int(raw.hget(f"{T}:sweep", "oldest:high")) == accepted - 5


async def test_a_sweep_knows_when_what_was_moved_was_accepted(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    accepted = record_of(raw).accepted_at_ms
    # On a fast machine both would be the same millisecond.
    raw.xadd(f"{T}:s:bulk", {"r": "x"}, id=f"{accepted + 1000}-0")
    raw.xtrim(f"{T}:s:bulk", maxlen=0, approximate=False)
    await broker.move([RID], to="bulk")
    assert int(fields_of(raw, RID)[2][1:].partition("-")[0]) > accepted
    await sweep(broker, raw)
    assert [int(raw.hget(f"{T}:sweep", f"oldest:{lane}")) for lane in LANES] == [0, 0, accepted]


async def test_a_full_server_refuses_the_whole_of_it(broker: Broker, raw: Any, impatient: None) -> None:
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    before = everything(raw)
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable) as caught:
            await broker.move([RID, OTHER], to="bulk")
    finally:
        raw.config_set("maxmemory", 0)
    assert caught.value.reason == "out_of_memory"
    assert everything(raw) == before


async def test_movers_and_workers_at_once(broker: Broker, raw: Any) -> None:
    """Each request is done once, however often it is moved while workers take what waits."""
    many = [submission(lane=lane) for lane in LANES for _ in range(20)]
    await broker.submit(many)
    rids = [one.envelope.rid for one in many]
    left = set(rids)

    async def work(owner: str) -> None:
        while left:
            taken = await broker.take(owner, START, streams=("high", "normal", "bulk"), count=3)
            begun = [one for _, one in taken.started if isinstance(one, Delivery)]
            for one in begun:
                left.remove(one.entry.rid)  # raises if it was given out twice
            assert all(await broker.finish([finish(one) for one in begun]))

    async def shift(to: Lane) -> None:
        while left:
            await broker.move(sorted(left)[:7], to=to)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for owner in ("w1", "w2"):
            group.create_task(work(owner))
        for lane in LANES:
            group.create_task(shift(lane))
    assert {record_of(raw, rid).state for rid in rids} == {"done"}
    assert_drained(raw)
