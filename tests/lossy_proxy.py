"""A TCP proxy before Redis that loses replies, holds its tongue or cuts the line when told to."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit


class LossyProxy:
    """Hands bytes on both ways. A context manager; `url` is what clients connect to."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server_at = (parts.hostname, parts.port)
        self._server: asyncio.Server | None = None
        self._lines: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._marker = b""
        self._to_lose = 0
        self.is_mute = False
        """While true, replies go nowhere, and the line stays."""
        self.seen: list[bytes] = []
        """What the clients sent, piece by piece."""
        self.lost = asyncio.Event()
        """Set once a reply has been lost."""

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        while self._tasks:
            # Not cancelled: asyncio complains of a cancelled task behind a line.
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"redis://{host}:{port}/0"

    def lose_reply(self, marker: bytes, count: int = 1) -> None:
        """Hand on the next `count` commands with `marker` in them, lose their replies and cut the line."""
        self._marker, self._to_lose = marker, count
        self.lost.clear()

    def cut(self) -> None:
        """Cut every line that there is."""
        for client, server in tuple(self._lines.items()):
            client.close()
            server.close()

    def count(self, marker: bytes) -> int:
        """How often the clients sent `marker`."""
        return b"".join(self.seen).count(marker)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_reader, server_writer = await asyncio.open_connection(*self._server_at)
        self._lines[writer] = server_writer
        losing = asyncio.Event()
        ways = [
            asyncio.create_task(self._up(reader, server_writer, losing)),
            asyncio.create_task(self._down(server_reader, writer, losing)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            del self._lines[writer]
            self._tasks.discard(task)
            for end in (writer, server_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.seen.append(data)
                if self._to_lose and self._marker in data:
                    self._to_lose -= 1
                    losing.set()
                writer.write(data)
                await writer.drain()

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, losing: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if losing.is_set():
                    self.lost.set()
                    return
                if not self.is_mute:
                    writer.write(data)
                    await writer.drain()
