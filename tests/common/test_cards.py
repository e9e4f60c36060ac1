"""Cards of workers, queues and their depth."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from broker_parts import START, begin, card, finish, submission, take_all
from eventually import eventually
from server_view import (
    RID,
    T,
    now_ms,
)
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.depth import MAX_QUEUE_DEPTH, Depth
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import Keys

PROTOCOLS = ("resp2", "resp3")


async def test_cards_are_shown_and_taken_down(broker: Broker, raw: Any) -> None:
    assert await broker.cards() == []
    await broker.announce(card("w2"))
    await broker.announce(card("w1"))
    assert await broker.cards() == [card("w1"), card("w2")]
    await broker.announce(card("w1", capacity=5, state="draining"))
    assert (await broker.cards())[0] == card("w1", capacity=5, state="draining")
    await broker.announce(card("w1"), life_ms=0)
    assert await broker.cards() == [card("w2")]
    assert raw.hkeys(f"{T}:workers") == [b"w2"]


async def test_a_card_that_is_not_refreshed_disappears(broker: Broker, raw: Any) -> None:
    await broker.announce(card("w2"))
    await broker.announce(card("w1"), life_ms=1)
    until = int(raw.hget(f"{T}:workers", "w1").partition(b"|")[0])
    await eventually(lambda: now_ms(raw) > until)
    assert await broker.cards() == [card("w2")]
    await broker.announce(card("w2"))
    assert raw.hkeys(f"{T}:workers") == [b"w2"]


async def test_a_card_that_cannot_be_read_is_left_out(broker: Broker, raw: Any) -> None:
    far = now_ms(raw) + 60_000
    await broker.announce(card("w1"))
    good = raw.hget(f"{T}:workers", "w1").partition(b"|")[2]
    for name, value in {
        "far version": f"{far}|".encode() + msgpack.packb({**msgpack.unpackb(good), "v": 9}),
        "garbage": f"{far}|".encode() + b"\xc1",
        "invalid": f"{far}|".encode() + msgpack.packb({"v": 1, "worker": "x"}),
    }.items():
        raw.hset(f"{T}:workers", name, value)
    assert await broker.cards() == [card("w1")]
    raw.hset(f"{T}:workers", "no time", b"soon|" + good)
    raw.hset(f"{T}:workers", "nothing", b"")
    assert await broker.cards() == [card("w1")]


async def test_a_card_without_a_time_is_swept(broker: Broker, raw: Any) -> None:
    raw.hset(f"{T}:workers", "no time", b"garbage")
    await broker.announce(card("w1"))
    assert raw.hkeys(f"{T}:workers") == [b"w1"]


async def test_queues_are_known_once_announced(broker: Broker, connections: Connections, raw: Any) -> None:
    assert await broker.queues() == []
    await Broker(connections, "b").announce(card())
    before = now_ms(raw)
    await Broker(connections, "a").announce(card())
    assert await broker.queues() == ["a", "b"]
    assert before <= int(raw.hget("streamfleet:queues", "a")) <= now_ms(raw)


async def test_queues_and_shards_keep_apart(connections: Connections, raw: Any) -> None:
    brokers = [Broker(connections, "a"), Broker(connections, "b"), Broker(connections, "a", shard=1)]
    for broker in brokers:
        await broker.create_groups()
        assert (await broker.submit([submission(rid=RID)]))[0].depth == 1
    assert await brokers[0].cancel([RID], "default") == ["cancelled"]
    assert [(await broker.depth()).open for broker in brokers] == [0, 1, 1]


async def test_depth(broker: Broker, connections: Connections) -> None:
    assert await Broker(connections, "nobody").depth() == Depth(0, 0, MAX_QUEUE_DEPTH, 0)
    await begin(broker, submission(lane="high"), submission(), submission(lane="bulk"))
    await broker.submit([submission(), submission()])
    await broker.announce(card(max_queue_depth=9))
    depth = await broker.depth()
    assert depth == Depth(queued=2, running=3, limit=9, dead=0)
    assert depth.open == 5


async def test_depth_of_a_key_of_another_kind(broker: Broker, raw: Any) -> None:
    raw.set(f"{T}:control", "x")
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.depth()
    assert caught.value.reason == "refused"


async def test_names_belong_to_the_shard(broker: Broker, raw: Any, keys: Keys) -> None:
    (delivery,) = await begin(broker, submission(stream=True))
    raw.xadd(keys.stream("high"), {"x": "y"})
    await broker.start("w1", await take_all(broker), START)
    await broker.finish([finish(delivery)])
    await broker.announce(card())
    others = [key for key in raw.keys("*") if not key.startswith(keys.tag.encode() + b":")]
    assert others == [b"streamfleet:queues"]
