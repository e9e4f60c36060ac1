"""What a submit waits for before it says "accepted", with real disks and replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from broker_parts import submission
from chaos.proxy import ChaosProxy
from streamfleet_common import calls as calls_module
from streamfleet_common import confirmation
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.durability import check
from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.settings import Durability
from topology.nodes import HOST, Node, follows, until
from topology.parts import outcome

Open = Callable[[str], Connections]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(calls_module, "BUDGET_S", 0.0)


@pytest.fixture
async def connect() -> AsyncIterator[Open]:
    """Opens connections that are closed at the end."""
    opened: list[Connections] = []

    def open_(url: str) -> Connections:
        opened.append(Connections.open(url))
        return opened[-1]

    yield open_
    for connections in opened:
        await connections.close()


@pytest.fixture
def pair(program: Path) -> Iterator[tuple[Node, Node]]:
    """A primary and a replica that has all of it."""
    with Node(program) as first, Node(program, replicaof=f"{HOST} {first.port}") as second:
        until(lambda: follows(second), "a replica in step")
        # Only then are its acknowledgements counted.
        until(lambda: first.raw.wait(1, 100) == 1, "an acknowledgement")
        yield first, second


def quick_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmation, "CONFIRM_MS", 200)


def knows_waitaof(program: Path) -> bool:
    return ServerBinary.at(program).product == "valkey" or ServerBinary.at(program).version_info >= (7, 2)


# --- replicas


async def test_a_replica_that_has_it(pair: tuple[Node, Node], connect: Open) -> None:
    broker = Broker(connect(pair[0].url), "q", durability="replicated")
    one = submission()
    assert await outcome(broker, one) == "accepted"
    assert pair[1].raw.exists(broker.keys.record(one.envelope.rid))
    assert await outcome(broker, one) == "duplicate"


async def test_a_replica_that_is_stuck(
    pair: tuple[Node, Node], connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    quick_waits(monkeypatch)
    broker = Broker(connect(first.url), "q", durability="replicated")
    one = submission()
    second.freeze()
    with pytest.raises(BrokerUnavailable, match="submit it again with the same id") as caught:
        await broker.submit([one])
    assert caught.value.reason == "not_durable"
    assert caught.value.retryable
    # The script did run; and that it finds it done proves no more, on whatever connection.
    assert first.raw.exists(broker.keys.record(one.envelope.rid))
    assert await outcome(broker, one) == "not_durable"
    assert await outcome(Broker(connect(first.url), "q", durability="replicated"), one) == "not_durable"
    assert await outcome(Broker(connect(first.url), "q", durability="fast"), one) == "duplicate"
    second.thaw()
    until(lambda: first.raw.wait(1, 100) == 1, "an acknowledgement")
    assert await outcome(broker, one) == "duplicate"
    assert second.raw.exists(broker.keys.record(one.envelope.rid))


async def test_no_replica(program: Path, connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_waits(monkeypatch)
    with Node(program) as node:
        broker = Broker(connect(node.url), "q", durability="replicated")
        assert await outcome(broker, submission()) == "not_durable"


async def test_many_at_once_are_confirmed_in_batches(
    pair: tuple[Node, Node], connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "BATCH", 10)
    broker = Broker(connect(pair[0].url), "q", durability="replicated")
    many = [submission() for _ in range(35)]
    assert {answer.outcome for answer in await broker.submit(many)} == {"accepted"}
    assert pair[1].raw.exists(*(broker.keys.record(one.envelope.rid) for one in many)) == 35


# --- disks


async def test_a_disk_that_has_it(program: Path, connect: Open) -> None:
    with Node(program, appendfsync="always") as node:
        broker = Broker(connect(node.url), "q", durability="safe")
        one = submission()
        assert await outcome(broker, one) == "accepted"
        node.kill()
        node.start()
        assert await outcome(broker, one) == "duplicate"


async def test_a_disk_that_is_synced_now_and_then(
    program: Path, connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_waits(monkeypatch)
    with Node(program, appendfsync="everysec") as node:
        broker = Broker(connect(node.url), "q", durability="safe")
        if not knows_waitaof(program):
            with pytest.raises(BrokerUnavailable, match="knows no WAITAOF") as caught:
                await broker.submit([submission()])
            assert caught.value.reason == "not_durable"
            return
        monkeypatch.setattr(confirmation, "CONFIRM_MS", 4000)
        assert await outcome(Broker(connect(node.url), "q", durability="safe"), submission()) == "accepted"


@pytest.mark.parametrize("settings", [{"appendonly": "no"}, {"appendfsync": "no"}])
async def test_a_disk_that_is_not_synced(
    program: Path, connect: Open, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    quick_waits(monkeypatch)
    with Node(program, **settings) as node:
        broker = Broker(connect(node.url), "q", durability="safe")
        assert await outcome(broker, submission()) == "not_durable"


# --- what may happen on the way


async def test_a_lost_reply(pair: tuple[Node, Node], connect: Open) -> None:
    async with ChaosProxy(pair[0].port) as proxy:
        broker = Broker(connect(proxy.url), "q", durability="replicated")
        assert await outcome(broker, submission()) == "accepted"
        proxy.drop_next_reply(b"WAIT")
        one = submission()
        assert await outcome(broker, one) == "duplicate"
        assert proxy.lost == 1
        assert pair[1].raw.exists(broker.keys.record(one.envelope.rid))


async def test_forgotten_scripts_and_full_memory(pair: tuple[Node, Node], connect: Open) -> None:
    first = pair[0]
    broker = Broker(connect(first.url), "q", durability="replicated")
    one = submission()
    first.raw.script_flush()
    assert await outcome(broker, one) == "accepted"
    first.raw.config_set("maxmemory", 1)
    assert await outcome(broker, submission()) == "out_of_memory"


async def test_a_user_who_may_not_wait(pair: tuple[Node, Node], connect: Open) -> None:
    first = pair[0]
    first.raw.acl_setuser(
        "u", enabled=True, passwords=["+p"], keys=["*"], reset=True, commands=["+@all", "-wait"]
    )
    broker = Broker(connect(first.url.replace("//", "//u:p@")), "q", durability="replicated")
    with pytest.raises(BrokerUnavailable, match="did not confirm") as caught:
        await broker.submit([submission()])
    assert caught.value.reason == "not_durable"


# --- what a server says of itself


async def found(level: Durability, connections: Connections) -> list[tuple[str, str]]:
    return [(finding.severity, finding.setting) for finding in await check(connections, level)]


async def test_a_lone_server(program: Path, connect: Open) -> None:
    with Node(program, appendfsync="always") as node:
        connections = connect(node.url)
        assert await found("fast", connections) == []
        assert await found("safe", connections) == []
        assert await found("replicated", connections) == [
            ("refuse", "connected_slaves"),
            ("warn", "min-replicas-to-write"),
        ]
        node.raw.config_set("appendfsync", "everysec")
        assert await found("safe", connections) == (
            [("warn", "appendfsync")] if knows_waitaof(program) else [("refuse", "waitaof")]
        )
        node.raw.config_set("appendonly", "no")
        assert await found("fast", connections) == [("warn", "appendonly")]
        assert await found("safe", connections) == [("refuse", "appendonly")]
        node.raw.config_set("maxmemory-policy", "allkeys-lru")
        node.raw.config_set("maxmemory", "100mb")
        node.raw.config_set("client-output-buffer-limit", "pubsub 0 0 0")
        assert await found("fast", connections) == [
            ("refuse", "maxmemory-policy"),
            ("warn", "client-output-buffer-limit"),
            ("warn", "appendonly"),
        ]


async def test_a_pair(pair: tuple[Node, Node], connect: Open) -> None:
    first, second = pair
    connections = connect(first.url)
    first.raw.config_set("min-replicas-to-write", 1)
    assert await found("replicated", connections) == []
    first.raw.config_set("min-replicas-max-lag", 60)
    assert await found("replicated", connections) == [("warn", "min-replicas-max-lag")]
    assert ("refuse", "role") in await found("fast", connect(second.url))


async def test_a_server_that_tells_little(program: Path, connect: Open) -> None:
    with Node(program) as node:
        node.raw.acl_setuser(
            "u", enabled=True, passwords=["+p"], keys=["*"], reset=True, commands=["+@all", "-config"]
        )
        node.raw.acl_setuser(
            "v", enabled=True, passwords=["+p"], keys=["*"], reset=True, commands=["+ping", "+wait"]
        )
        u, v = (connect(node.url.replace("//", f"//{name}:p@")) for name in "uv")
        assert await found("fast", u) == [("warn", "acl")]
        (finding,) = await check(u, "fast")
        assert "CONFIG GET" in finding.words
        assert "INFO" not in finding.words
        assert await found("replicated", u) == [("refuse", "connected_slaves"), ("warn", "acl")]
        assert await found("replicated", v) == [("warn", "acl")]
        assert await found("safe", v) == [("refuse", "waitaof"), ("warn", "acl")]
        node.kill()
        with pytest.raises(BrokerUnavailable):
            await check(u, "fast")


async def test_level_fast_sends_nothing_more(program: Path, connect: Open) -> None:
    with Node(program) as node:
        broker: Broker = Broker(connect(node.url), "q", durability="fast")
        assert await outcome(broker, submission()) == "accepted"
        assert not node.raw.exists(f"{broker.keys.tag}:mark")
        assert "cmdstat_wait" not in node.info("commandstats")
