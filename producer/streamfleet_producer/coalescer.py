"""Calls that gather while one is in flight, and go together in the next."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from streamfleet_common.errors import StreamfleetError

MAX_BATCH = 128
"""Script calls block Redis; this many submits take it about 3 ms."""

_T = TypeVar("_T")
_R = TypeVar("_R")
_Waiting: TypeAlias = tuple[_T, Callable[[], bool], Callable[[_R | BaseException], None]]


class Coalescer(Generic[_T, _R]):
    """One round trip for everything that waits: `call` gets the items and gives one answer for each.

    An answer that is an error is raised for its item alone; an error that `call` raises, for all of them.
    An item alone leaves at the end of the loop's current turn. Nothing is delayed to gather more.
    """

    def __init__(
        self,
        call: Callable[[Sequence[_T]], Awaitable[Sequence[_R | StreamfleetError]]],
        *,
        limit: int = MAX_BATCH,
    ) -> None:
        self._call = call
        self._limit = limit
        # Each an item, whether nobody wants it any more, and whom to tell.
        self._waiting: deque[_Waiting[_T, _R]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing: StreamfleetError | None = None

    def put(self, item: _T) -> asyncio.Future[_R]:
        """Send an item with the next call. Cancelling the future before that takes the item back."""
        future: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        self.send(item, future.done, partial(_settle, future))
        return future

    def send(
        self, item: _T, is_done: Callable[[], bool], settle: Callable[[_R | BaseException], None]
    ) -> None:
        """Send an item with the next call, unless `is_done()` by then, and tell `settle` what came of it.

        `settle` must return at once, and not raise.
        """
        if self._closing is not None:
            settle(self._given_up())
            return
        self._waiting.append((item, is_done, settle))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="coalescer")

    def post(self, item: _T) -> None:
        """Send an item with the next call, whatever comes of it."""
        self.put(item).add_done_callback(_forget)

    async def flush(self) -> None:
        """Wait until everything put so far has been answered."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def close(self, error: StreamfleetError) -> None:
        """Give up what is in flight or waits; whoever waits for it gets the error."""
        task, self._closing = self._task, error
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _given_up(self, error: BaseException | None = None) -> BaseException:
        return copy.copy(self._closing) or error or asyncio.CancelledError()

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch: list[_Waiting[_T, _R]] = []
                while self._waiting and len(batch) < self._limit:
                    waiting = self._waiting.popleft()
                    _, is_done, _ = waiting
                    if not is_done():
                        batch.append(waiting)
                if batch:
                    await self._send(batch)
        finally:
            self._task = None
            for _, _, settle in self._waiting:
                settle(self._given_up())
            self._waiting.clear()

    async def _send(self, batch: list[_Waiting[_T, _R]]) -> None:
        try:
            answers = await self._call([item for item, _, _ in batch])
        except StreamfleetError as error:
            for _, _, settle in batch:
                # Each waiter raises its own: a traceback grows on the exception that is raised.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                settle(own)
        except BaseException as error:
            for _, _, settle in batch:
                settle(self._given_up(error))
            if not isinstance(error, Exception):
                raise
        else:
            for (_, _, settle), answer in zip(batch, answers, strict=True):
                settle(answer)


def _settle(future: asyncio.Future[_R], outcome: _R | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    elif isinstance(outcome, BaseException):
        future.cancel()
    else:
        future.set_result(outcome)


def _forget(future: asyncio.Future[_R]) -> None:
    if not future.cancelled():
        future.exception()  # so that asyncio does not report it as never retrieved
