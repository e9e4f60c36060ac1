"""A small fleet to break: a server of its own, lines to it that can fail, and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from chaos.proxy import ChaosProxy
from chaos.server import ChaosServer
from gated_engine import GatedEngine
from hired import Hired
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.keys import GROUP, LETTERS

QUEUE = "q"
LEASE_S = 1.5
ROWS = 8


class Scene:
    """An async context manager.

    `worker_line` leads the second worker, and every other one after it, to the server, or all of them with
    `all_behind_line`. `client_line` is for producers. `broker` asks the server directly.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        rows: int = ROWS,
        lease_s: float = LEASE_S,
        binary: ServerBinary | None = None,
        flags: tuple[str, ...] = (),
        login: str = "",
        all_behind_line: bool = False,
        **settings: Any,
    ) -> None:
        self.server = ChaosServer(binary, flags)
        self.workers: list[Hired] = []
        self._count = workers
        self._rows = rows
        self._login = login
        self._all_behind_line = all_behind_line
        self._settings = {"lease_s": lease_s} | settings
        self._stack = AsyncExitStack()
        self.worker_line: ChaosProxy
        self.client_line: ChaosProxy
        self.broker: Broker

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            await stack.enter_async_context(self.server)
            self.worker_line = await stack.enter_async_context(ChaosProxy(self.server.port))
            self.client_line = await stack.enter_async_context(ChaosProxy(self.server.port))
            connections = Connections.open(self.server.url)
            stack.push_async_callback(connections.close)
            self.broker = Broker(connections, QUEUE)
            await self.prepared()
            for number in range(self._count):
                line = self.worker_line.url if number % 2 or self._all_behind_line else self.server.url
                await self.hire(line)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def prepared(self) -> None:
        """What is to be done to the server before anybody works."""
        if self._login:
            name, _, password = self._login.partition(":")
            await self.server._command("ACL", "SETUSER", name, "on", f">{password}", "~*", "&*", "+@all")

    async def hire(self, url: str) -> Hired:
        """One more worker."""
        if self._login:
            url = url.replace("://", f"://{self._login}@")
        name = f"w{len(self.workers) + 1}"
        hired = Hired(url, name, GatedEngine(max_batch_size=self._rows), **self._settings)
        self._stack.push_async_callback(hired.dismiss)
        self.workers.append(await hired.start())
        return hired

    def hold(self, steps: int = 2) -> None:
        """Let no engine take more than so many further steps: what runs goes on running."""
        for hired in self.workers:
            hired.engine.allowed = hired.engine.taken + steps
            hired.engine.is_open = False

    def let_go(self) -> None:
        """Let the engines go on."""
        for hired in self.workers:
            hired.engine.is_open = True

    async def running(self, rids: list[str]) -> dict[str, tuple[int, str]]:
        """Wait until all of these run; gives epoch and owner of each."""
        found: dict[str, tuple[int, str]] = {}

        async def run() -> bool:
            records = await self.broker.status(rids, "default")
            found.update({rid: (one.epoch, one.owner) for rid, one in zip(rids, records, strict=True) if one})
            return all(one is not None and one.state == "running" for one in records)

        await until(run)
        return found

    async def groups(self) -> int:
        """How many of the work streams have their group."""
        count = 0
        for stream in LETTERS:
            key = self.broker.keys.stream(stream)
            if await self.server.control.exists(key):
                groups: Any = await self.server.control.xinfo_groups(key)
                count += any(group["name"] == GROUP.encode() for group in groups)
        return count


async def until(happened: Callable[[], Awaitable[object]], limit_s: float = 60.0) -> float:
    """Wait until `happened()` gives something true; gives how long it took, in seconds."""
    now = asyncio.get_running_loop().time
    began = now()
    async with asyncio.timeout(limit_s):
        while not await happened():  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0.005)
    return now() - began


async def pause(seconds: float) -> None:
    """Let a fault last."""
    await asyncio.sleep(seconds)
