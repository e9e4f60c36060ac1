"""Workers of a queue whose lanes are split by tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import redis

from eventually import eventually
from hired import Hired, eventually_so, submit
from streamfleet_common.broker import Broker
from streamfleet_common.keys import Keys
from streamfleet_common.records import Record
from streamfleet_common.schemas import End

Hire = Callable[..., Awaitable[Hired]]


async def told(broker: Broker, rid: str, tenant: str) -> str:
    """Wait for a tenant's answer."""
    records: list[Record | None] = []

    async def over() -> bool:
        records[:] = await broker.status([rid], tenant)
        return records[0] is not None and records[0].end is not None

    await eventually_so(over, "an end")
    assert records[0] is not None
    assert records[0].end is not None
    closing = records[0].end.event()
    assert isinstance(closing, End)
    return closing.text


async def test_every_tenant_is_answered_in_whatever_sub_lane(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    first = await hire(sub_lanes=8)
    for tenant in ("default", "acme", "beta", "globex", "a.b-c_9"):
        await eventually(lambda: raw.info("clients")["blocked_clients"] == 1, "a waiting read")
        (rid,) = await submit(broker, [f"for {tenant}"], tenant=tenant)
        assert await told(broker, rid, tenant) == f"for {tenant}"
    assert raw.xinfo_groups(Keys("q").stream("normal", 7))
    # Another worker knows better; the first one goes on to read what it may have to.
    await hire(sub_lanes=1)
    await broker.sweep()
    assert raw.xinfo_groups(Keys("q").stream("normal", 7)) == []
    for tenant in ("acme", "beta"):
        (rid,) = await submit(broker, [f"again {tenant}"], tenant=tenant)
        assert await told(broker, rid, tenant) == f"again {tenant}"
    assert first.running is not None
    assert not first.running.done()


async def test_a_sub_lane_deleted_under_a_waiting_read(broker: Broker, hire: Hire, raw: redis.Redis) -> None:
    await hire(sub_lanes=8)
    for _ in range(3):
        await eventually(lambda: raw.info("clients")["blocked_clients"] == 1, "a waiting read")
        raw.delete(Keys("q").stream("normal", 3))
        (rid,) = await submit(broker, ["after"], tenant="acme")
        assert await told(broker, rid, "acme") == "after"
