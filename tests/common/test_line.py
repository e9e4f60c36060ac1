"""The line: calls one behind the other over one connection, whatever happens to some of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis import exceptions as redis_errors

from chaos.proxy import ChaosProxy
from eventually import eventually
from lossy_proxy import LossyProxy
from streamfleet_common.connections import Connections
from streamfleet_common.line import Line

PROTOCOLS = ("resp2", "resp3")


@pytest.fixture
async def line(connections: Connections) -> Line:
    opened = connections.line(connections.commands)
    assert opened is not None
    return opened


async def test_answers_come_in_order_of_the_calls(line: Line) -> None:
    words = [f"word {number}" for number in range(500)]
    assert await asyncio.gather(*(line.call("ECHO", word) for word in words)) == [
        word.encode() for word in words
    ]


async def test_one_connection_serves_all(line: Line, raw: Any) -> None:
    before = len(raw.client_list())
    await asyncio.gather(*(line.call("PING") for _ in range(100)))
    assert len(raw.client_list()) == before + 1


async def test_an_error_is_that_of_its_call(line: Line) -> None:
    answers = await asyncio.gather(
        line.call("ECHO", "a"),
        line.call("EVALSHA", "0" * 40, 0),
        line.call("NO-SUCH-COMMAND"),
        line.call("ECHO", "b"),
        return_exceptions=True,
    )
    assert (answers[0], answers[3]) == (b"a", b"b")
    assert isinstance(answers[1], redis_errors.NoScriptError)
    assert isinstance(answers[2], redis_errors.ResponseError)


async def test_a_cancelled_call_leaves_its_answer_to_nobody(line: Line) -> None:
    calls = [asyncio.create_task(line.call("ECHO", str(number))) for number in range(100)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert answers[1::2] == [b"%d" % number for number in range(1, 100, 2)]
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])


async def test_a_killed_connection_is_made_anew(line: Line, raw: Any) -> None:
    await line.call("PING")
    waiting = asyncio.create_task(line.call("BLPOP", "nothing", 0))
    await eventually(lambda: any(client["cmd"] == "blpop" for client in raw.client_list()))
    raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(redis_errors.ConnectionError):
        await waiting
    assert await line.call("ECHO", "again") == b"again"


async def test_an_overdue_answer_breaks_the_line_and_no_more(redis_url: str) -> None:
    async with ChaosProxy(int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        connections = Connections.open(proxy.url)
        line = Line(connections.commands.connection_pool, timeout_s=0.2)
        await line.call("PING")
        proxy.delay_s = 3600.0
        answers = await asyncio.gather(*(line.call("PING") for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [redis_errors.TimeoutError] * 3
        proxy.delay_s = 0.0
        assert await line.call("ECHO", "again") == b"again"
        await line.close()
        await connections.close()


async def test_a_process_that_stood_still_blames_no_server(redis_url: str) -> None:
    async with LossyProxy(redis_url) as proxy:  # which stands still with it, as on a machine that is paused
        connections = Connections.open(proxy.url)
        line = Line(connections.commands.connection_pool, timeout_s=0.3)
        await line.call("PING")
        for word in ("a", "b"):
            waiting = asyncio.create_task(line.call("ECHO", word))
            await asyncio.sleep(0)
            time.sleep(1.0)  # noqa: ASYNC251 - the loop shall stand still, past the end of its patience
            assert await waiting == word.encode()
        proxy.is_mute = True
        waiting = asyncio.create_task(line.call("PING"))
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251
        with pytest.raises(redis_errors.TimeoutError):
            await waiting
        await line.close()
        await connections.close()


async def test_a_swallowed_answer_is_noticed(redis_url: str) -> None:
    """A proxy may lose what a connection of TCP cannot: nobody may get the answer of another then."""
    async with LossyProxy(redis_url) as proxy:
        connections = Connections.open(proxy.url)
        line = Line(connections.commands.connection_pool, timeout_s=60.0)
        await line.call("PING")
        proxy.is_mute = True
        lost = asyncio.create_task(line.call("ECHO", "lost"))
        await eventually(lambda: proxy.count(b"lost") == 1)
        proxy.is_mute = False
        with pytest.raises(redis_errors.ConnectionError):
            await line.call("ECHO", "mine")
        with pytest.raises(redis_errors.ConnectionError):
            await lost
        assert await line.call("ECHO", "again") == b"again"
        await line.close()
        await connections.close()


async def test_renewed_it_ends_what_is_under_way_over_the_old_connection(line: Line, raw: Any) -> None:
    await line.call("PING")
    waiting = asyncio.create_task(line.call("BLPOP", "list", 0))
    await eventually(lambda: any(client["cmd"] == "blpop" for client in raw.client_list()))
    before = len(raw.client_list())
    line.renew()
    assert await line.call("RPUSH", "list", "x") == 1
    assert await waiting == [b"list", b"x"]
    await eventually(lambda: len(raw.client_list()) == before)


async def test_closed_it_fails_whoever_waits(line: Line, raw: Any) -> None:
    await line.call("PING")
    waiting = asyncio.create_task(line.call("BLPOP", "nothing", 0))
    await eventually(lambda: any(client["cmd"] == "blpop" for client in raw.client_list()))
    await line.close()
    with pytest.raises(redis_errors.ConnectionError):
        await waiting


async def test_large_answers_and_large_calls(line: Line) -> None:
    big = "x" * 3_000_000
    assert await asyncio.gather(*(line.call("ECHO", big) for _ in range(3))) == [big.encode()] * 3


async def test_all_share_one_attempt_to_connect(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    connections = Connections.open(redis_url)
    pool: Any = connections.commands.connection_pool
    line = Line(pool, timeout_s=5.0)
    made = pool.make_connection
    attempts = []

    def make() -> Any:
        connection = made()
        attempts.append(connection)
        if len(attempts) == 1:
            connection.port = 1  # where nobody listens
        return connection

    monkeypatch.setattr(pool, "make_connection", make)
    answers = await asyncio.gather(*(line.call("PING") for _ in range(20)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [redis_errors.ConnectionError] * 20
    assert len(attempts) == 1
    assert await asyncio.gather(*(line.call("ECHO", "x") for _ in range(20))) == [b"x"] * 20
    assert len(attempts) == 2
    await line.close()
    await connections.close()
