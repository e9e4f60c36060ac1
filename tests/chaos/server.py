"""A Redis or Valkey server that a test may kill, stall and start again on the same port and data."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from streamfleet_common.connection_kinds import Plain
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.embedded_binary import ServerBinary

STARTED_LIMIT_S = 60.0
DEBUG_FLAGS = ("--enable-debug-command", "local")
# Every write reaches the system before its reply goes out, so a killed server has lost nothing. With
# `everysec` a write waits while the disk is busy with the last one, and dies with the process.
SYNC_FLAGS = ("--appendfsync", "no")


def binaries() -> dict[str, ServerBinary]:
    """The servers on this machine by product and version: the embedded one first, the system's after it."""
    found: dict[str, ServerBinary] = {}
    paths = (shutil.which("redis-server"), shutil.which("valkey-server"))
    for binary in (ServerBinary.find(), *(ServerBinary.at(Path(path)) for path in paths if path)):
        found.setdefault(f"{binary.product}-{binary.version}", binary)
    return found


class ChaosServer:
    """One server with its own folder, port and append-only file, and with DEBUG; an async context manager.

    `control` is a connection of its own, straight to the server. Whatever starts or ends it waits for that.
    """

    def __init__(self, binary: ServerBinary | None = None, flags: Sequence[str] = ()) -> None:
        self._broker = EmbeddedBroker(extra_args=(*DEBUG_FLAGS, *SYNC_FLAGS, *flags))
        if binary is not None:
            self._broker._binary = binary
        self.control: redis.asyncio.Redis

    async def __aenter__(self) -> Self:
        # On this thread: the server's supervisor may not outlive the thread that made it.
        self._broker.start()
        self.control = self.client()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.control.aclose()
        await asyncio.to_thread(self._broker.stop)

    def client(self) -> redis.asyncio.Redis:
        """Another connection of a test's own, which repeats nothing."""
        return redis.asyncio.Redis.from_url(
            self.url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=STARTED_LIMIT_S,
            connection_class=Plain,  # of which no cancellation gets lost
        )

    @property
    def url(self) -> str:
        return self._broker.url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    @property
    def pid(self) -> int:
        return self._broker.pid

    @property
    def is_alive(self) -> bool:
        return self._broker.is_alive()

    # --- its life

    async def kill(self) -> None:
        """SIGKILL, as a crash would."""
        await asyncio.to_thread(self._broker.kill)
        await self.control.connection_pool.disconnect(inuse_connections=False)

    async def terminate(self) -> None:
        """SIGTERM, as an operator would."""
        os.kill(self.pid, signal.SIGTERM)
        async with asyncio.timeout(STARTED_LIMIT_S):
            while self.is_alive:  # noqa: ASYNC110 (it has no event for us)
                await asyncio.sleep(0.01)
        await self.control.connection_pool.disconnect(inuse_connections=False)

    async def start(self) -> None:
        """Start it again, on the port and the data that it had; returns once it answers."""
        await asyncio.to_thread(self._broker.start)

    # --- its weak hours

    async def stall(self, seconds: float) -> None:
        """Serve nobody for so long (DEBUG SLEEP); returns when it is over."""
        await self._command("DEBUG", "SLEEP", str(seconds))

    async def pause_writes(self, ms: int) -> None:
        """Let all writes and scripts wait for so long; returns at once."""
        await self._command("CLIENT", "PAUSE", str(ms), "WRITE")

    async def kill_clients(self, kind: str) -> int:
        """Cut the connections of all clients of a kind, `normal` or `pubsub`; gives how many there were."""
        return int(await self._command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))

    async def clients(self) -> int:
        """How many clients are connected, but for this one."""
        listed: Any = await self.control.client_list()
        own = await self.control.client_id()
        return sum(int(client["id"]) != own for client in listed)

    async def _command(self, *words: str) -> Any:
        return await self.control.execute_command(*words)  # type: ignore[no-untyped-call]
