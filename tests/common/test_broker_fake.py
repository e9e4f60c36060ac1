"""The scripts in the in-process server of the unit tests.

It knows no script flags, no idle times of what is pending, gives scripts another shape of XREADGROUP's reply
than real servers do, and no `redis.sha1hex`: sweeps of lost leases, `take` and sub-lanes are tested on a real
server only.
"""

from __future__ import annotations

from typing import Any

import pytest
from fakeredis import FakeAsyncRedis, FakeServer

from broker_parts import (
    DONE,
    START,
    Recorder,
    begin,
    begin_waiting,
    delta,
    emission,
    finish,
    retry,
    submission,
    take_all,
)
from eventually import eventually
from server_view import OTHER, RID
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Swept
from streamfleet_common.depth import Depth
from streamfleet_common.keys import LETTERS
from streamfleet_common.schemas import End, Retry, Usage
from streamfleet_common.shares import EVERYBODY, Share
from streamfleet_common.subscriber import Subscriber


@pytest.fixture
def connections() -> Connections:
    server = FakeServer()
    return Connections(
        "redis://fake",
        commands=FakeAsyncRedis(server=server),
        reader=FakeAsyncRedis(server=server),
        pubsub=FakeAsyncRedis(server=server),
    )


@pytest.fixture
async def broker(connections: Connections) -> Broker:
    made = Broker(connections, "q", script_flags=False)
    await made.create_groups()
    return made


@pytest.fixture
def raw(connections: Connections) -> Any:
    return connections.commands


async def assert_drained(broker: Broker, raw: Any) -> None:
    assert await raw.zcard(broker.keys.open) == 0
    for stream in LETTERS:
        assert await raw.xlen(broker.keys.stream(stream)) == 0
    for key in (*await raw.keys("*:r:*"), *await raw.keys("*:ev:*")):
        assert await raw.pttl(key) > 0


async def test_a_life(broker: Broker, connections: Connections, raw: Any) -> None:
    subscriber = Subscriber(connections)
    ear = Recorder()
    await subscriber.subscribe([(broker.keys.channel("default", RID), ear)])
    one = submission(rid=RID, stream=True)
    assert [answer.outcome for answer in await broker.submit([one, one])] == ["accepted", "duplicate"]
    entries = await take_all(broker)
    (delivery,) = await broker.start("w1", entries, START)
    assert isinstance(delivery, Delivery)
    assert (delivery.epoch, delivery.attempts, delivery.deadline_at_ms) == (
        1,
        1,
        delivery.accepted_at_ms + 600_000,
    )
    body = codec.encode(delta())
    assert await broker.emit([emission(delivery, 1, body)] * 2) == [True, True]
    assert await broker.finish([finish(delivery)]) == [True]
    assert await broker.finish([finish(delivery)]) == [True]
    await eventually(lambda: len(ear.messages) == 3)
    assert [message.partition(b" ")[0].partition(b",")[0] for message in ear.messages] == [
        b"1-0",
        b"1-1",
        b"2-1",
    ]
    assert [frame.id for frame in await broker.events(RID)] == ["1-0", "1-1", "2-1"]
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert record.end is not None
    assert isinstance(record.end.event(), End)
    assert record.end.body == codec.encode(DONE)
    await assert_drained(broker, raw)
    await subscriber.close()


async def test_the_fences(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    assert await broker.start("w2", [delivery.entry], START) == ["lost"]
    assert await broker.cancel([RID], "acme") == [None]
    assert await broker.cancel([RID], "default") == ["cancelled"]
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    assert await broker.start("w1", [delivery.entry], START) == ["gone"]
    await assert_drained(broker, raw)


async def test_limits_and_conflicts(broker: Broker) -> None:
    batch = [submission(rid=RID), submission("Bye", rid=RID), submission(), submission()]
    answers = await broker.submit(batch, max_queue_depth=2)
    assert [answer.outcome for answer in answers] == ["accepted", "conflict", "accepted", "full"]
    assert await broker.depth() == Depth(2, 0, 1024, 0)


async def test_garbage(broker: Broker, raw: Any) -> None:
    await raw.xadd(broker.keys.stream("normal"), {"x": "y"})
    assert await broker.start("w1", await take_all(broker), START) == ["stray"]
    assert await raw.xlen(broker.keys.dead) == 1
    await assert_drained(broker, raw)


async def test_deadlines(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, deadline_ms=1)])
    ended = 0
    while not ended:
        ended = (await broker.sweep()).expired
    assert ended == 1
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert record.state == "expired"
    await assert_drained(broker, raw)


