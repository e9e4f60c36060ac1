"""What a sweep takes from silent owners, and what it leaves to those who are only slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from broker_parts import START, begin, begin_waiting, card, emission, finish, submission, take_all
from chaos.server import ChaosServer
from server_view import (
    OTHER,
    RID,
    T,
    assert_drained,
    consumers_of,
    events_of,
    everything,
    now_ms,
    pending_in,
    record_of,
    waiting_in,
)
from silence import LEASE_MS, SILENT_MS, age, calm, lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Entry, Swept
from streamfleet_common.housekeeping import AT_ONCE


async def test_a_silent_owner_loses_its_work(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, stream=True)
    (old,) = await begin(broker, one)
    await broker.emit([emission(old, 1, b"x")])
    assert (await lose(broker, raw)).requeued == 1
    record = record_of(raw)
    assert (record.state, record.epoch, record.owner) == ("queued", 2, "")
    assert (record.attempts, record.crashes, record.solo_losses) == (1, 1, 0)
    assert (record.accepted_at_ms, record.deadline_at_ms) == (old.accepted_at_ms, old.deadline_at_ms)
    assert waiting_in(raw, "normal") == []
    assert waiting_in(raw, "normal:again") == [RID]
    assert await broker.emit([emission(old, 2, b"x")]) == [False]
    (new,) = await begin_waiting(broker, "w2")
    assert (new.epoch, new.attempts, new.crashes, new.entry.payload) == (3, 2, 1, one.payload)
    assert await broker.finish([finish(old), finish(new)]) == [False, True]
    assert events_of(raw) == ["1-0", "1-1", "3-0", "4-1"]
    assert_drained(raw)


async def test_only_what_is_silent_is_taken(broker: Broker, raw: Any) -> None:
    silent, renewed = await begin(broker, submission(rid=RID), submission(rid=OTHER))
    (theirs,) = await begin(broker, submission(), owner="w2")
    age(raw, "w1")
    await broker.renew("w1", [renewed])
    assert (await sweep(broker, raw)).requeued == 1
    assert [record_of(raw, one.entry.rid).state for one in (silent, renewed, theirs)] == [
        "queued",
        "running",
        "running",
    ]


async def test_the_lease_is_the_limit(broker: Broker, raw: Any) -> None:
    await begin(broker, submission(rid=RID))
    age(raw, ms=LEASE_MS // 2)
    assert (await sweep(broker, raw)).requeued == 0
    age(raw, ms=LEASE_MS)
    assert (await sweep(broker, raw)).requeued == 1


async def test_the_lease_that_a_worker_announced_counts(broker: Broker, raw: Any) -> None:
    await broker.announce(card(), lease_ms=LEASE_MS)
    await begin(broker, submission(rid=RID))
    age(raw, ms=LEASE_MS // 2)
    calm(raw)
    assert (await broker.sweep(lease_ms=1)).requeued == 0
    age(raw, ms=SILENT_MS)
    calm(raw)
    assert (await broker.sweep(lease_ms=10 * LEASE_MS)).requeued == 1


async def test_read_but_not_begun_costs_nothing(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    read: list[Entry] = []
    for stream in ("normal", *["normal:again"] * 3):
        read = await take_all(broker, "w1")
        assert [entry.stream for entry in read] == [stream]
        assert (await lose(broker, raw)).requeued == 1
    record = record_of(raw)
    assert (record.state, record.epoch, record.attempts, record.crashes) == ("queued", 4, 0, 0)
    # And the one who read it may not begin it now.
    assert await broker.start("w1", read, START) == ["gone"]


async def test_six_sweep_at_once(broker: Broker, connections: Connections, raw: Any) -> None:
    batch = [submission(stream=True) for _ in range(30)]
    rids = [one.envelope.rid for one in batch]
    await begin(broker, *batch)
    age(raw)
    calm(raw)
    sweepers = [Broker(connections, "q") for _ in range(6)]
    swept = await asyncio.gather(*(one.sweep(lease_ms=LEASE_MS) for one in sweepers))
    assert sum(one.requeued for one in swept) == 30
    taken = await asyncio.gather(
        *(
            one.take(f"s{number}", START, streams=["normal:again"], count=30)
            for number, one in enumerate(sweepers)
        )
    )
    assert sorted(entry.rid for one in taken for entry, _ in one.started) == sorted(rids)
    for rid in rids:
        assert (record_of(raw, rid).epoch, record_of(raw, rid).crashes) == (3, 1)
        # One start an epoch, and only one beyond the lost one.
        assert events_of(raw, rid) == ["1-0", "3-0"]


async def test_more_than_one_call_can_take(broker: Broker, raw: Any) -> None:
    count = 2 * AT_ONCE + 1
    await begin(broker, *(submission() for _ in range(count)))
    assert (await lose(broker, raw)).requeued == count
    for _ in range(2):
        swept = await sweep(broker, raw)
        assert replace(swept, waited_ms=(0, 0, 0)) == Swept()
        assert swept.waited_ms[1] > 0
    assert raw.xlen(f"{T}:s:normal:again") == raw.zcard(f"{T}:open") == count


async def test_garbage_that_was_read_is_buried_once(broker: Broker, raw: Any) -> None:
    for fields in ({"x": "y"}, {"r": RID}, {"r": "", "p": b"\xff"}):
        raw.xadd(f"{T}:s:normal", fields)
    await take_all(broker)
    swept = await lose(broker, raw)
    # What is no id is told to nobody's log.
    assert (swept.stray, swept.rids, swept.buried) == (3, (), (RID,))
    assert (await sweep(broker, raw)).stray == 0
    assert [fields[b"rid"] for _, fields in raw.xrange(f"{T}:dead")] == [b"", RID.encode(), b""]
    assert_drained(raw)


async def test_a_superseded_entry_is_cleared(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    raw.xadd(f"{T}:s:normal", {"r": RID, "p": b"x"})
    await begin_waiting(broker, "w2")
    await take_all(broker)
    raw.xadd(f"{T}:s:normal", {"r": RID, "p": b"y"})
    await take_all(broker)
    age(raw, "w1")
    assert (await sweep(broker, raw)) == Swept()
    assert (record_of(raw).epoch, record_of(raw).owner) == (1, "w2")
    assert waiting_in(raw, "normal") == [RID]


# --- the guard


async def test_the_first_sweep_of_all_takes_nothing(broker: Broker, raw: Any) -> None:
    await begin(broker, submission(rid=RID))
    age(raw)
    swept = await broker.sweep(lease_ms=LEASE_MS)
    assert (swept.grace, swept.requeued) == (True, 0)
    assert record_of(raw).owner == "w1"


@pytest.mark.parametrize(("pause", "is_grace"), [(0.4, False), (0.6, True)])
async def test_after_half_a_lease_without_a_sweep_all_have_grace(
    broker: Broker, raw: Any, pause: float, is_grace: bool
) -> None:
    await begin(broker, submission(rid=RID))
    age(raw)
    raw.hset(f"{T}:sweep", mapping={"last": int(now_ms(raw) - pause * LEASE_MS), "grace_until": 0})
    swept = await broker.sweep(lease_ms=LEASE_MS)
    assert (swept.grace, swept.requeued) == (is_grace, 0 if is_grace else 1)


async def test_grace_lasts_one_lease(broker: Broker, raw: Any) -> None:
    before = now_ms(raw)
    assert (await broker.sweep(lease_ms=LEASE_MS)).grace
    until = int(raw.hget(f"{T}:sweep", "grace_until"))
    assert before + LEASE_MS <= until <= now_ms(raw) + LEASE_MS
    await begin(broker, submission(rid=RID))
    age(raw)
    # Sweeps without a pause do not make it any longer.
    assert (await broker.sweep(lease_ms=LEASE_MS)).grace
    assert int(raw.hget(f"{T}:sweep", "grace_until")) == until
    raw.hset(f"{T}:sweep", "grace_until", now_ms(raw))
    assert (await broker.sweep(lease_ms=LEASE_MS)).requeued == 1


async def test_deadlines_know_no_grace(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    raw.zadd(f"{T}:open", {RID: now_ms(raw) - 1})
    swept = await broker.sweep(lease_ms=LEASE_MS)
    assert (swept.grace, swept.expired) == (True, 1)


@pytest.fixture
async def stalling() -> AsyncIterator[tuple[ChaosServer, Broker]]:
    async with ChaosServer() as server:
        connections = Connections.open(server.url)
        broker = Broker(connections, "q")
        await broker.create_groups()
        yield server, broker
        await connections.close()


async def test_a_server_that_stood_still_takes_nothing_from_anybody(
    stalling: tuple[ChaosServer, Broker],
) -> None:
    server, broker = stalling
    deliveries = await begin(broker, *(submission() for _ in range(3)))
    lease_ms = 1000
    await server.control.hset(broker.keys.sweep, mapping={"grace_until": 0})
    await broker.sweep(lease_ms=lease_ms)
    await server.control.hset(broker.keys.sweep, mapping={"grace_until": 0})
    # Longer than a lease, and the sweep is the first to be served after it.
    script = broker._calls._scripts["sweep"]
    line = server.control.pipeline(transaction=False)
    line.execute_command("DEBUG", "SLEEP", "1.2")
    line.eval(script.text, 1, broker.keys.tag, lease_ms, AT_ONCE, b"", b"", b"", b"")
    _, (expired, requeued, failed, dead, stray, more, grace, *_) = await line.execute()
    assert (grace, requeued, expired, failed, dead, stray, more) == (1, 0, 0, 0, 0, 0, 0)
    assert (await broker.renew("w1", deliveries)).ours == [True] * 3
    records = await broker.status([one.entry.rid for one in deliveries], "default")
    assert [(one.epoch, one.crashes) for one in records if one] == [(1, 0)] * 3


# --- what it notes


async def test_how_long_the_oldest_waits_in_each_lane(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(lane="high"), submission(), submission(rid=RID), submission(lane="bulk")])
    await broker.read("w1", ["normal"], 1, block_ms=None)
    await broker.read("w1", ["bulk"], 1, block_ms=None)
    accepted = [record_of(raw, waiting_in(raw, "high")[0]).accepted_at_ms, record_of(raw).accepted_at_ms, 0]
    before = now_ms(raw)
    swept = await broker.sweep()
    after = now_ms(raw)
    for waited, at in zip(swept.waited_ms[:2], accepted[:2], strict=True):
        assert before - at <= waited <= after - at
    assert swept.waited_ms[2] == 0
    noted = raw.hmget(f"{T}:sweep", "oldest:high", "oldest:normal", "oldest:bulk")
    assert [int(value) for value in noted] == accepted


async def test_how_fast_requests_end(broker: Broker, raw: Any) -> None:
    done = await begin(broker, *(submission() for _ in range(5)))
    await broker.submit([submission(rid=RID)])
    await broker.finish([finish(one) for one in done])
    await broker.cancel([RID], "default")
    assert raw.hget(f"{T}:sweep", "ended") == b"6"
    # 6 ends more than 1000 s ago, when there had been none.
    raw.hset(f"{T}:sweep", mapping={"rate_at": now_ms(raw) - 1_000_000, "rate_ended": 0})
    await broker.sweep()
    assert raw.hget(f"{T}:sweep", "rate") == b"0.006"
    assert raw.hget(f"{T}:sweep", "rate_ended") == b"6"


async def test_an_end_counts_once(broker: Broker, raw: Any) -> None:
    """Also where a sweep meets it twice, as overdue or lost and in its audit."""
    await begin(broker, submission(rid=RID, stream=True, on_restart="fail"), submission(rid=OTHER))
    await broker.emit([emission((await begin(broker, submission()))[0], 0, b"")])
    raw.xadd(f"{T}:ev:{RID}", {"f": b"1-1 x"}, id="1-1")
    raw.zadd(f"{T}:open", {OTHER: now_ms(raw) - 1})
    age(raw)
    swept = await sweep(broker, raw)
    assert (swept.expired, swept.failed, swept.requeued) == (1, 1, 1)
    assert raw.hget(f"{T}:sweep", "ended") == b"2"


async def test_a_sweep_of_nothing(broker: Broker, raw: Any) -> None:
    assert await sweep(broker, raw) == Swept()
    before = set(everything(raw))
    assert await sweep(broker, raw) == Swept()
    assert set(everything(raw)) == before
    assert pending_in(raw, "normal") == []
    assert consumers_of(raw, "normal") == []


async def test_who_is_lazy_takes_all_the_same_what_one_call_cannot(broker: Broker, raw: Any) -> None:
    count = AT_ONCE + 1
    await begin(broker, *(submission() for _ in range(count)))
    age(raw)
    calm(raw)
    assert (await broker.sweep(lease_ms=LEASE_MS, lazy=True)).requeued == count


async def test_of_many_who_sweep_only_one_looks_after_everything(broker: Broker, raw: Any) -> None:
    await begin(broker, submission(rid=RID))
    age(raw)
    calm(raw)
    raw.hset(f"{T}:sweep", "full", now_ms(raw) - LEASE_MS // 4)
    await broker.submit([submission(rid=OTHER)])
    raw.zadd(f"{T}:open", {OTHER: 1})
    swept = await broker.sweep(lease_ms=LEASE_MS, lazy=True)
    assert (swept.requeued, record_of(raw).state) == (0, "running")
    # What is overdue does not wait for anybody.
    assert (swept.expired, record_of(raw, OTHER).state) == (1, "expired")

    raw.hset(f"{T}:sweep", "full", now_ms(raw) - LEASE_MS // 2)
    assert (await broker.sweep(lease_ms=LEASE_MS, lazy=True)).requeued == 1
    assert (await broker.sweep(lease_ms=LEASE_MS, lazy=True)).requeued == 0
