"""Workers as processes of their own, some at a time, and who replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from chaos.crew import ChaosWorker, Crew
from chaos.server import ChaosServer
from faults.scene import QUEUE
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections

LEASE_S = 1.5


def settings(**changes: object) -> dict[str, object]:
    """What a worker of these tests is told, but for its URL."""
    told: dict[str, object] = {
        "queue": QUEUE,
        "lease_s": LEASE_S,
        "drain_timeout_s": 5.0,
        "max_batch_size": 8,
        "max_delay_ms": 2,
    }
    return told | changes


class Fleet:
    """A server and `count` worker processes; a context manager. Whoever ends is replaced, and counted.

    With `hand_back` what a dead worker held is given to others at once, as a supervisor does it.
    `before_crew` is called once there is a server, before there are workers. `changes` are settings.
    """

    def __init__(
        self,
        count: int,
        *,
        hand_back: bool = False,
        before_crew: Callable[[], None] = lambda: None,
        **changes: Any,
    ) -> None:
        self.server = ChaosServer()
        self.broker: Broker
        self.crew: Crew
        self.ended: list[ChaosWorker] = []
        self._count = count
        self._hand_back = hand_back
        self._before_crew = before_crew
        self._settings: Mapping[str, object] = settings(**changes)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            await stack.enter_async_context(self.server)
            connections = Connections.open(self.server.url)
            stack.push_async_callback(connections.close)
            self.broker = Broker(connections, QUEUE)
            self._before_crew()
            self.crew = Crew([self.server.url] * self._count, self._settings, self._on_end)
            await stack.enter_async_context(self.crew)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def owners(self, rids: list[str]) -> dict[str, str]:
        """Who runs each of these, "" for nobody."""
        records = await self.broker.status(rids, "default")
        return {rid: record.owner if record else "" for rid, record in zip(rids, records, strict=True)}

    async def server_ms(self) -> int:
        seconds, micros = await self.server.control.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def starts_ms(self, rid: str) -> dict[int, int]:
        """When each epoch of a streaming request was started, on the server's clock."""
        frames = await self.broker.events(rid)
        return {frame.epoch: frame.times[2] for frame in frames if frame.seq == 0}

    async def _on_end(self, worker: ChaosWorker) -> None:
        self.ended.append(worker)
        if self._hand_back:
            crashed = worker.status != 0
            await asyncio.shield(self.broker.hand_back(worker.name, crashed=crashed))
