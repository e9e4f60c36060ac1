"""Killed connections, vanished groups, refused users, no server at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from broker_parts import (
    CARD,
    START,
    begin,
    emission,
    finish,
    submission,
    take_all,
)
from eventually import eventually
from server_view import RID, T, events_of
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, End

pytestmark = pytest.mark.usefixtures("impatient")

# --- killed connections


async def test_killed_connections(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    for seq in range(1, 4):
        raw.client_kill_filter(_type="normal", skipme=True)
        assert await broker.emit([emission(delivery, seq, b"x")]) == [True]
    raw.client_kill_filter(_type="normal", skipme=True)
    assert (await broker.depth()).open == 1
    raw.client_kill_filter(_type="normal", skipme=True)
    assert await broker.finish([finish(delivery)]) == [True]
    assert events_of(raw) == ["1-0", "1-1", "1-2", "1-3", "2-1"]


def blocked_clients(raw: Any) -> int:
    return int(raw.info("clients")["blocked_clients"])


async def test_a_kill_under_a_blocked_read(broker: Broker, raw: Any) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=10_000))
    await eventually(lambda: blocked_clients(raw) == 1)
    raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(BrokerUnavailable):
        await reading
    await broker.submit([submission(rid=RID)])
    assert [entry.rid for entry in await take_all(broker)] == [RID]


async def test_a_blocked_read_wakes_for_work(broker: Broker, raw: Any) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=500))
    await eventually(lambda: blocked_clients(raw) == 1)
    await broker.submit([submission(rid=RID, lane="bulk")])
    assert [entry.rid for entry in await reading] == [RID]


async def test_many_calls_on_few_connections(redis_url: str) -> None:
    connections = Connections.open(redis_url, max_connections=2)
    broker = Broker(connections, "q")
    answers = await asyncio.gather(*(broker.submit([submission()]) for _ in range(100)))
    assert sorted(answer.depth for (answer,) in answers) == list(range(1, 101))
    await connections.close()


# --- vanished keys


@pytest.mark.parametrize("harm", ["flushall", "delete", "destroy"])
async def test_groups_that_vanish_under_a_blocked_read(broker: Broker, raw: Any, harm: str) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=500))
    await eventually(lambda: blocked_clients(raw) == 1)
    if harm == "flushall":
        raw.flushall()
    elif harm == "delete":
        raw.delete(f"{T}:s:normal")
    else:
        raw.xgroup_destroy(f"{T}:s:normal", "w")
    await broker.submit([submission(rid=RID)])
    entries = await reading
    for _ in range(2):  # one read to find the group gone, one behind it
        entries += await take_all(broker)
    assert [entry.rid for entry in entries] == [RID]
    (delivery,) = await broker.start("w1", entries, START)
    assert isinstance(delivery, Delivery)
    assert await broker.finish([finish(delivery)]) == [True]


async def test_everything_lost_while_work_runs(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    raw.flushall()
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    assert (await broker.sweep()).expired == 0
    assert raw.keys("*") == [f"{T}:sweep".encode()]


async def test_a_lane_of_another_kind_is_told(broker: Broker, raw: Any) -> None:
    raw.delete(f"{T}:s:normal")
    raw.set(f"{T}:s:normal", "x")
    with pytest.raises(BrokerUnavailable) as caught:
        await take_all(broker)
    assert caught.value.reason == "refused"


async def test_flushed_scripts_are_sent_again(broker: Broker, raw: Any) -> None:
    raw.script_flush()
    await broker.submit([submission(rid=RID, stream=True), submission(deadline_ms=1)])
    entries = await take_all(broker)
    raw.script_flush()
    delivery, _ = await broker.start("w1", entries, START)
    assert isinstance(delivery, Delivery)
    raw.script_flush()
    assert await broker.emit([emission(delivery, 1, b"x")]) == [True]
    raw.script_flush()
    assert await broker.finish([finish(delivery)]) == [True]
    raw.script_flush()
    assert await broker.cancel([RID], "default") == ["done"]
    raw.script_flush()
    await broker.sweep()
    raw.script_flush()
    await broker.announce(CARD)
    assert await broker.cards() == [CARD]


# --- users


def url_for(redis_url: str, user: str, password: str) -> str:
    return redis_url.replace("redis://", f"redis://{user}:{password}@")


@pytest.fixture
def user(raw: Any) -> Iterator[Callable[[list[str]], None]]:
    """Makes the user `u` with the password `s3cret` and these commands."""

    def make(commands: list[str]) -> None:
        raw.acl_setuser(
            "u", enabled=True, passwords=["+s3cret"], keys=["{q:q:0}*"], reset=True, commands=commands
        )

    yield make
    raw.acl_deluser("u")


async def forbidden(url: str, words: str) -> None:
    connections = Connections.open(url)
    broker = Broker(connections, "q")
    calls: list[Callable[[], Awaitable[Any]]] = [
        broker.create_groups,
        broker.depth,
        broker.cards,
        broker.ping,
        lambda: broker.submit([submission()]),
        lambda: broker.read("w1", LANES, 1, block_ms=None),
    ]
    for call in calls:
        with pytest.raises(BrokerUnavailable) as caught:
            await call()
        assert caught.value.reason == "forbidden", caught.value
        assert words in str(caught.value)
        assert "s3cret" not in str(caught.value)
        assert "wrong" not in str(caught.value)
    await connections.close()


async def test_a_wrong_password(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["+@all"])
    await forbidden(url_for(redis_url, "u", "wrong"), "refuses the name or the password")
    await forbidden(url_for(redis_url, "nobody", "wrong"), "refuses the name or the password")


async def test_a_user_who_may_nothing(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["-@all", "+hello", "+auth"])
    await forbidden(url_for(redis_url, "u", "s3cret"), "refuses this user the command ")


async def test_a_server_that_wants_a_password(redis_url: str, raw: Any) -> None:
    raw.config_set("requirepass", "s3cret")
    try:
        await forbidden(redis_url, "wants a user and a password")
    finally:
        raw.config_set("requirepass", "")


async def test_keys_of_another_queue(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["+@all"])
    connections = Connections.open(url_for(redis_url, "u", "s3cret"))
    assert (await Broker(connections, "q").submit([submission()]))[0].outcome == "accepted"
    with pytest.raises(BrokerUnavailable) as caught:
        await Broker(connections, "other").submit([submission()])
    assert caught.value.reason == "forbidden"
    assert "refuses this user a key: its ACL must be of a role that may this, for this queue" in str(
        caught.value
    )
    await connections.close()


# --- servers


async def test_no_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connections = Connections.open(f"redis://:s3cret@127.0.0.1:{port}/0")
    broker = Broker(connections, "q")
    calls: list[Callable[[], Awaitable[Any]]] = [
        broker.create_groups,
        broker.depth,
        broker.cards,
        broker.queues,
        broker.ping,
        lambda: broker.submit([submission()]),
        lambda: broker.read("w1", LANES, 1, block_ms=None),
        lambda: broker.status([RID], "default"),
        lambda: broker.events(RID),
    ]
    for call in calls:
        with pytest.raises(BrokerUnavailable, match="is it running") as caught:
            await call()
        assert caught.value.reason == "unreachable"
        assert "s3cret" not in str(caught.value)
    await connections.close()


async def test_a_server_that_died_and_is_back(server: EmbeddedBroker, broker: Broker) -> None:
    await broker.submit([submission(rid=RID)])
    server.kill()
    with pytest.raises(BrokerUnavailable):
        await broker.submit([submission()])
    with pytest.raises(BrokerUnavailable):
        await take_all(broker)
    server.restart()
    # Whether the data came back is the server's business; all steps work again, without being told.
    await take_all(broker)
    one = submission()
    assert (await broker.submit([one]))[0].outcome == "accepted"
    assert one.envelope.rid in [entry.rid for entry in await take_all(broker)]


async def test_a_replica(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    raw.replicaof("127.0.0.1", 1)
    try:
        for call in (
            lambda: broker.submit([submission()]),
            lambda: broker.finish([finish(delivery, End(state="done"))]),
        ):
            with pytest.raises(BrokerUnavailable, match="primary") as caught:
                await call()
            assert caught.value.reason == "read_only"
    finally:
        raw.replicaof("NO", "ONE")
    assert await broker.finish([finish(delivery)]) == [True]
