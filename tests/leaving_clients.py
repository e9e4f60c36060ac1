"""A crowd of HTTP clients that leave at random moments, and a count of what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import redis.asyncio

from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired
from streamfleet_common.connection_kinds import Plain
from streamfleet_producer import Client

Moment = Literal[
    "in the head", "in the body", "while it waits", "at a token", "at the end", "never reads", "stays"
]
MOMENTS: tuple[Moment, ...] = (
    "in the head",
    "in the body",
    "while it waits",
    "at a token",
    "at the end",
    "never reads",
    "stays",
)
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate_stream", "events", "/v1/completions whole")
TOKENS = 12
AT_ONCE = 100
"""Clients that are connected at a time."""
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Count:
    """What there is of all that clients might leave behind."""

    open_requests: int
    """In the fleet, accepted and unfinished."""
    http_requests: int
    """Under way in the gateway."""
    http_connections: int
    channels: int
    """Subscribed, but for those that are kept ahead of need."""
    redis_connections: int
    tasks: int
    files: int
    rows: int
    """Of the worker's engine, running or waiting."""

    def beyond(self, before: Count) -> dict[str, int]:
        """What there is more than before."""
        more = {one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)}
        return {name: number for name, number in more.items() if number > 0}


async def counted(gateway: Gateway, hired: Hired, client: Client, asked: Any) -> Count:
    """All of it now. `asked` is a plain client of Redis, which counts, too."""
    channels = [name.decode() for name in await asked.pubsub_channels()]
    ahead = {rid for lent in gateway.services.clients._lent.values() for rid in _kept(lent.client)}
    room = hired.engine.room()
    return Count(
        open_requests=(await client.depth()).open,
        http_requests=int(gateway.services.metrics.open_requests),
        http_connections=len(gateway._server.server_state.connections),
        channels=sum(name.rpartition(":")[2] not in ahead for name in channels),
        redis_connections=len(await asked.client_list()),
        tasks=len(asyncio.all_tasks()),
        files=_open_files(),
        rows=room.running + room.waiting,
    )


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _kept(client: Any) -> list[str]:
    return list(client._link.rids._rids)


async def settled(gateway: Gateway, hired: Hired, client: Client, asked: Any, before: Count | None) -> Count:
    """The count once nothing is under way any more, or what is left when that does not come to be."""
    count = await counted(gateway, hired, client, asked)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while count.open_requests or count.http_requests or (before and count.beyond(before)):
                await asyncio.sleep(0.1)
                count = await counted(gateway, hired, client, asked)
    return count


class Crowd:
    """Clients that come, and leave as their dice fall; `left` counts how they went."""

    def __init__(self, gateway: Gateway, seed: int) -> None:
        host, port = gateway.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._dice = random.Random(seed)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self.left: Counter[str] = Counter()

    async def come(self, count: int) -> None:
        """Let so many come, and wait until the last one has gone."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._client())

    async def _client(self) -> None:
        async with self._turn:
            moment, route = self._dice.choice(MOMENTS), self._dice.choice(ROUTES)
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection(*self._address)
                try:
                    asked = await self._asked(route, reader, writer)
                    await self._leave(reader, writer, moment, asked)
                    self.left[moment] += 1
                except (ConnectionError, asyncio.IncompleteReadError):
                    self.left["was left"] += 1
                finally:
                    await self._go(writer)

    async def _leave(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moment: Moment, asked: bytes
    ) -> None:
        body_at = asked.index(b"\r\n\r\n") + 4
        if moment == "in the head" or moment == "in the body":
            cut = (
                self._dice.randrange(body_at)
                if moment == "in the head"
                else self._dice.randrange(body_at, len(asked) + 1)
            )
            writer.write(asked[:cut])
            await writer.drain()
            return
        writer.write(asked)
        if moment == "while it waits" or moment == "never reads":
            await asyncio.sleep(self._dice.choice((0, 0, 0.001, 0.02)))
            return
        events = {"at a token": self._dice.randrange(1, TOKENS), "at the end": TOKENS - 1, "stays": 10_000}
        await self._read(reader, events[moment])

    async def _read(self, reader: asyncio.StreamReader, events: int) -> None:
        """So many events, or all there are."""
        while events:
            line = await reader.readline()
            if not line or line == b"0\r\n" or b'"usage":' in line:  # of an answer that comes whole
                return
            events -= line.startswith(b"data:")

    async def _asked(self, route: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """What is sent. Events are asked for of a request that was submitted over the same connection."""
        prompt = f"ECHO {TOKENS} TICK {self._dice.choice((0, 1, 5))}"
        match route:
            case "/v1/chat/completions":
                body = f'{{"model":"q","messages":[{{"role":"user","content":"{prompt}"}}],"stream":true}}'
            case "/generate_stream":
                body = f'{{"inputs":"{prompt}","parameters":{{"max_new_tokens":100}}}}'
            case "events":
                body = f'{{"queue":"q","stream":true,"request":{{"prompt":"{prompt}"}}}}'
                writer.write(_posted("/v1/requests", body))
                said = await reader.readuntil(b'"position":')
                await reader.readuntil(b"}")
                rid = said.partition(b'{"id":"')[2].partition(b'"')[0].decode()
                return f"GET /v1/requests/{rid}/events HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            case _:
                stream = "false" if route.endswith("whole") else "true"
                body = f'{{"model":"q","prompt":"{prompt}","stream":{stream}}}'
        return _posted(route.split(maxsplit=1)[0], body)

    async def _go(self, writer: asyncio.StreamWriter) -> None:
        """Say goodbye, or break off as a machine that goes away does."""
        if self._dice.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:
            writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _posted(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


async def leave_nothing(url: str, count: int, *, seed: int = 1) -> tuple[Count, Count, Counter[str]]:
    """Let `count` clients leave a gateway, after a tenth as many have; the counts before and after."""
    hired = await Hired(url, "w0", GatedEngine(max_batch_size=32)).start()
    try:
        async with (
            Gateway(url) as gateway,
            Client(url, queue="q") as client,
            redis.asyncio.Redis.from_url(url, connection_class=Plain) as asked,
        ):
            # What is made once, such as connections and ids ahead of need, is there before it is counted; and
            # a connection is closed, and made anew when it is needed, where a call over it was given up.
            await Crowd(gateway, seed + 1).come(max(AT_ONCE // 2, count // 10))
            await settled(gateway, hired, client, asked, None)
            for connections in (gateway.services.hub.connections, hired.connections):
                for some in (connections.commands, connections.leases):
                    await asyncio.gather(*(some.ping() for _ in range(AT_ONCE)))
            before = await settled(gateway, hired, client, asked, None)
            crowd = Crowd(gateway, seed)
            await crowd.come(count)
            after = await settled(gateway, hired, client, asked, before)
            (card,) = await client.models()
            assert card.limits.max_batch_size == 32
    finally:
        await hired.dismiss()
    return before, after, crowd.left
