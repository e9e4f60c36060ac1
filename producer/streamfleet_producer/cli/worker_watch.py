"""What a command says while it waits for nothing: no worker is there, or Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from streamfleet_common.connections import redacted
from streamfleet_common.errors import BrokerUnavailable, DeadlineExceeded, StreamfleetError
from streamfleet_producer.cli.terminal import say
from streamfleet_producer.client import Client

PAUSE_S = 1.5
"""Between two looks, and before the first."""
PATIENCE_S = 2.0
"""After so long without an answer Redis is away; the client itself goes on trying for longer."""

_Error = TypeVar("_Error", bound=StreamfleetError)


class WorkerWatch:
    """Looks at the workers of a client's queue from time to time, and says when there are none, once.

    Likewise when Redis does not answer. Once either is mended it would be said again.

    Args:
        fleet: the open client whose answer is waited for.
        say: told what there is to say, in a line.
        sleep: as `asyncio.sleep`.
    """

    def __init__(
        self,
        fleet: Client,
        say: Callable[[str], None] = lambda text: say(text, "yellow"),
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._fleet = fleet
        self._say = say
        self._sleep = sleep
        self._patience_s = patience_s
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def explained(self, error: _Error) -> _Error | DeadlineExceeded:
        """The error, with the reason for it where this knows one."""
        if not isinstance(error, DeadlineExceeded) or self._trouble != "no worker":
            return error
        return DeadlineExceeded(f"{error.message}: {self._nobody}", **error.details)

    @property
    def _nobody(self) -> str:
        return f"no worker serves queue {self._fleet.queue!r} now"

    async def _run(self) -> None:
        while True:
            await self._sleep(PAUSE_S)
            before, self._trouble = self._trouble, await self._look()
            if self._trouble == before:
                continue
            if self._trouble == "no worker":
                self._say(f"waiting: {self._nobody}; start one, or end with Ctrl-C")
            elif self._trouble == "no broker":
                self._say(f"Redis at {redacted(self._fleet.url)} cannot be reached: trying again")
            elif before == "no broker":
                self._say("Redis is back")

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(self._patience_s):
                return "" if await self._fleet.models() else "no worker"
        except (BrokerUnavailable, TimeoutError):
            return "no broker"
        except StreamfleetError:
            return ""  # whatever it is, whoever waits for the answer is told

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="worker-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if isinstance(error, DeadlineExceeded):
            self._trouble = self._trouble or await self._look()
            raise self.explained(error) from None
