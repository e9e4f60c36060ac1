"""Reading work, before it is begun."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import START, begin, finish, submission, take_all
from server_view import (
    RID,
    T,
)
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Entry
from streamfleet_common.errors import InvalidRequest

PROTOCOLS = ("resp2", "resp3")


async def test_read_takes_lanes_and_counts(broker: Broker) -> None:
    batch = [submission(lane=lane) for lane in ("bulk", "high", "bulk", "high", "bulk")]
    await broker.submit(batch)
    entries = await broker.read("w1", ["high", "bulk"], 2, block_ms=None)
    assert [(entry.stream, entry.rid) for entry in entries] == [
        ("high", batch[1].envelope.rid),
        ("high", batch[3].envelope.rid),
        ("bulk", batch[0].envelope.rid),
        ("bulk", batch[2].envelope.rid),
    ]
    assert entries[0].payload == batch[1].payload
    assert await broker.read("w1", ["high", "normal"], 5, block_ms=None) == []
    assert [entry.rid for entry in await take_all(broker, "w2")] == [batch[4].envelope.rid]
    assert await take_all(broker) == []


async def test_what_was_submitted_before_the_groups_is_read(connections: Connections) -> None:
    broker = Broker(connections, "early")
    await broker.submit([submission(rid=RID)])
    await broker.create_groups()
    await broker.create_groups()
    assert [entry.rid for entry in await take_all(broker)] == [RID]


async def test_read_without_groups_makes_them(connections: Connections) -> None:
    broker = Broker(connections, "early")
    await broker.submit([submission(rid=RID)])
    assert await take_all(broker) == []
    assert [entry.rid for entry in await take_all(broker)] == [RID]


@pytest.mark.parametrize("block_ms", [None, 0])
async def test_read_need_not_wait(broker: Broker, block_ms: int | None) -> None:
    assert await broker.read("w1", ["normal"], 5, block_ms=block_ms) == []


async def test_given_shows_what_an_owner_has_not_ended(broker: Broker, raw: Any) -> None:
    assert await broker.given("w1") == []
    first, second = await begin(broker, submission(lane="bulk"), submission(lane="high"))
    await broker.submit([submission(rid=RID)])
    await take_all(broker, "w2")
    assert await broker.given("w1") == [second.entry, first.entry]
    assert [entry.rid for entry in await broker.given("w2")] == [RID]
    await broker.finish([finish(first)])
    assert await broker.given("w1") == [second.entry]
    # An entry that somebody deleted has no body any more; what is left is to let go of it.
    raw.xdel(f"{T}:s:high", second.entry.eid)
    (bare,) = await broker.given("w1")
    assert (bare.rid, bare.eid, bare.payload) == ("", second.entry.eid, b"")
    assert await broker.start("w1", [bare], START) == ["stray"]
    assert await broker.given("w1") == []
    assert raw.xlen(f"{T}:dead") == 0


@pytest.mark.parametrize("owner", ["", "a|b", "a\nb", "w" * 201])
async def test_an_owner_that_no_record_can_hold(broker: Broker, owner: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name a worker"):
        await broker.read(owner, ["normal"], 1, block_ms=None)
    with pytest.raises(InvalidRequest, match="cannot name a worker"):
        await broker.start(owner, [Entry(RID, "1-1", "normal", b"")], START)
    with pytest.raises(InvalidRequest, match="cannot name a worker"):
        await broker.take(owner, START, streams=["normal"], count=1)
