"""The server under control: killed, stalled, and still the same one."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as Unreachable

from chaos.server import ChaosServer, binaries


@pytest.fixture(params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> ChaosServer:
    return ChaosServer(binaries()[request.param])


async def test_it_comes_back_with_its_port_and_all_it_acknowledged(server: ChaosServer) -> None:
    async with server:
        port, pid = server.port, server.pid
        for number in range(200):
            await server.control.rpush("kept", number)
        await server.kill()
        with pytest.raises(Unreachable):
            await server.control.ping()
        await server.start()
        assert await server.control.llen("kept") == 200
        await server.control.rpush("kept", 200)
        await server.terminate()
        await server.start()
        assert await server.control.llen("kept") == 201
        assert server.port == port
        assert server.pid != pid


async def test_it_stalls_pauses_and_cuts(server: ChaosServer) -> None:
    clock = asyncio.get_running_loop().time
    async with server:
        other = server.client()
        await other.set("x", 1)
        began = clock()
        await server.stall(0.3)
        assert clock() - began >= 0.3
        began = clock()
        await server.pause_writes(300)
        assert await other.get("x") == b"1"
        await other.set("x", 2)
        assert clock() - began >= 0.25
        assert await server.clients() == 1
        assert await server.kill_clients("normal") == 1
        assert await server.clients() == 0
        with pytest.raises(Unreachable):
            await other.get("x")
        await other.aclose()
