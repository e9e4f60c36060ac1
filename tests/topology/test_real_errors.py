"""Every refusal of a real server, provoked: what it is taken for, and that work goes on once it is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker_parts import DONE, STREAMS, begin, finish, submission, take_all
from eventually import eventually
from streamfleet_common import calls as calls_module
from streamfleet_common.broker import Broker
from streamfleet_common.calls import Action, verdict
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import Keys
from topology.nodes import HOST, Node, free_port, until

T = Keys("q").tag


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(calls_module, "BUDGET_S", 0.0)


@pytest.fixture
def node(program: Path) -> Iterator[Node]:
    with Node(program) as made:
        yield made


@pytest.fixture
async def broker(node: Node) -> AsyncIterator[Broker]:
    connections = Connections.open(node.url)
    made = Broker(connections, "q")
    await made.create_groups()
    yield made
    await connections.close()


async def refused(broker: Broker, reason: str) -> BrokerUnavailable:
    """A submission is refused for this reason."""
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.submit([submission()])
    assert caught.value.reason == reason, caught.value
    return caught.value


async def accepted(broker: Broker) -> None:
    assert [answer.outcome for answer in await broker.submit([submission()])] == ["accepted"]


def refusals(node: Node, code: str) -> int:
    """How often the server has given this answer."""
    return int(node.info("errorstats").get(f"errorstat_{code}", {"count": 0})["count"])


# --- writes that a server does not take


async def test_too_few_replicas(node: Node, broker: Broker) -> None:
    (delivery,) = await begin(broker, submission())
    node.raw.config_set("min-replicas-to-write", 1)
    await refused(broker, "no_replicas")
    with pytest.raises(BrokerUnavailable):
        await broker.finish([finish(delivery)])
    node.raw.config_set("min-replicas-to-write", 0)
    await accepted(broker)
    assert await broker.finish([finish(delivery)]) == [True]


async def test_a_replica_that_comes_back_in_time(
    node: Node, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "BUDGET_S", 30.0)
    await accepted(broker)
    node.raw.config_set("min-replicas-to-write", 1)
    submitting = asyncio.create_task(broker.submit([submission()]))
    await eventually(lambda: refusals(node, "NOREPLICAS") >= 2)
    node.raw.config_set("min-replicas-to-write", 0)
    assert (await submitting)[0].outcome == "accepted"


async def test_a_disk_that_fails(node: Node, broker: Broker) -> None:
    node.raw.config_set("save", "3600 1")
    node.raw.set("a", 1)
    # Snapshots go to a file; this name is a folder.
    folder = Path(node.raw.config_get("dir")["dir"])
    (folder / "dump.rdb").mkdir()
    node.raw.bgsave()
    until(lambda: node.info("persistence")["rdb_last_bgsave_status"] == "err", "a snapshot that fails")
    error = await refused(broker, "cannot_persist")
    assert "disk" in str(error)
    node.raw.config_set("stop-writes-on-bgsave-error", "no")
    await accepted(broker)


async def test_full_memory(node: Node, broker: Broker) -> None:
    (delivery,) = await begin(broker, submission())
    node.raw.config_set("maxmemory", 1)
    await refused(broker, "out_of_memory")
    assert await broker.finish([finish(delivery)]) == [True]
    node.raw.config_set("maxmemory", 0)
    await accepted(broker)


async def test_scripts_that_were_forgotten(node: Node, broker: Broker) -> None:
    await accepted(broker)
    node.raw.script_flush()
    await accepted(broker)


# --- servers that are not there yet, or not at leisure


@pytest.mark.slow
async def test_loading(program: Path) -> None:
    with Node(program) as node:
        pipe = node.raw.pipeline(transaction=False)
        # A server that loads looks up after every 1024 commands.
        for number in range(40 * 1024):
            pipe.set(f"k{number}", "x")
        pipe.execute()
        node.kill()
        node.settings["key-load-delay"] = "100"  # µs: 0.1 s between two looks up
        node.start(wait=False)
        connections = Connections.open(node.url)
        broker = Broker(connections, "q")

        def loads() -> bool:
            try:
                node.raw.ping()
            except redis.BusyLoadingError:
                return True
            return False

        until(loads, "a load")
        assert (await refused(broker, "loading")).retryable
        with pytest.raises(BrokerUnavailable) as caught:
            await broker.read("w1", STREAMS, 1, block_ms=10)
        assert caught.value.reason == "loading"
        until(lambda: not loads(), "the end of the load")
        await broker.create_groups()
        await accepted(broker)
        await connections.close()


async def test_a_long_script(node: Node, broker: Broker) -> None:
    await accepted(broker)
    node.raw.config_set("busy-reply-threshold", 50)
    endless: Any = redis.Redis(host=HOST, port=node.port, socket_timeout=30)
    ended: list[Exception] = []

    def run() -> None:
        try:
            endless.eval("while true do end", 0)
        except redis.ResponseError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def is_busy() -> bool:
        try:
            node.raw.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)
        return False

    until(is_busy, "a busy server")
    await refused(broker, "busy")
    node.raw.execute_command("SCRIPT", "KILL")
    await asyncio.to_thread(thread.join)
    assert len(ended) == 1
    await accepted(broker)
    endless.close()


async def test_no_room_for_another_client(node: Node) -> None:
    node.raw.config_set("maxclients", 1)
    connections = Connections.open(node.url)
    await refused(Broker(connections, "q"), "unreachable")
    node.raw.config_set("maxclients", 100)
    await Broker(connections, "q").ping()
    await connections.close()


# --- servers that are no primary


async def test_demoted(node: Node, broker: Broker) -> None:
    await accepted(broker)
    node.raw.replicaof(HOST, 1)
    assert "primary" in str(await refused(broker, "read_only"))
    node.raw.config_set("replica-serve-stale-data", "no")
    await refused(broker, "read_only")  # MASTERDOWN
    with pytest.raises(redis.RedisError) as stale:
        node.raw.get("x")
    assert verdict(stale.value).action is Action.REDISCOVER
    node.raw.replicaof("NO", "ONE")
    await accepted(broker)


async def test_demoted_under_a_blocked_read(node: Node, broker: Broker) -> None:
    reading = asyncio.create_task(broker.read("w1", STREAMS, 1, block_ms=500))
    await eventually(lambda: int(node.info("clients")["blocked_clients"]) == 1)
    node.raw.replicaof(HOST, 1)
    with pytest.raises(BrokerUnavailable) as caught:
        await reading
    assert caught.value.reason == "read_only"
    node.raw.replicaof("NO", "ONE")
    await accepted(broker)
    assert len(await take_all(broker)) == 1


@pytest.mark.parametrize("harm", ["delete", "flushall"])
async def test_streams_that_vanish_under_a_blocked_read(node: Node, broker: Broker, harm: str) -> None:
    reading = asyncio.create_task(broker.read("w1", STREAMS, 1, block_ms=500))
    await eventually(lambda: int(node.info("clients")["blocked_clients"]) == 1)
    if harm == "delete":
        node.raw.delete(*node.raw.keys("*:s:*"))
    else:
        node.raw.flushall()
    entries = await reading
    await accepted(broker)
    for _ in range(2):
        entries += await take_all(broker)
    assert len(entries) == 1


# --- users


async def test_users(node: Node, broker: Broker) -> None:
    node.raw.acl_setuser("u", enabled=True, passwords=["+p"], commands=["+ping"], reset=True)
    await accepted(broker)
    for url, reason in (("u:p@", "forbidden"), ("u:wrong@", "forbidden"), ("nobody:p@", "forbidden")):
        connections = Connections.open(node.url.replace("//", f"//{url}"))
        await refused(Broker(connections, "q"), reason)
        await connections.close()
    node.raw.config_set("requirepass", "new")
    # A connection that is there stays what it is; a new one is refused.
    await accepted(broker)
    await broker._connections.rediscover()
    await refused(broker, "forbidden")
    node.raw.config_set("requirepass", "")
    await accepted(broker)


async def test_ends_go_on_after_each(node: Node, broker: Broker) -> None:
    (delivery,) = await begin(broker, submission())
    node.raw.client_kill_filter(_type="normal", skipme=True)
    assert await broker.finish([finish(delivery, DONE)]) == [True]


# --- clusters


def clustered(program: Path) -> Node:
    return Node(
        program,
        cluster_enabled="yes",
        cluster_port=str(free_port()),
        cluster_require_full_coverage="no",
        cluster_node_timeout="2000",
    )


async def test_one_node_that_holds_all_slots_is_enough(program: Path) -> None:
    with clustered(program) as node:
        connections = Connections.open(node.url)
        broker = Broker(connections, "q")
        error = await refused(broker, "cluster")  # CLUSTERDOWN: nobody holds the slot
        assert error.retryable
        node.raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in _state(node), "a cluster that is up")
        await broker.create_groups()
        (delivery,) = await begin(broker, submission())
        assert await broker.finish([finish(delivery)]) == [True]
        await connections.close()


async def test_a_slot_that_is_elsewhere(program: Path) -> None:
    with clustered(program) as node, clustered(program) as other:
        slot = int(node.raw.execute_command("CLUSTER", "KEYSLOT", T))
        other.raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        def met() -> bool:
            if b"cluster_known_nodes:1" in _state(node):  # a handshake that takes too long is given up
                node.raw.execute_command("CLUSTER", "MEET", HOST, other.port, other.settings["cluster-port"])
            return b"cluster_state:ok" in _state(node)

        until(met, "a cluster that is up")
        until(lambda: b"cluster_state:ok" in _state(other), "a cluster that is up")
        connections = Connections.open(node.url)
        broker = Broker(connections, "q")

        def is_moved() -> bool:
            try:
                node.raw.get(T)
            except redis.exceptions.MovedError:
                return True
            return False

        until(is_moved, "a redirection")
        error = await refused(broker, "cluster")
        assert str(slot) in str(error)
        assert "Sentinel" in str(error)
        # Half-way between two nodes: ASK from one, TRYAGAIN from the other.
        here, there = (str(_text(one.raw.execute_command("CLUSTER", "MYID"))) for one in (node, other))
        other.raw.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", here)
        node.raw.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", there)
        with pytest.raises(redis.exceptions.AskError) as ask:
            other.raw.get(T)
        assert verdict(ask.value).reason == "cluster"
        importing: Any = redis.Redis(host=HOST, port=node.port, single_connection_client=True)
        importing.execute_command("ASKING")
        with pytest.raises(redis.exceptions.TryAgainError) as again:
            importing.mget(f"{T}:1", f"{T}:2")
        assert verdict(again.value).action is Action.RETRY
        with pytest.raises(redis.exceptions.ClusterCrossSlotError) as crossed:
            other.raw.mget("a", "b")
        assert verdict(crossed.value).reason == "cluster"
        importing.close()
        await connections.close()


def _state(node: Node) -> bytes:
    answer: Any = node.raw.execute_command("CLUSTER", "INFO")
    return answer if isinstance(answer, bytes) else repr(answer).replace("'", "").replace(": ", ":").encode()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
