"""An asynchronous generator, for a thread that has no running event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any


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
        self._end: BaseException | None = None
        """What it has ended with."""

    def __iter__(self) -> SteppedIterator:
        return self

    def __next__(self) -> Any:
        given = self._runner.run(self._step()) if self._end is None else None
        if self._end is None:
            return given
        end, self._end = self._end, StopIteration()
        raise end

    def close(self) -> None:
        """Have it clean up where it stands."""
        if self._task is not None and not self._task.done():
            self._runner.run(self._stop(self._task))

    async def _step(self) -> Any:
        self._given = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif not self._wanted.done():  # else somebody has cancelled the task
            self._wanted.set_result(None)
        return await self._given

    async def _stop(self, task: asyncio.Task[None]) -> None:
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
            self._end = error
        else:
            self._end = StopIteration()
        if not self._given.done():
            self._given.set_result(None)
