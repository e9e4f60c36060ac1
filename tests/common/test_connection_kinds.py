"""Cancelled or cut off at any moment, whatever uses a connection ends as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions as redis_errors

from eventually import PATIENCE_S, eventually
from streamfleet_common.connections import Connections
from streamfleet_common.line import Line

TURNS = range(1, 16)
"""Of the event loop: more than there are from the first step to the wait for the first answer."""


@asynccontextmanager
async def silent(
    url: str = "redis://{host}:{port}/0", folder: Path | None = None
) -> AsyncIterator[Connections]:
    """Connections to what takes every word and says none, each of whose replies may take five minutes."""
    open_ones = 0

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_ones
        open_ones += 1
        await reader.read()
        writer.close()
        open_ones -= 1

    if folder is None:
        server = await asyncio.start_server(ignore, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
    else:
        server = await asyncio.start_unix_server(ignore, folder / "s")
        host, port = "", 0
    async with server:
        connections = Connections.open(url.format(host=host, port=port, path=folder and folder / "s"))
        pool: Any = connections.commands.connection_pool
        pool.connection_kwargs |= {"socket_connect_timeout": 300.0, "socket_timeout": 300.0}
        yield connections
        await connections.close()
        await eventually(lambda: not open_ones, "the end of its connections")


async def turn(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", TURNS)
async def test_a_cancelled_call_ends(turns: int, tmp_path: Path) -> None:
    for url, folder in (("redis://{host}:{port}/0", None), ("unix://{path}", tmp_path)):
        async with silent(url, folder) as connections:
            client: Any = connections.commands
            calling = asyncio.create_task(client.execute_command("PING"))
            await turn(turns)
            calling.cancel()
            await asyncio.wait([calling], timeout=PATIENCE_S)
            assert calling.cancelled()


async def test_a_write_to_what_is_lost_already_says_so(redis_url: str) -> None:
    connections = Connections.open(redis_url)
    client: Any = connections.commands
    connection = await client.connection_pool.get_connection()
    connection._writer.transport.abort()  # as when the other side hangs up, and nobody has read that yet
    with pytest.raises(redis_errors.ConnectionError):
        await connection.send_command("PING")
    await connection.send_command("PING")
    assert await connection.read_response() == b"PONG"
    await client.connection_pool.release(connection)
    await connections.close()


@pytest.mark.parametrize("turns", TURNS)
async def test_a_line_that_is_closed_while_it_connects_cancels_nobody(turns: int) -> None:
    async with silent() as connections, asyncio.timeout(PATIENCE_S):
        line = Line(connections.commands.connection_pool, timeout_s=300.0)
        waiting = [asyncio.create_task(line.call("PING")) for _ in range(3)]
        await turn(turns)
        await line.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [redis_errors.ConnectionError] * 3
        assert not any(task.cancelled() for task in waiting)
