"""Events of a running request, and the fence before them."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import altered, begin, delta, emission, finish, submission
from server_view import (
    RID,
    Channel,
    T,
    assert_drained,
    everything,
    log_of,
)
from streamfleet_common import codec
from streamfleet_common.broker import Broker

PROTOCOLS = ("resp2", "resp3")


async def test_emit_logs_and_publishes(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", stream=True))
    channel = Channel(raw, RID, "acme")
    bodies = [codec.encode(delta(text)) for text in "abc"]
    events = [emission(delivery, seq, body, "acme") for seq, body in enumerate(bodies, 1)]
    assert await broker.emit(events[:2]) == [True, True]
    assert await broker.emit(events[2:]) == [True]
    frames = [f"1-{seq} ".encode() + body for seq, body in enumerate(bodies, 1)]
    assert log_of(raw, RID)[1:] == [("1-1", frames[0]), ("1-2", frames[1]), ("1-3", frames[2])]
    assert channel.messages() == frames


async def test_emit_again_doubles_nothing(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    events = [emission(delivery, seq, b"body") for seq in (1, 2)]
    assert await broker.emit(events) == [True, True]
    before = everything(raw)
    assert await broker.emit(events) == [True, True]
    assert await broker.emit(events[:1] * 3) == [True, True, True]
    assert everything(raw) == before
    assert channel.messages() == [b"1-1 body", b"1-2 body"]


@pytest.mark.parametrize(
    "changes",
    [
        {"owner": "w2"},
        {"owner": "w"},
        {"owner": "w11"},
        {"epoch": 0},
        {"epoch": 2},
        {"epoch": 11},
        {"eid": "1-1"},
        {"eid": ""},
    ],
)
async def test_the_fence(broker: Broker, raw: Any, changes: dict[str, Any]) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    stranger = altered(delivery, **changes)
    before = everything(raw)
    assert await broker.emit([emission(stranger, 1, b"x"), emission(stranger, 1, b"")]) == [False, False]
    assert await broker.finish([finish(stranger)]) == [False]
    assert everything(raw) == before
    # The owner itself is not disturbed.
    assert await broker.emit([emission(delivery, 1, b"")]) == [True]
    assert await broker.finish([finish(delivery)]) == [True]


async def test_the_fence_before_and_after_a_run(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    record = raw.get(f"{T}:r:{RID}")
    raw.set(f"{T}:r:{RID}", record.replace(b"R", b"Q", 1).replace(b"|w1|", b"||", 1))
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    raw.set(f"{T}:r:{RID}", record)
    await broker.finish([finish(delivery)])
    before = everything(raw)
    assert await broker.emit([emission(delivery, 1, b"x"), emission(delivery, 1, b"")]) == [False, False]
    assert everything(raw) == before
    raw.delete(f"{T}:r:{RID}")
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]


async def test_an_emission_without_a_body_is_a_question(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    before = everything(raw)
    assert await broker.emit([emission(delivery, 0, b""), emission(delivery, 5, b"")]) == [True, True]
    assert everything(raw) == before
    assert channel.messages() == []


async def test_a_large_event_is_announced_and_read_from_the_log(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    largest = b"x" * (16 * 1024 - len(b"1-1 "))
    large = b"x" * 20_000
    assert (
        await broker.emit([emission(delivery, 1, largest), emission(delivery, 2, largest + b"x")])
        == [True] * 2
    )
    assert await broker.emit([emission(delivery, 3, large)]) == [True]
    assert channel.messages() == [b"1-1 " + largest, b"1-2 ", b"1-3 "]
    frames = await broker.events(RID)
    assert [frame.id for frame in frames] == ["1-0", "1-1", "1-2", "1-3"]
    assert [frame.body for frame in frames[1:]] == [largest, largest + b"x", large]


async def test_a_log_that_nobody_asked_for_does_not_stay(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, deadline_ms=5000, result_ttl_ms=1000))
    await broker.emit([emission(delivery, 1, b"x")])
    assert 0 < raw.pttl(f"{T}:ev:{RID}") <= 6000
    await broker.finish([finish(delivery)])
    assert_drained(raw)


async def test_a_deleted_log_does_not_come_back_for_good(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True, deadline_ms=5000, result_ttl_ms=1000))
    raw.delete(f"{T}:ev:{RID}")
    await broker.emit([emission(delivery, 1, b"x"), emission(delivery, 2, b"x")])
    assert 0 < raw.pttl(f"{T}:ev:{RID}") <= 6000
