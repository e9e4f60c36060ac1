"""Leases: kept by their owner, and by nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import STREAMS, begin, begin_waiting, finish, submission
from server_view import OTHER, RID, T, assert_drained, everything, pending_in, record_of
from silence import SILENT_MS, age, lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.calls import BATCH
from streamfleet_common.deliveries import Renewal

PROTOCOLS = ("resp2", "resp3")


async def test_a_renewal_starts_the_lease_anew(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    age(raw)
    (before,) = pending_in(raw, "normal")
    assert before["idle_ms"] >= SILENT_MS
    assert await broker.renew("w1", [delivery]) == Renewal([True], drain=False)
    (after,) = pending_in(raw, "normal")
    assert (after["eid"], after["owner"]) == (delivery.entry.eid, "w1")
    assert after["idle_ms"] < SILENT_MS / 2
    # So a sweep leaves it alone, however long it runs.
    assert (await sweep(broker, raw)).requeued == 0
    assert (record_of(raw).epoch, record_of(raw).owner) == (1, "w1")
    assert await broker.finish([finish(delivery)]) == [True]


async def test_renewals_are_no_deliveries(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    for _ in range(10):
        age(raw)
        assert (await broker.renew("w1", [delivery])).ours == [True]
        assert await sweep(broker, raw) == await sweep(broker, raw)
    (entry,) = pending_in(raw, "normal")
    assert entry["deliveries"] == 1
    record = record_of(raw)
    assert (record.epoch, record.attempts, record.crashes) == (1, 1, 0)


async def test_what_another_took_is_lost_and_stays_with_it(broker: Broker, raw: Any) -> None:
    (old,) = await begin(broker, submission(rid=RID))
    await lose(broker, raw)
    # Nobody has it yet: its old owner cannot take it back.
    before = everything(raw)
    assert (await broker.renew("w1", [old])).ours == [False]
    assert everything(raw) == before
    (new,) = await begin_waiting(broker, "w2")
    before = everything(raw)
    assert (await broker.renew("w1", [old])).ours == [False]
    assert everything(raw) == before
    assert (await broker.renew("w2", [new])).ours == [True]
    assert [entry["owner"] for entry in pending_in(raw, "normal:again")] == ["w2"]
    assert await broker.finish([finish(old), finish(new)]) == [False, True]
    assert_drained(raw)


async def test_what_has_ended_is_lost(broker: Broker, raw: Any) -> None:
    done, cancelled = await begin(broker, submission(), submission(rid=RID))
    await broker.finish([finish(done)])
    await broker.cancel([RID], "default")
    assert (await broker.renew("w1", [done, cancelled])).ours == [False, False]
    assert_drained(raw)


async def test_the_answers_come_in_order(broker: Broker) -> None:
    first, second, third = await begin(
        broker, submission(lane="bulk"), submission(rid=RID), submission(lane="high", rid=OTHER)
    )
    await broker.cancel([RID], "default")
    assert (await broker.renew("w1", [third, second, first, third])).ours == [True, False, True, True]


async def test_a_renewal_in_the_name_of_another_is_none(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    before = everything(raw)
    assert (await broker.renew("w2", [delivery])).ours == [False]
    assert everything(raw) == before


async def test_many_leases_are_kept_at_once(broker: Broker, raw: Any) -> None:
    deliveries = await begin(broker, *(submission() for _ in range(BATCH + 1)))
    age(raw)
    assert (await broker.renew("w1", deliveries)).ours == [True] * (BATCH + 1)
    assert (await sweep(broker, raw)).requeued == 0


async def test_an_owner_is_asked_to_drain(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission())
    raw.hset(f"{T}:control", "drain:w1", "1")
    assert await broker.renew("w1", [delivery]) == Renewal([True], drain=True)
    assert await broker.renew("w1", []) == Renewal([], drain=True)
    assert await broker.renew("w2", []) == Renewal([], drain=False)


@pytest.mark.parametrize("harm", ["acknowledged", "destroyed", "trimmed", "deleted"])
async def test_the_record_alone_says_who_owns_a_request(broker: Broker, raw: Any, harm: str) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    stream = f"{T}:s:normal"
    if harm == "acknowledged":
        raw.xack(stream, "w", delivery.entry.eid)
    elif harm == "destroyed":
        raw.xgroup_destroy(stream, "w")
    elif harm == "trimmed":
        raw.xtrim(stream, maxlen=0, approximate=False)
    else:
        raw.delete(stream)
    assert (await broker.renew("w1", [delivery])).ours == [True]
    assert await broker.finish([finish(delivery)]) == [True]
    await broker.create_groups()
    assert_drained(raw)
    assert await broker.read("w2", STREAMS, 10, block_ms=None) == []
