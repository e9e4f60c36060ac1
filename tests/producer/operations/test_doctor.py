"""Each check of the doctor fails once on a real server, and passes again when it is mended as it says."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from broker_parts import START, card, submission
from command import environment
from server_view import OTHER, RID, T, now_ms
from silence import age, backdate
from streamfleet_common import acl, durability
from streamfleet_common.connections import Connections
from streamfleet_common.errors import ModelNotFound
from streamfleet_common.settings import Durability
from streamfleet_producer.cli.app import app
from streamfleet_producer.cli.doctor import lines_of
from streamfleet_producer.operations import queue_checks, server_checks, server_facts
from streamfleet_producer.operations.checkup import Check
from streamfleet_producer.operations.doctor import examine
from streamfleet_producer.operations.operator_broker import OperatorBroker
from streamfleet_producer.operations.queue_facts import Consumer, Inspector, StreamFacts
from streamfleet_producer.operations.server_facts import ServerFacts, ask_server

GOOD = {"maxmemory": "1gb", "maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
CHANGED = (
    *GOOD,
    *("timeout", "tcp-keepalive", "client-output-buffer-limit", "min-replicas-to-write"),
    "min-string-size-avoid-copy-reply",
)
"""Settings that some test changes."""


@pytest.fixture(autouse=True)
def few_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a hundred of them each time would take most of the time of these tests."""
    monkeypatch.setattr(server_facts, "PINGS", 3)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    """A plain client of the server, whose settings are put back in the end."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        before = client.config_get(*CHANGED)
        for name, value in GOOD.items():
            client.config_set(name, value)
        client.slowlog_reset()
        client.config_resetstat()
        yield client
        client.replicaof("NO", "ONE")
        for name, value in before.items():
            client.config_set(name, value)


@pytest.fixture
async def connections(raw: Any, redis_url: str) -> AsyncIterator[Connections]:
    opened = Connections.open(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
async def broker(connections: Connections) -> OperatorBroker:
    """The queue `q` with one worker that waits for work, and has swept."""
    made = OperatorBroker(connections, "q")
    await made.announce(card("w1", max_queue_depth=10, version="1.0"))
    await made.create_groups()
    await made.sweep()
    return made


async def seen(connections: Connections, level: Durability = "fast") -> dict[tuple[str, str], Check]:
    return {(check.about, check.name): check for check in await examine(connections, level=level)}


async def found(connections: Connections, name: str, level: Durability = "fast") -> Check:
    """The check of this name, of the queue if it is one of those."""
    checks = await seen(connections, level)
    return checks.get(("queue q", name)) or checks["server", name]


def mend(raw: Any, check: Check) -> None:
    """Do what the check says, as somebody would type it."""
    program, *words = shlex.split(check.mend)
    assert program == "redis-cli", check.mend
    raw.execute_command(*words)


async def test_a_healthy_fleet(connections: Connections, broker: OperatorBroker) -> None:
    checks = await seen(connections)
    # Nothing but that the server of these tests asks for no password; a machine may be slow.
    left = {name for (_, name), check in checks.items() if check.level != "ok"} - {"latency", "slow calls"}
    assert left == {"user"}
    assert ("queue q", "workers") in checks
    assert all(check.words for check in checks.values())
    assert not [check for check in checks.values() if check.level == "ok" and check.mend]


# --- the server


def config(**settings: str) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        for name, value in settings.items():
            raw.config_set(name.replace("_", "-"), value)

    return change


def fill(raw: Any) -> None:
    raw.config_set("maxmemory", int(raw.info("memory")["used_memory"] * 1.1))


@pytest.mark.parametrize(
    ("name", "harm", "durability_", "level"),
    [
        ("memory limit", config(maxmemory="0"), "fast", "warning"),
        ("policy", config(maxmemory_policy="allkeys-lru"), "fast", "fault"),
        ("policy", config(maxmemory_policy="volatile-ttl"), "safe", "fault"),
        ("disk", config(appendonly="no"), "fast", "warning"),
        ("disk", config(appendonly="no"), "safe", "fault"),
        ("disk", config(appendfsync="no"), "fast", "warning"),
        ("disk", config(appendfsync="no"), "safe", "fault"),
        ("subscribers", config(client_output_buffer_limit="pubsub 0 0 0"), "fast", "warning"),
        ("keepalive", config(tcp_keepalive="0"), "fast", "warning"),
        ("idle", config(timeout="30"), "fast", "warning"),
    ],
)
async def test_a_setting_of_the_server(  # noqa: PLR0917
    connections: Connections,
    raw: Any,
    name: str,
    harm: Callable[[Any], None],
    durability_: Durability,
    level: str,
) -> None:
    if durability_ == "safe":
        raw.config_set("appendfsync", "always")  # else it warns of slow submissions besides
    harm(raw)
    check = await found(connections, name, durability_)
    assert check.level == level
    mend(raw, check)
    assert (await found(connections, name, durability_)).level == "ok"


async def test_memory_that_is_nearly_full(connections: Connections, raw: Any) -> None:
    fill(raw)
    assert (await found(connections, "memory used")).level == "fault"


async def test_replies_that_do_not_count(connections: Connections, raw: Any) -> None:
    name = "min-string-size-avoid-copy-reply"
    if not raw.config_get(name):
        pytest.skip("this server has no such setting, and needs none")
    raw.config_set(name, 16384)
    check = await found(connections, "copied replies")
    assert check.level == "warning"
    mend(raw, check)
    assert (await found(connections, "copied replies")).level == "ok"


async def test_a_call_that_held_everybody_up(
    connections: Connections, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "SLOW_CALL_MS", 0.0)
    raw.config_set("slowlog-log-slower-than", 0)
    raw.eval(f"return 1 -- {RID}", 0)
    raw.config_set("slowlog-log-slower-than", 10_000)
    slow = (await ask_server(connections, "fast")).slow
    assert slow is not None
    assert "EVAL" in {one.command for one in slow}
    check = await found(connections, "slow calls")
    assert (check.level, check.mend) == ("warning", "redis-cli SLOWLOG GET 10")
    assert RID not in f"{slow} {check}", "arguments may be prompts"
    raw.slowlog_reset()
    assert (await found(connections, "slow calls")).level == "ok"


async def test_a_replica(connections: Connections, raw: Any) -> None:
    raw.replicaof("127.0.0.1", 1)
    check = await found(connections, "role")
    assert (check.level, check.mend) == ("fault", "STREAMFLEET_REDIS_URL=redis://127.0.0.1:1/0")


async def test_no_replica_where_one_is_wanted(connections: Connections, broker: OperatorBroker) -> None:
    assert (await found(connections, "replicas")).level == "ok"
    assert (await found(connections, "replicas", "replicated")).level == "fault"


async def test_keys_that_were_evicted(connections: Connections, raw: Any) -> None:
    server = await ask_server(connections, "fast")
    info = {**server.info, "evicted_keys": "7"}
    check = server_checks.policy(replace(server, facts=replace(server.facts, info=info)))
    assert (check.level, "7 keys" in check.words) == ("warning", True)


@pytest.mark.parametrize(
    ("name", "told", "level"),
    [
        ("version", {"redis_version": "6.2.14", "valkey_version": ""}, "fault"),
        ("version", {"redis_version": "7.0.0", "valkey_version": ""}, "ok"),
        ("version", {"redis_version": "7.2.4", "valkey_version": "7.2.5"}, "fault"),
        ("version", {"redis_version": "7.2.4", "valkey_version": "8.0.1"}, "ok"),
        ("connections", {"connected_clients": "80", "maxclients": "100"}, "warning"),
        ("connections", {"connected_clients": "79", "maxclients": "100"}, "ok"),
        ("memory used", {"used_memory": "65", "maxmemory": "100"}, "warning"),
        ("memory used", {"used_memory": "100", "maxmemory": "100"}, "fault"),
        ("disk", {"aof_enabled": "1", "aof_last_write_status": "err"}, "warning"),
        ("cluster", {"cluster_enabled": "1"}, "unseen"),
    ],
)
async def test_what_a_server_tells(
    connections: Connections, raw: Any, name: str, told: dict[str, str], level: str
) -> None:
    """What no test can make this server be."""
    assert altered(await ask_server(connections, "fast"), told)[name].level == level


def altered(server: ServerFacts, told: dict[str, str], **changes: Any) -> dict[str, Check]:
    info = {key: value for key, value in {**server.info, **told}.items() if value}
    other = replace(server, facts=replace(server.facts, info=info), **changes)
    return {check.name: check for check in server_checks.check_server(other)}


async def test_clock_distance_and_cluster(connections: Connections, raw: Any) -> None:
    server = await ask_server(connections, "fast")
    assert altered(server, {}, ahead_s=1.2, unsure_s=0.1)["clock"].level == "warning"
    assert altered(server, {}, ahead_s=-1.2, unsure_s=0.1)["clock"].level == "warning"
    assert altered(server, {}, ahead_s=-1.2, unsure_s=0.3)["clock"].level == "ok"
    near = (1.0,) * 49 + (99.0,)
    assert altered(server, {}, ping_ms=near)["latency"].level == "ok"
    assert altered(server, {}, ping_ms=(1.0,) * 49 + (101.0,))["latency"].level == "warning"
    assert altered(server, {}, ping_ms=(6.0,) * 50)["latency"].level == "warning"
    whole = {"cluster_size": "1", "cluster_slots_ok": "16384"}
    node = {"cluster_enabled": "1"}
    assert altered(server, node, cluster=whole)["cluster"].level == "warning"
    assert altered(server, node, cluster={**whole, "cluster_size": "3"})["cluster"].level == "fault"


@pytest.mark.parametrize("level", ["fast", "safe", "replicated"])
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl"])
@pytest.mark.parametrize("appendonly", ["yes", "no"])
async def test_it_refuses_what_a_worker_refuses(
    connections: Connections, raw: Any, level: Durability, policy: str, appendonly: str
) -> None:
    raw.config_set("maxmemory-policy", policy)
    raw.config_set("appendonly", appendonly)
    refused = any(one.severity == "refuse" for one in await durability.check(connections, level))
    checks = server_checks.check_server(await ask_server(connections, level))
    names = {check.name for check in checks if check.level == "fault"}
    assert bool(names & {"policy", "disk", "replicas", "version", "role"}) == refused


async def test_nobody_answers(redis_url: str) -> None:
    connections = Connections.open("redis://127.0.0.1:1/0")
    _, check = await examine(connections)
    assert (check.name, check.level) == ("reachable", "fault")
    await connections.close()


# --- a queue


async def none_alive(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission(rid=RID)])
    raw.delete(f"{T}:workers")


async def full(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission() for _ in range(10)])


async def nearly_full(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission() for _ in range(8)])


async def pause(raw: Any, broker: OperatorBroker) -> None:
    await broker.pause()


async def crowd(raw: Any, broker: OperatorBroker) -> None:
    await broker.announce(card("w1", max_queue_depth=10, version="1.0"), crowded=True)


async def leak(raw: Any, broker: OperatorBroker) -> None:
    raw.hset(f"{T}:control", mapping={"drain:old": 1, "drain:older": now_ms(raw) - 700_000})


async def wait_long(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission(rid=RID)])
    backdate(raw)


async def overdue(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission(rid=RID)])
    raw.zadd(f"{T}:open", {RID: now_ms(raw) - 60_000})


async def no_sweep(raw: Any, broker: OperatorBroker) -> None:
    raw.hset(f"{T}:sweep", "last", now_ms(raw) - 100_000)


async def no_group(raw: Any, broker: OperatorBroker) -> None:
    raw.xgroup_destroy(f"{T}:s:normal", "w")


async def lost_work(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission(rid=RID)])
    await broker.take("gone", START, streams=("normal",), count=1)
    age(raw, "gone", ms=60_000)


async def stray(raw: Any, broker: OperatorBroker) -> None:
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    raw.delete(f"{T}:r:{RID}")


async def bury(raw: Any, broker: OperatorBroker) -> None:
    raw.xadd(f"{T}:dead", {"rid": RID, "why": "none"})


async def from_the_future(raw: Any, broker: OperatorBroker) -> None:
    raw.hset(f"{T}:sweep", "last", now_ms(raw) + 60_000)


async def read_in_the_future(raw: Any, broker: OperatorBroker) -> None:
    raw.xgroup_setid(f"{T}:s:bulk", "w", f"{now_ms(raw) + 60_000}-0")


async def other_version(raw: Any, broker: OperatorBroker) -> None:
    await broker.announce(card("w2", max_queue_depth=10, version="2.0"))


async def unreadable(raw: Any, broker: OperatorBroker) -> None:
    raw.hset(f"{T}:workers", "far", f"{now_ms(raw) + 60_000}|\x81\xa1v\x63")


async def other_lease(raw: Any, broker: OperatorBroker) -> None:
    await broker.announce(card("w1", max_queue_depth=10, version="1.0", lease_ms=15_000, sub_lanes=1))
    await broker.announce(card("w2", max_queue_depth=10, version="1.0", lease_ms=5_000, sub_lanes=2))


async def drain_all(raw: Any, broker: OperatorBroker) -> None:
    await broker.mark_drain("w1")


@pytest.mark.parametrize(
    ("name", "harm", "level", "words"),
    [
        ("workers", none_alive, "fault", "1 requests are open"),
        ("workers", drain_all, "warning", "all drain"),
        ("depth", full, "fault", "10 queued"),
        ("depth", nearly_full, "warning", "8 queued"),
        ("paused", pause, "warning", "refuses new requests"),
        ("paused", crowd, "fault", "memory"),
        ("drain marks", leak, "warning", "2 of workers long gone"),
        ("waiting", wait_long, "warning", " d"),
        ("overdue", overdue, "fault", "1 requests"),
        ("sweeps", no_sweep, "fault", "100 s ago"),
        ("groups", no_group, "warning", "none on normal"),
        ("lost work", lost_work, "fault", "1 requests are held"),
        ("strays", stray, "warning", "1 waiting entries"),
        ("dead letters", bury, "warning", "1:"),
        ("clock", from_the_future, "fault", "set back"),
        ("clock", read_in_the_future, "fault", "set back"),
        ("versions", other_version, "warning", "1 of 1.0, 1 of 2.0"),
        ("versions", unreadable, "fault", "1 workers"),
        ("settings", other_lease, "warning", "STREAMFLEET_LEASE_S (5, 15), STREAMFLEET_SUB_LANES (1, 2)"),
    ],
)
async def test_something_of_a_queue(  # noqa: PLR0917
    connections: Connections,
    raw: Any,
    broker: OperatorBroker,
    name: str,
    harm: Callable[[Any, OperatorBroker], Any],
    level: str,
    words: str,
) -> None:
    assert (await found(connections, name)).level == "ok"
    await harm(raw, broker)
    check = await found(connections, name)
    assert (check.level, words in check.words) == (level, True), check
    assert check.mend


@pytest.mark.parametrize(("name", "harm"), [("drain marks", leak), ("groups", no_group)])
async def test_what_mends_a_queue(
    connections: Connections, raw: Any, broker: OperatorBroker, name: str, harm: Any
) -> None:
    await harm(raw, broker)
    check = await found(connections, name)
    mend(raw, check)
    assert (await found(connections, name)).level == "ok"


async def test_consumers_of_workers_long_gone(connections: Connections, broker: OperatorBroker) -> None:
    """The time since they read cannot be set on a server."""
    facts = await Inspector(connections, "q").facts()
    idle = Consumer("old", 0, queue_checks.FORGOTTEN_MS + 1)

    def level(*consumers: Consumer) -> str:
        stream = StreamFacts("normal", True, consumers, 0)
        return queue_checks.consumers(replace(facts, streams=(stream,))).level

    assert level(idle) == "warning"
    assert level(replace(idle, idle_ms=queue_checks.FORGOTTEN_MS)) == "ok"
    assert level(replace(idle, pending=1), replace(idle, name="w1")) == "ok"


async def test_a_queue_that_nobody_serves_any_more(connections: Connections, raw: Any, broker: Any) -> None:
    raw.delete(f"{T}:workers")
    raw.hset("streamfleet:queues", "q", now_ms(raw) - 3 * 86_400_000)
    check = await found(connections, "workers")
    assert (check.level, check.words) == ("warning", "nobody serves it, for 3 d")
    assert check.mend.endswith("HDEL streamfleet:queues q")


async def test_queues_by_name(connections: Connections, broker: OperatorBroker) -> None:
    assert {check.about for check in await examine(connections, queues=["q"])} >= {"queue q"}
    with pytest.raises(ModelNotFound, match=r"'p'.* are: q"):
        await examine(connections, queues=["p"])


# --- users


def grant(raw: Any, line: str) -> str:
    """The name of a user with these rights, and the password `x`."""
    name = line.split()[1]
    raw.execute_command("ACL", "SETUSER", *line.split()[1:], ">x")
    return name


async def test_a_user_that_may_ask_for_little(connections: Connections, raw: Any, redis_url: str) -> None:
    await OperatorBroker(connections, "q").announce(card("w1"))
    user = grant(raw, acl.user("narrow", "metrics"))
    opened = Connections.open(redis_url.replace("://", f"://{user}:x@"))
    checks = {check.name: check for check in await examine(opened)}
    await opened.close()
    raw.execute_command("ACL", "DELUSER", user)
    unseen = {name for name, check in checks.items() if check.level == "unseen"}
    assert {"subscribers", "keepalive", "idle", "slow calls", "overdue", "waiting", "strays"} <= unseen
    assert {checks[name].level for name in ("reachable", "version", "memory limit", "groups")} == {"ok"}


async def test_a_user_without_anything(connections: Connections, raw: Any, redis_url: str) -> None:
    """As a managed server may have it: PING and TIME are all that is answered."""
    await OperatorBroker(connections, "q").announce(card("w1"))
    user = grant(raw, "user bare on resetkeys resetchannels -@all +ping +time +client|setinfo")
    opened = Connections.open(redis_url.replace("://", f"://{user}:x@"))
    checks = await examine(opened)
    await opened.close()
    raw.execute_command("ACL", "DELUSER", user)
    assert {check.level for check in checks} == {"ok", "unseen"}


@pytest.mark.parametrize(
    "role",
    [
        pytest.param(role, marks=[] if role in ("producer", "metrics") else pytest.mark.slow)
        for role in acl.ROLES
    ],
)
async def test_a_role_by_its_line(connections: Connections, raw: Any, broker: Any, role: acl.Role) -> None:
    line = acl.user("tried", role)
    user = grant(raw, line)

    async def check() -> Check:
        (one,) = [
            one for one in await examine(connections, role=role, user=user) if one.name == f"role {role}"
        ]
        return one

    assert (await check()).level == "ok"
    raw.execute_command("ACL", "SETUSER", user, "-hgetall")
    assert "+hgetall" in (await check()).words or "hgetall" not in line
    raw.execute_command("ACL", "SETUSER", user, "+hgetall", "resetkeys", "%R~{q:*:0}:*")
    lacking = await check()
    assert lacking.level == "fault"
    assert "%" in lacking.words or role == "metrics"
    raw.execute_command("ACL", "DELUSER", user)
    assert (await check()).level == "unseen"


# --- what is shown


def call(*arguments: str, url: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment(STREAMFLEET_REDIS_URL=url))


def test_what_it_prints(raw: Any, redis_url: str) -> None:
    good = call(url=redis_url)
    assert good.exit_code == 0, good.output
    raw.config_set("maxmemory-policy", "allkeys-lru")
    bad = call(url=redis_url)
    assert bad.exit_code == 1
    for text in (good.stdout, bad.stdout):
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
    assert "mend: redis-cli CONFIG SET maxmemory-policy noeviction\n" in bad.stdout
    said = json.loads(call("--json", url=redis_url).stdout)
    assert said["counts"]["fault"] == 1
    assert {"about", "name", "level", "words", "mend"} == set(said["checks"][0])


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--role", "king"), 2),
        (("--user", "somebody"), 2),
        (("--queue", "p"), 5),
    ],
)
def test_what_it_refuses(raw: Any, redis_url: str, arguments: tuple[str, ...], status: int) -> None:
    assert call(*arguments, url=redis_url).exit_code == status


def test_no_line_is_too_long() -> None:
    check = Check("queue q", "settings", "unseen", "word " * 60, "redis-cli " + "x" * 30 + " y" * 40)
    lines = [line.plain for line in lines_of(check)]
    assert max(map(len, lines)) <= 80
    assert {len(line) - len(line.lstrip()) for line in lines} == {2, 26, 4, 10}
    # A single word is broken where nothing else helps.
    assert max(len(line.plain) for line in lines_of(replace(check, words="x" * 200))) <= 80