async def test_cards(broker: Broker) -> None:
    limits = Limits(max_batch_size=1, max_seq_len=1, max_queue_depth=5, max_request_bytes=1)
    card = Card(worker="w1", queue="q", model="m", limits=limits)
    await broker.announce(card)
    assert await broker.cards() == [card]
    assert (await broker.depth()).limit == 5
    await broker.announce(card, life_ms=0)
    assert await broker.cards() == []


async def test_work_that_goes_back(broker: Broker, raw: Any) -> None:
    first, second = await begin(broker, submission(rid=RID, stream=True), submission())
    await broker.submit([submission(rid=OTHER)])
    assert (await broker.renew("w1", [first, second])).ours == [True, True]
    assert await broker.release([first]) == [True]
    assert await broker.finish([retry(second)]) == [True]
    assert (await broker.renew("w1", [first, second])).ours == [False, False]
    assert await broker.emit([emission(first, 1, b"x")]) == [False]
    deliveries = await begin_waiting(broker, "w2")
    assert {one.entry.rid: (one.epoch, one.attempts) for one in deliveries} == {
        RID: (3, 2),
        second.entry.rid: (3, 2),
        OTHER: (1, 1),
    }
    assert await broker.finish([finish(one) for one in deliveries]) == [True] * 3
    await assert_drained(broker, raw)


async def test_a_pause_before_the_next_try(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, retry=Retry(backoff_ms=60_000)))
    assert await broker.finish([retry(delivery)]) == [True]
    assert await take_all(broker) == []
    assert await raw.zcard(broker.keys.later) == 1
    await raw.zadd(broker.keys.later, {RID: 1})
    await broker.sweep()
    (again,) = await begin_waiting(broker, "w2")
    assert (again.epoch, again.attempts) == (4, 2)
    assert await broker.cancel([RID], "default") == ["cancelled"]
    await assert_drained(broker, raw)


async def test_workers_that_are_lost(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    for number in range(4):
        (delivery,) = await begin_waiting(broker, f"w{number}")
        assert (delivery.attempts, delivery.crashes) == (number + 1, number)
        assert (await broker.hand_back(f"w{number}", crashed=True)).requests == 1
        assert await broker.finish([finish(delivery)]) == [False]
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert (record.state, record.crashes, record.solo_losses) == ("dead", 4, 2)
    assert (await broker.depth()).dead == 1
    await assert_drained(broker, raw)


async def test_a_sweep_leaves_the_living_alone(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    assert (await broker.sweep()).grace
    await raw.hset(broker.keys.sweep, "grace_until", 0)
    assert await broker.sweep() == Swept()
    assert await broker.finish([finish(delivery)]) == [True]


async def test_tenants(broker: Broker, raw: Any) -> None:
    await broker.set_shares({"acme": Share(2), EVERYBODY: Share(0, 0, 200)})
    batch = [submission(tenant=tenant) for tenant in ("acme", "beta", "acme", "acme", "beta")]
    assert [answer.reason for answer in await broker.submit(batch)] == [
        *("", "", ""),
        "tenant_requests",
        "tenant_budget",
    ]
    assert await broker.open_of("acme") == (2, 2 * batch[0].tokens)
    entries = await take_all(broker)
    deliveries = [one for one in await broker.start("w1", entries, START) if isinstance(one, Delivery)]
    end = DONE.model_copy(update={"usage": Usage(prompt_tokens=5, completion_tokens=7)})
    for _ in range(2):
        assert await broker.finish([finish(one, end) for one in deliveries]) == [True] * 3
    assert [(one.tenant, one.requests, one.tokens) for one in await broker.usage()] == [
        ("acme", 2, 24),
        ("beta", 1, 12),
    ]
    assert not await raw.exists(broker.keys.tenants)
    await assert_drained(broker, raw)


async def test_room_in_tokens(broker: Broker) -> None:
    limits = Limits(
        max_batch_size=1, max_seq_len=1, max_queue_depth=5, max_queue_tokens=200, max_request_bytes=1
    )
    await broker.announce(Card(worker="w1", queue="q", model="m", limits=limits))
    answers = await broker.submit([submission(), submission()])
    assert [(answer.outcome, answer.reason) for answer in answers] == [("accepted", ""), ("full", "tokens")]
