"""A TCP proxy before Redis that fails in all the ways in which a network does, when told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 16
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: closing sends a reset instead of a goodbye."""


class ChaosProxy:
    """Hands bytes on both ways between clients and `127.0.0.1:port`, except for what its switches say.

    A context manager; `url` is what clients connect to. All on one event loop. The switches:

    ==================  ==================================================================================
    `delay_s`           every byte, either way, comes so much later; their order stays
    `is_black_hole`     nothing gets through any more, and nobody is told. A line that has lost bytes in
                        this way is lost for good: no network gives one half of a stream
    `is_half_open`      an end that closes is not noticed by the other
    `is_down`           lines are cut and new ones refused
    ==================  ==================================================================================
    """

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.is_black_hole = False
        self.is_half_open = False
        self.lost = 0
        """How many replies were lost on demand."""
        self.accepted = 0
        """How many lines there have ever been."""
        self._port = port
        self._is_down = False
        self._marker = b""
        self._to_lose = 0
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        while self._tasks:
            # Not cancelled: asyncio complains of a cancelled task behind a line.
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)

    @property
    def port(self) -> int:
        assert self._server is not None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return len(self._lines)

    @property
    def is_down(self) -> bool:
        return self._is_down

    @is_down.setter
    def is_down(self, down: bool) -> None:
        self._is_down = down
        if down:
            self.cut()

    def drop_next_reply(self, marker: bytes = b"", count: int = 1) -> None:
        """Hand on the next `count` commands with `marker` in them, lose their replies, reset the lines."""
        self._marker, self._to_lose = marker, count

    def cut(self) -> None:
        """Reset every line that there is."""
        for line in tuple(self._lines):
            line.cut()

    async def flap(self, times: int, *, down_s: float, up_s: float) -> None:
        """Go down and come back, again and again."""
        for _ in range(times):
            self.is_down = True
            await asyncio.sleep(down_s)
            self.is_down = False
            await asyncio.sleep(up_s)

    def heal(self) -> None:
        """Fail no longer. What was lost stays lost, and lines that only one end holds are cut."""
        self.delay_s, self._to_lose = 0.0, 0
        self.is_black_hole = self.is_half_open = self.is_down = False
        for line in tuple(self._lines):
            if line.is_half_closed:
                line.cut()

    def takes_loss(self, piece: bytes) -> bool:
        """Whether the reply to what a client sends here is to be lost."""
        if not self._to_lose or self._marker not in piece:
            return False
        self._to_lose -= 1
        return True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            try:
                if self._is_down:
                    raise ConnectionRefusedError
                behind = await asyncio.open_connection(HOST, self._port)
            except OSError:
                _reset(writer)  # nobody listens behind us either
                return
            line = _Line(self, (reader, writer), behind)
            self._lines.add(line)
            try:
                await line.serve()
            finally:
                self._lines.discard(line)
        finally:
            self._tasks.discard(task)


class _Line:
    """A client's connection, and the one to the server that stands for it."""

    def __init__(
        self,
        proxy: ChaosProxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._over = asyncio.Event()
        self._is_losing = False
        self._is_lost = False
        self._is_cut = False
        self.is_half_closed = False

    def cut(self) -> None:
        self._is_cut = True
        self._over.set()

    async def serve(self) -> None:
        """Hand bytes on until the line is over."""
        ways = [
            asyncio.create_task(self._carry(self._client[0], self._server[1], is_reply=False)),
            asyncio.create_task(self._carry(self._server[0], self._client[1], is_reply=True)),
        ]
        await self._over.wait()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for writer in (self._client[1], self._server[1]):
            if self._is_cut:
                _reset(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        pieces: deque[tuple[float, bytes]] = deque()
        more = asyncio.Event()
        sender = asyncio.create_task(self._send(pieces, more, writer))
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(PIECE_BYTES):
                    if not self._passes(piece, is_reply=is_reply):
                        continue
                    pieces.append((asyncio.get_running_loop().time() + self._proxy.delay_s, piece))
                    more.set()
            if self._proxy.is_half_open or self._proxy.is_black_hole:
                self.is_half_closed = True
                return
            pieces.append((0.0, b""))
            more.set()
            await sender
            self._over.set()
        finally:
            sender.cancel()

    def _passes(self, piece: bytes, *, is_reply: bool) -> bool:
        self._is_lost = self._is_lost or self._proxy.is_black_hole
        if self._is_lost:
            return False
        if is_reply and self._is_losing:
            self._proxy.lost += 1
            self.cut()
            return False
        if not is_reply and self._proxy.takes_loss(piece):
            self._is_losing = True
        return True

    async def _send(
        self, pieces: deque[tuple[float, bytes]], more: asyncio.Event, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                while not pieces:
                    more.clear()
                    await more.wait()
                due, piece = pieces.popleft()
                if not piece:
                    return
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                writer.write(piece)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    writer.transport.abort()
