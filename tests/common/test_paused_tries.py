"""What can happen to a request while it waits for its next try."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import (
    START,
    begin,
    emission,
    finish,
    retry,
    submission,
)
from server_view import (
    RID,
    Channel,
    T,
    assert_drained,
    everything,
    now_ms,
    record_of,
)
from silence import sweep, wake
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery
from streamfleet_common.schemas import Retry

MINUTE_MS = 60_000


@pytest.fixture
async def waiting(broker: Broker, raw: Any) -> Delivery:
    """What was begun before the request went to wait for its next try."""
    one = submission(rid=RID, stream=True, retry=Retry(backoff_ms=MINUTE_MS))
    (delivery,) = await begin(broker, one)
    await broker.finish([retry(delivery)])
    assert raw.zcard(f"{T}:later") == 1
    return delivery


async def test_it_can_be_cancelled(broker: Broker, raw: Any, waiting: Delivery) -> None:
    channel = Channel(raw, RID)
    assert await broker.cancel([RID], "acme") == [None]
    assert await broker.cancel([RID], "default") == ["cancelled"]
    record = record_of(raw)
    assert (record.state, record.epoch, record.attempts) == ("cancelled", 3, 1)
    assert len(channel.messages()) == 1
    # The payload is not kept with the result.
    assert len(raw.get(f"{T}:r:{RID}").split(b"\n")) == 2
    assert_drained(raw)


async def test_it_can_expire(broker: Broker, raw: Any, waiting: Delivery) -> None:
    raw.zadd(f"{T}:open", {RID: now_ms(raw) - 1})
    assert (await sweep(broker, raw)).expired == 1
    assert record_of(raw).state == "expired"
    assert_drained(raw)


async def test_overdue_and_due_at_once_it_expires(broker: Broker, raw: Any, waiting: Delivery) -> None:
    raw.zadd(f"{T}:open", {RID: now_ms(raw) - 1})
    wake(raw)
    assert (await sweep(broker, raw)).expired == 1
    assert record_of(raw).state == "expired"
    assert_drained(raw)


async def test_its_old_owner_has_no_say_in_it(broker: Broker, raw: Any, waiting: Delivery) -> None:
    before = everything(raw)
    assert await broker.emit([emission(waiting, 1, b"x")]) == [False]
    assert await broker.finish([finish(waiting), retry(waiting)]) == [False, False]
    assert (await broker.renew("w1", [waiting])).ours == [False]
    assert await broker.release([waiting, waiting.entry]) == [False, False]
    assert await broker.start("w1", [waiting.entry], START) == ["gone"]
    assert everything(raw) == before


async def test_a_lost_record_does_not_wait_for_ever(broker: Broker, raw: Any, waiting: Delivery) -> None:
    raw.delete(f"{T}:r:{RID}")
    wake(raw)
    await sweep(broker, raw)
    assert raw.zcard(f"{T}:later") == raw.zcard(f"{T}:open") == 0
