"""An asynchronous generator, for a thread that has no running event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Raised:
    error: BaseException


class SteppedIterator:
    """Steps an asynchronous generator, in one task from its beginning to its end.

    One task, since timeouts and task groups that are open across a `yield` belong to a task.
    """

    def __init__(self, runner: asyncio.Runner, generator: AsyncGenerator[Any, None]) -> None:
        self._runner = runner
        self._generator = generator
        self._task: asyncio.Task[None] | None = None
        self._given: asyncio.Future[Any]
        self._wanted: asyncio.Future[None]

    def __iter__(self) -> SteppedIterator:
        return self

    def __next__(self) -> Any:
        if self._task is not None and self._task.done():
            raise StopIteration
        given = self._runner.run(self._step())
        if isinstance(given, _Raised):
            if isinstance(given.error, StopAsyncIteration):
                raise StopIteration
            raise given.error
        return given

    def close(self) -> None:
        """Have it clean up where it stands."""
        if self._task is not None and not self._task.done():
            self._runner.run(self._stop(self._task))

    async def _step(self) -> Any:
        self._given = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        else:
            self._wanted.set_result(None)
        return await self._given

    async def _stop(self, task: asyncio.Task[None]) -> None:
        self._given = asyncio.get_running_loop().create_future()
        task.cancel()
        await asyncio.wait((task,))

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._generator) as values:
                async for value in values:
                    self._wanted = asyncio.get_running_loop().create_future()
                    self._given.set_result(value)
                    await self._wanted
        except BaseException as error:  # noqa: BLE001  it is raised where the next value is asked for
            end: BaseException = error
        else:
            end = StopAsyncIteration()
        self._given.set_result(_Raised(end))
