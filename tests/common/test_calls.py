"""Calls: what each error means and does, how long they are repeated, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
from redis import exceptions as redis_errors

from broker_parts import submission
from chaos.proxy import ChaosProxy
from eventually import eventually
from streamfleet_common import calls as calls_module
from streamfleet_common.broker import Broker
from streamfleet_common.calls import ATTEMPTS, TABLE, Action, Calls, backoff_s, verdict
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.keys import Keys

GONE = redis_errors.ConnectionError("gone")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(calls_module, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(calls_module, "BUDGET_S", 0.0)


@pytest.fixture
def calls(connections: Connections) -> Calls:
    return Calls(connections, Keys("q").tag)


# --- the table


@pytest.mark.parametrize(
    ("error", "action", "reason"),
    [
        (redis_errors.ConnectionError("reset"), Action.RECONNECT, "unreachable"),
        (redis_errors.TimeoutError("slow"), Action.RECONNECT, "unreachable"),
        (ConnectionResetError(), Action.RECONNECT, "unreachable"),
        (TimeoutError(), Action.RECONNECT, "unreachable"),
        (redis_errors.MaxConnectionsError("all in use"), Action.RETRY, "unreachable"),
        (redis_errors.BusyLoadingError("is loading"), Action.RETRY, "loading"),
        (redis_errors.ResponseError("BUSY Redis is busy running a script."), Action.RETRY, "busy"),
        (redis_errors.ResponseError("NOREPLICAS Not enough good replicas"), Action.RETRY, "no_replicas"),
        (redis_errors.TryAgainError("Multiple keys"), Action.RETRY, "cluster"),
        (redis_errors.ClusterDownError("The cluster is down"), Action.RETRY, "cluster"),
        (redis_errors.ReadOnlyError("You can't write"), Action.REDISCOVER, "read_only"),
        (redis_errors.MasterDownError("Link down"), Action.REDISCOVER, "read_only"),
        (
            redis_errors.ResponseError(
                "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)"
            ),
            Action.REDISCOVER,
            "read_only",
        ),
        (
            redis_errors.ResponseError("UNBLOCKED the stream key no longer exists"),
            Action.REGROUP,
            "refused",
        ),
        (redis_errors.ResponseError("NOGROUP No such key"), Action.REGROUP, "refused"),
        (redis_errors.ResponseError("WRONGTYPE Operation against a key"), Action.REGROUP, "refused"),
        (redis_errors.NoScriptError("No matching script"), Action.RESEND, "refused"),
        (redis_errors.OutOfMemoryError("command not allowed"), Action.GIVE_UP, "out_of_memory"),
        (redis_errors.ResponseError("MISCONF Redis is configured"), Action.GIVE_UP, "cannot_persist"),
        (redis_errors.AuthenticationError("invalid"), Action.GIVE_UP, "forbidden"),
        (redis_errors.AuthorizationError("no"), Action.GIVE_UP, "forbidden"),
        (redis_errors.NoPermissionError("no permissions"), Action.GIVE_UP, "forbidden"),
        (redis_errors.MovedError("1 127.0.0.1:7001"), Action.GIVE_UP, "cluster"),
        (redis_errors.AskError("1 127.0.0.1:7001"), Action.GIVE_UP, "cluster"),
        (redis_errors.ClusterCrossSlotError("Keys in request"), Action.GIVE_UP, "cluster"),
        (redis_errors.ResponseError("unknown command 'XADD'"), Action.GIVE_UP, "refused"),
        (redis_errors.DataError("no such type"), Action.GIVE_UP, "refused"),
        # As the library hands it on: the first word apart, or behind words of its own.
        (redis_errors.ResponseError("it", status_code="MISCONF"), Action.GIVE_UP, "cannot_persist"),
        (
            redis_errors.ResponseError("Command # 1 (HGETALL k) of pipeline caused error: BUSY Redis"),
            Action.RETRY,
            "busy",
        ),
    ],
)
def test_every_error_has_its_own_action(error: Exception, action: Action, reason: str) -> None:
    found = verdict(error)
    assert (found.action, found.reason) == (action, reason)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        # As Redis 7.0 says it, and as Redis from 7.2 on and Valkey do.
        ("this user has no permissions to run the 'config|get' command", "the command CONFIG GET:"),
        ("User u has no permissions to run the 'xadd' command", "the command XADD:"),
        ("this user has no permissions to access one of the keys used as arguments", "a key:"),
        ("No permissions to access a key", "a key:"),
        ("User u has no permissions to access the 'its channel' key", "a key:"),
        ("this user has no permissions to access one of the channels used as arguments", "a channel:"),
        ("No permissions to access a channel", "a channel:"),
        (
            "Command # 3 (HGETALL {q:hidden:0}:x) of pipeline caused error: No permissions to access a key",
            "a key of HGETALL:",
        ),
    ],
)
def test_a_refusal_by_acl_says_of_what(error: str, words: str) -> None:
    said = verdict(redis_errors.NoPermissionError(error)).words
    assert said.startswith(f"refuses this user {words}")
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "The user executing the script can't run this command or subcommand script: 7502",
            "a command, in a script:",
        ),
        (
            "The user executing the script can't access at least one of the keys mentioned in the command",
            "a key, in a script:",
        ),
        (
            "ACL failure in script: User u has no permissions to run the 'xadd' command script: 7502",
            "the command XADD, in a script:",
        ),
        ("ACL failure in script: No permissions to access a key", "a key, in a script:"),
    ],
)
def test_a_refusal_of_what_a_script_does_says_of_what(error: str, words: str) -> None:
    found = verdict(redis_errors.ResponseError(error))
    assert (found.action, found.reason) == (Action.GIVE_UP, "forbidden")
    assert found.words.startswith(f"refuses this user {words}")


def test_every_reason_is_documented() -> None:
    reasons = {found.reason for found in TABLE.values()} | {"unreachable", "not_durable", "bad_url", "closed"}
    assert BrokerUnavailable.__doc__ is not None
    for reason in reasons:
        assert f"`{reason}`" in BrokerUnavailable.__doc__


def test_the_words_hold_no_password() -> None:
    unavailable = Calls(Connections.open("redis://u:s3cret@h/0"), "").unavailable
    assert "s3cret" not in str(unavailable(GONE))
    assert "gone" in str(unavailable(GONE))


def test_backoff_is_jittered_and_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.1)
    monkeypatch.setattr(calls_module, "MAX_BACKOFF_S", 5.0)
    drawn: list[tuple[float, float]] = []
    monkeypatch.setattr(random, "uniform", lambda low, high: drawn.append((low, high)))
    for tries in (1, 2, 3, 6, 1000):
        backoff_s(tries)
    assert drawn == [(0, 0.2), (0, 0.4), (0, 0.8), (0, 5.0), (0, 5.0)]


# --- how often, how long


class Command:
    """Fails so many times, then gives an answer."""

    def __init__(self, error: Exception, failures: int) -> None:
        self.error, self.failures, self.tries = error, failures, 0

    async def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.failures:
            raise self.error
        return "answer"


async def test_a_server_never_heard_of_gets_few_tries(calls: Calls) -> None:
    command = Command(GONE, 1000)
    with pytest.raises(BrokerUnavailable, match="is it running"):
        await calls.ask(command, budget_s=1000)
    assert command.tries == ATTEMPTS


async def test_a_server_that_answered_before_gets_the_whole_time(calls: Calls) -> None:
    assert await calls.ask(Command(GONE, 0)) == "answer"
    command = Command(GONE, 20)
    assert await calls.ask(command, budget_s=1000) == "answer"
    assert command.tries == 21


async def test_when_the_time_is_over_some_tries_are_left(calls: Calls) -> None:
    assert await calls.ask(Command(GONE, 0)) == "answer"
    assert await calls.ask(Command(GONE, ATTEMPTS - 1), budget_s=0) == "answer"
    command = Command(GONE, 1000)
    with pytest.raises(BrokerUnavailable):
        await calls.ask(command, budget_s=0)
    assert command.tries == ATTEMPTS


async def test_what_no_waiting_mends_is_told_at_once(calls: Calls) -> None:
    for error in (
        redis_errors.OutOfMemoryError("full"),
        redis_errors.NoPermissionError("no"),
        redis_errors.ResponseError("MISCONF no disk"),
        redis_errors.MovedError("1 h:1"),
        redis_errors.ResponseError("NOGROUP none"),
    ):
        command = Command(error, 1000)
        with pytest.raises(BrokerUnavailable) as caught:
            await calls.ask(command, budget_s=1000)
        assert command.tries == 1
        assert caught.value.__cause__ is error


async def test_a_swallowed_cancellation_is_raised_again(calls: Calls) -> None:
    started = asyncio.Event()

    async def swallow() -> str:
        started.set()
        # As `asyncio.wait_for` does, when what it waits for is done at the same moment.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "answer"

    task = asyncio.create_task(calls.ask(swallow))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_question_that_may_not_be_asked(calls: Calls) -> None:
    assert await calls.permitted(Command(redis_errors.NoPermissionError("no"), 1)) is None
    assert await calls.permitted(Command(redis_errors.ResponseError("unknown command"), 1)) is None
    assert await calls.permitted(Command(GONE, 1)) == "answer"
    with pytest.raises(BrokerUnavailable):
        await calls.permitted(Command(GONE, 1000))


# --- which connections are given up


async def connected(*clients: Any) -> list[Any]:
    """The one connection that each client has now."""
    for client in clients:
        await client.ping()
    pools: list[Any] = [client.connection_pool for client in clients]
    return [pool._available_connections[-1] for pool in pools]


async def test_a_lost_line_takes_its_idle_sisters_along(connections: Connections, calls: Calls) -> None:
    lines = await connected(connections.commands, connections.leases, connections.reader)
    await calls.ask(Command(redis_errors.TimeoutError(), 1))
    assert [line.is_connected for line in lines] == [False, True, True]
    await calls.ask(Command(redis_errors.TimeoutError(), 1), client=connections.leases)
    assert [line.is_connected for line in lines] == [False, False, True]


async def test_a_demoted_primary_is_given_up_by_all(connections: Connections, calls: Calls) -> None:
    lines = await connected(connections.commands, connections.leases, connections.reader)
    pools: list[Any] = [connections.leases.connection_pool, connections.pubsub.connection_pool]
    busy, subscription = [await pool.get_connection() for pool in pools]
    error = await calls.failed(redis_errors.ReadOnlyError("demoted"))
    assert error.reason == "read_only"
    assert not any(line.is_connected for line in (lines[0], lines[2], subscription))
    assert busy.is_connected  # its reply is still to come
    await pools[0].release(busy)
    assert not busy.is_connected
    await pools[1].release(subscription)


async def test_no_renewal_waits_behind_others(connections: Connections, calls: Calls) -> None:
    pool: Any = connections.commands.connection_pool
    taken = [await pool.get_connection() for _ in range(16)]
    args = ["default", b"", "00" + "ab" * 16]
    waiting = asyncio.create_task(calls.ask(connections.commands.ping))
    await calls.script("cancel", args, client=connections.leases)
    assert not waiting.done()
    for connection in taken:
        await pool.release(connection)
    assert await waiting


# --- replies never shift


async def test_no_answer_belongs_to_another_question(raw: Any, redis_url: str) -> None:
    """200 reads at once over 16 connections, each 3 ms away, most of them given up half-way."""
    keys = Keys("q")
    direct = Connections.open(redis_url)
    known = [submission(tenant="default") for _ in range(200)]
    await Broker(direct, "q").submit(known)
    await direct.close()
    before = len(raw.client_list())
    dice = random.Random(7)
    outcomes = {"answered": 0, "given up": 0}

    async with ChaosProxy(int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        connections = Connections.open(proxy.url)
        calls = Calls(connections, keys.tag)
        proxy.delay_s = 0.003

        async def read(number: int) -> None:
            name = keys.record(known[number].envelope.rid)
            try:
                async with asyncio.timeout(dice.uniform(0.001, 0.005) if dice.random() < 0.5 else 60):
                    value: Any = await calls.ask(lambda: connections.commands.get(name))
            except TimeoutError:
                outcomes["given up"] += 1
            else:
                outcomes["answered"] += 1
                assert known[number].digest.encode() in value

        for _ in range(5):
            await asyncio.gather(*(read(number) for number in range(200)))
        pool: Any = connections.commands.connection_pool
        assert len(pool._in_use_connections) == 0
        assert len(pool._available_connections) <= 16
        proxy.delay_s = 0.0
        # All of them can still be had.
        await asyncio.gather(*(read(number) for number in range(200)))
        await connections.close()
    assert min(outcomes.values()) > 100, outcomes
    await eventually(lambda: len(raw.client_list()) == before)


async def test_whoever_waits_gets_what_a_cancelled_one_did_not_take(redis_url: str) -> None:
    connections = Connections.open(redis_url, max_connections=1)
    pool: Any = connections.commands.connection_pool
    only = await pool.get_connection()
    first = asyncio.create_task(pool.get_connection())
    second = asyncio.create_task(pool.get_connection())
    await asyncio.sleep(0)
    await pool.release(only)  # wakes the first
    first.cancel()
    async with asyncio.timeout(2):  # a lost wake-up costs the pool's whole patience, 5 s
        assert await second is only
    await pool.release(only)
    await asyncio.gather(first, return_exceptions=True)
    await connections.close()


async def test_a_pool_that_stays_empty_says_so(redis_url: str) -> None:
    connections = Connections.open(redis_url, max_connections=1)
    pool: Any = connections.commands.connection_pool
    pool.timeout = 0.01
    only = await pool.get_connection()
    with pytest.raises(BrokerUnavailable, match="all 1 connections were in use"):
        await Calls(connections, "t").ask(connections.commands.ping)
    await pool.release(only)
    await connections.close()


async def test_a_connection_that_the_server_closed_is_not_handed_out(
    connections: Connections, raw: Any
) -> None:
    await connections.commands.ping()
    pool: Any = connections.commands.connection_pool
    (line,) = pool._available_connections
    raw.client_kill_filter(_type="normal", skipme=True)
    await eventually(line._reader.at_eof)
    await connections.commands.ping()  # no retry here: the pool has looked


@pytest.mark.parametrize(
    "error",
    [
        redis_errors.BusyLoadingError("loading"),
        redis_errors.ResponseError("BUSY script"),
        redis_errors.ResponseError("NOREPLICAS none"),
        redis_errors.TryAgainError("slots"),
        redis_errors.ClusterDownError("down"),
        redis_errors.MasterDownError("link"),
        redis_errors.ReadOnlyError("demoted"),
        redis_errors.MaxConnectionsError("all in use"),
        GONE,
    ],
)
async def test_what_waiting_may_mend_is_survived(calls: Calls, error: Exception) -> None:
    assert await calls.ask(Command(error, ATTEMPTS - 1)) == "answer"
