"""The proxy's switches, each seen from both ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chaos.proxy import ChaosProxy
from eventually import eventually

PATIENCE_S = 60.0


class Echo:
    """A server that sends back what it gets, in capitals."""

    def __init__(self) -> None:
        self.heard = b""
        self.open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        try:
            while data := await reader.read(1000):
                self.heard += data
                writer.write(data.upper())
        except OSError:
            pass
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, proxy: ChaosProxy) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", proxy.port))

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read(1000)

    async def is_cut(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.reader.read(1000) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, ChaosProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with ChaosProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield echo, proxy
    server.close()
    await eventually(lambda: echo.open == 0, "the end of all connections")


async def test_it_hands_on_both_ways(echo: tuple[Echo, ChaosProxy]) -> None:
    server, proxy = echo
    client = await Client.of(proxy)
    assert await client.ask(b"one") == b"ONE"
    assert await client.ask(b"two") == b"TWO"
    assert (proxy.lines, proxy.accepted, server.heard) == (1, 1, b"onetwo")
    client.writer.close()
    await eventually(lambda: server.open == 0 and proxy.lines == 0, "the server's notice of the end")


async def test_a_delay_keeps_the_order(echo: tuple[Echo, ChaosProxy]) -> None:
    _, proxy = echo
    client = await Client.of(proxy)
    clock = asyncio.get_running_loop().time
    proxy.delay_s = 0.05
    began = clock()
    assert await client.ask(b"slow") == b"SLOW"
    assert clock() - began >= 0.1
    client.writer.write(b"a")
    await eventually(lambda: proxy.lines == 1)
    proxy.delay_s = 0.0
    client.writer.write(b"b")
    answered = b""
    while len(answered) < 2:
        answered += await client.reader.read(10)
    assert answered == b"AB"


async def test_a_dropped_reply_was_carried_out(echo: tuple[Echo, ChaosProxy]) -> None:
    server, proxy = echo
    proxy.drop_next_reply(b"submit")
    client = await Client.of(proxy)
    assert await client.ask(b"other") == b"OTHER"
    client.writer.write(b"submit")
    assert await client.is_cut()
    assert server.heard == b"othersubmit"
    assert proxy.lost == 1
    assert await (await Client.of(proxy)).ask(b"submit") == b"SUBMIT"


async def test_a_black_hole_keeps_the_line_and_loses_it_for_good(echo: tuple[Echo, ChaosProxy]) -> None:
    server, proxy = echo
    client, idle = await Client.of(proxy), await Client.of(proxy)
    assert await client.ask(b"x") == b"X"
    proxy.is_black_hole = True
    client.writer.write(b"swallowed")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.reader.read(10)
    assert (server.heard, server.open, proxy.lines) == (b"x", 2, 2)
    proxy.heal()
    assert await idle.ask(b"y") == b"Y"  # a line that has lost nothing is as it was
    client.writer.write(b"lost too")
    assert await idle.ask(b"z") == b"Z"
    assert server.heard == b"xyz"
    client.writer.close()
    await eventually(lambda: server.open == 1, "the end of the lost line")


async def test_a_half_open_line_hides_the_client_s_end(echo: tuple[Echo, ChaosProxy]) -> None:
    server, proxy = echo
    client = await Client.of(proxy)
    await client.ask(b"x")
    proxy.is_half_open = True
    client.writer.close()
    other = await Client.of(proxy)
    assert await other.ask(b"y") == b"Y"
    assert (server.open, proxy.lines) == (2, 2)
    proxy.heal()
    await eventually(lambda: server.open == 1, "the server's notice of the end")


async def test_a_cut_resets_and_new_lines_are_taken(echo: tuple[Echo, ChaosProxy]) -> None:
    server, proxy = echo
    client = await Client.of(proxy)
    await client.ask(b"x")
    proxy.cut()
    assert await client.is_cut()
    assert await (await Client.of(proxy)).ask(b"y") == b"Y"
    await eventually(lambda: server.open == 1, "the server's notice of the cut")


async def test_flapping_cuts_and_refuses_and_ends_up(echo: tuple[Echo, ChaosProxy]) -> None:
    _, proxy = echo
    client = await Client.of(proxy)
    await client.ask(b"x")
    flapping = asyncio.create_task(proxy.flap(3, down_s=0.02, up_s=0.01))
    assert await client.is_cut()
    refused = await Client.of(proxy)
    assert await refused.is_cut()
    await flapping
    assert await (await Client.of(proxy)).ask(b"y") == b"Y"


async def test_without_a_server_lines_are_refused() -> None:
    server = await asyncio.start_server(Echo().serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with ChaosProxy(port) as proxy:
        assert await (await Client.of(proxy)).is_cut()
