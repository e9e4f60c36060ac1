"""Calls that gather while one is in flight, and go together in the next."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from streamfleet_common.errors import StreamfleetError

MAX_BATCH = 128
"""Script calls block Redis; this many submits take it about 3 ms."""

_T = TypeVar("_T")
_R = TypeVar("_R")


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
        self._waiting: deque[tuple[_T, asyncio.Future[_R]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, item: _T) -> asyncio.Future[_R]:
        """Send an item with the next call. Cancelling the future before that takes the item back."""
        future: asyncio.Future[_R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="coalescer")
        return future

    def post(self, item: _T) -> None:
        """Send an item with the next call, whatever comes of it."""
        self.put(item).add_done_callback(_forget)

    async def flush(self) -> None:
        """Wait until everything put so far has been answered."""
        while self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch: list[tuple[_T, asyncio.Future[_R]]] = []
                while self._waiting and len(batch) < self._limit:
                    pair = self._waiting.popleft()
                    if not pair[1].done():
                        batch.append(pair)
                if batch:
                    await self._send(batch)
        finally:
            self._task = None
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    async def _send(self, batch: list[tuple[_T, asyncio.Future[_R]]]) -> None:
        try:
            answers = await self._call([item for item, _ in batch])
        except StreamfleetError as error:
            for _, future in batch:
                # Each waiter raises its own: a traceback grows on the exception that is raised.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                _settle(future, own)
        except BaseException as error:
            for _, future in batch:
                if isinstance(error, Exception):
                    _settle(future, error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                _settle(future, answer)


def _settle(future: asyncio.Future[_R], outcome: _R | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _forget(future: asyncio.Future[_R]) -> None:
    if not future.cancelled():
        future.exception()  # so that asyncio does not report it as never retrieved
