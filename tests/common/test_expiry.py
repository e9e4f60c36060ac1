"""Deadlines."""

from __future__ import annotations

from typing import Any

from broker_parts import begin, finish, submission
from eventually import eventually
from server_view import (
    RID,
    T,
    assert_drained,
    calls_of,
    log_of,
    now_ms,
)
from streamfleet_common.broker import Broker
from streamfleet_common.housekeeping import AT_ONCE

PROTOCOLS = ("resp2", "resp3")


async def test_a_sweep_ends_what_is_due(broker: Broker, raw: Any) -> None:
    (running,) = await begin(broker, submission(stream=True))
    queued = submission()
    later = submission(rid=RID)
    await broker.submit([queued, later])
    assert (await broker.sweep()).expired == 0
    rids = [running.entry.rid, queued.envelope.rid]
    raw.zadd(f"{T}:open", dict.fromkeys(rids, now_ms(raw)))
    assert (await broker.sweep()).expired == 2
    assert (await broker.sweep()).expired == 0
    records = await broker.status([*rids, RID], "default")
    assert [record.state for record in records if record] == ["expired", "expired", "queued"]
    assert [record.attempts for record in records if record] == [1, 0, 0]
    assert records[0] is not None
    assert records[0].end is not None
    assert records[0].started_at_ms == running.now_ms
    assert [id_ for id_, _ in log_of(raw, rids[0])] == ["1-0", "2-1"]
    assert await broker.finish([finish(running)]) == [False]
    await broker.cancel([RID], "default")
    assert_drained(raw)


async def test_a_sweep_ends_all_a_bite_at_a_time(broker: Broker, raw: Any) -> None:
    count = 2 * AT_ONCE + 1
    await broker.submit([submission(deadline_ms=1) for _ in range(count)])
    latest = raw.zrange(f"{T}:open", -1, -1, withscores=True)[0][1]
    await eventually(lambda: now_ms(raw) > latest)
    raw.config_resetstat()
    assert (await broker.sweep()).expired == count
    assert calls_of(raw, "evalsha") == 3
    assert (await broker.sweep()).expired == 0
    assert_drained(raw)


async def test_a_sweep_frees_the_places_of_lost_and_broken_records(broker: Broker, raw: Any) -> None:
    batch = [submission(deadline_ms=1) for _ in range(4)]
    await broker.submit(batch)
    rids = [one.envelope.rid for one in batch]
    raw.delete(f"{T}:r:{rids[0]}")
    raw.set(f"{T}:r:{rids[1]}", b"garbage")
    raw.delete(f"{T}:r:{rids[2]}")
    raw.hset(f"{T}:r:{rids[2]}", "a", "b")
    await eventually(lambda: now_ms(raw) > raw.zrange(f"{T}:open", -1, -1, withscores=True)[0][1])
    assert (await broker.sweep()).expired == 4
    assert raw.zcard(f"{T}:open") == 0
    (record,) = await broker.status(rids[3:], "default")
    assert record is not None
    assert record.state == "expired"
