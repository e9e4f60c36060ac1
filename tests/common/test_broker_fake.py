"""The scripts in the in-process server of the unit tests, which knows no script flags."""

from __future__ import annotations

from typing import Any

import pytest
from fakeredis import FakeAsyncRedis, FakeServer

from broker_parts import DONE, START, Recorder, begin, delta, emission, finish, submission, take_all
from eventually import eventually
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery
from streamfleet_common.depth import Depth
from streamfleet_common.keys import LETTERS
from streamfleet_common.schemas import End
from streamfleet_common.subscriber import Subscriber

RID = "00" + "ab" * 16


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
