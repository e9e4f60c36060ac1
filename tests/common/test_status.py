"""What anybody may ask of a request."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import begin, emission, finish, submission
from eventually import eventually
from server_view import (
    OTHER,
    RID,
    T,
)
from streamfleet_common.broker import Broker
from streamfleet_common.errors import Undecodable

PROTOCOLS = ("resp2", "resp3")


async def test_status_is_for_the_tenant_only(broker: Broker) -> None:
    running, other = await begin(broker, submission(rid=RID), submission(rid=OTHER, tenant="acme"))
    assert other.entry.rid == OTHER
    mine, foreign, unknown = await broker.status([RID, OTHER, "00" + "ee" * 16], "default")
    assert mine is not None
    assert (mine.state, mine.owner, mine.epoch) == ("running", "w1", 1)
    assert (mine.accepted_at_ms, mine.deadline_at_ms) == (running.accepted_at_ms, running.deadline_at_ms)
    assert foreign is None
    assert unknown is None


async def test_a_result_disappears_after_its_time(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, result_ttl_ms=1000))
    await broker.finish([finish(delivery)])
    raw.pexpire(f"{T}:r:{RID}", 1)
    await eventually(lambda: not raw.exists(f"{T}:r:{RID}"))
    assert await broker.status([RID], "default") == [None]
    assert await broker.cancel([RID], "default") == [None]
    # Then the rid is as good as new.
    assert (await broker.submit([submission("other", rid=RID)]))[0].outcome == "accepted"


async def test_a_record_written_by_hand_is_named(broker: Broker, raw: Any) -> None:
    raw.set(f"{T}:r:{RID}", b"garbage")
    with pytest.raises(Undecodable, match="by hand"):
        await broker.status([RID], "default")
    assert await broker.cancel([RID], "default") == [None]
    with pytest.raises(Undecodable, match="by hand"):
        await broker.submit([submission(rid=RID)])


async def test_events_from_a_place_on(broker: Broker) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    await broker.emit([emission(delivery, seq, b"x") for seq in range(1, 12)])
    await broker.finish([finish(delivery)])
    ids = ["1-0", *(f"1-{seq}" for seq in range(1, 12)), "2-1"]
    assert [frame.id for frame in await broker.events(RID)] == ids
    assert [frame.id for frame in await broker.events(RID, "1-9")] == ["1-10", "1-11", "2-1"]
    assert [frame.id for frame in await broker.events(RID, "1-11")] == ["2-1"]
    assert await broker.events(RID, "2-1") == []
    assert await broker.events(OTHER) == []


async def test_at_most_a_thousand_events_at_once(broker: Broker) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    await broker.emit([emission(delivery, seq, b"x") for seq in range(1, 1101)])
    first = await broker.events(RID)
    assert len(first) == 1000
    rest = await broker.events(RID, first[-1].id)
    assert [frame.seq for frame in first + rest] == list(range(1101))
