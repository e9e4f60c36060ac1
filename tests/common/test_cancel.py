"""Cancelling."""

from __future__ import annotations

from typing import Any

from broker_parts import begin, finish, submission, take_all
from server_view import (
    OTHER,
    RID,
    Channel,
    T,
    assert_drained,
    everything,
    log_of,
)
from streamfleet_common.broker import Broker
from streamfleet_common.schemas import End

PROTOCOLS = ("resp2", "resp3")


async def test_cancel_in_every_state(broker: Broker, raw: Any) -> None:
    running, done = await begin(broker, submission(stream=True), submission())
    await broker.finish([finish(done)])
    queued = submission(stream=True, tenant="default")
    foreign = submission(tenant="acme")
    await broker.submit([queued, foreign])
    rids = [
        queued.envelope.rid,
        running.entry.rid,
        done.entry.rid,
        foreign.envelope.rid,
        OTHER,
        "no|rid",
    ]
    channels = [Channel(raw, rid) for rid in rids[:3]]
    assert await broker.cancel(rids, "default") == ["cancelled", "cancelled", "done", None, None, None]
    assert [len(channel.messages()) for channel in channels] == [1, 1, 0]
    # Once more, and twice in a batch: the same answers, and nothing new.
    before = everything(raw)
    assert await broker.cancel(rids[:3] * 2, "default") == ["cancelled", "cancelled", "done"] * 2
    assert everything(raw) == before

    for rid, epoch, attempts in ((rids[0], 1, 0), (rids[1], 2, 1)):
        (record,) = await broker.status([rid], "default")
        assert record is not None
        assert (record.state, record.epoch, record.attempts) == ("cancelled", epoch, attempts)
        assert record.end is not None
        event = record.end.event()
        assert isinstance(event, End)
        assert (event.state, event.attempt, event.finish_reason) == ("cancelled", attempts, "cancelled")
        assert event.error is not None
        assert event.error.code == "cancelled"
        assert log_of(raw, rid)[-1][0] == f"{epoch}-1"
    # The stranger's request stands, and nobody else's is left.
    assert [entry.rid for entry in await take_all(broker)] == [foreign.envelope.rid]
    assert raw.zrange(f"{T}:open", 0, -1) == [foreign.envelope.rid.encode()]
    assert await broker.cancel([foreign.envelope.rid], "acme") == ["cancelled"]
    assert_drained(raw)


async def test_cancel_twice_in_a_batch(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    channel = Channel(raw, RID)
    assert await broker.cancel([RID, RID], "default") == ["cancelled", "cancelled"]
    assert len(channel.messages()) == 1
    assert_drained(raw)
