"""Long lists: cut into what a request may hold, submitted with a bound, and put together again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, Unpack

from streamfleet_common import codec
from streamfleet_common.errors import InvalidRequest, QueueFull, StreamfleetError
from streamfleet_common.one_shot import MAX_ITEMS
from streamfleet_common.schemas import End, Request
from streamfleet_producer.answer import too_late
from streamfleet_producer.slices import moved, slices
from streamfleet_producer.ticket import Options

MAX_IN_FLIGHT = 32
"""Requests of one list that are submitted and not answered."""
MAX_REFUSALS = 20
"""How often a full queue is asked again, after the pause that it has told, by a list that has answers."""
AROUND_BYTES = 4096
"""More than what is around the items takes, in a request or in its answer, the longest names included."""

_Item = TypeVar("_Item")


class Runner(Protocol):
    """What a client has for it."""

    async def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> End: ...

    async def max_bytes(self, request: Request) -> int: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a part of a list: to so many items from this place on."""

    start: int
    count: int
    end: End


@dataclass(frozen=True)
class LongList(Generic[_Item]):
    """A list, and how requests are made of its parts."""

    items: Sequence[_Item]
    request: Callable[[Sequence[_Item]], Request]
    size: Callable[[_Item], int]
    """Bytes of an item in a request."""
    most: int = MAX_ITEMS
    """Items of a request."""
    rows: Callable[[_Item], int] = lambda _: 1
    """What an item takes of the rows of a request, of which there are `MAX_ITEMS`."""
    shared_bytes: int = 0
    """What each request has of the same size, besides names and flags."""

    async def answers(
        self,
        runner: Runner,
        timeout: float | None,  # noqa: ASYNC109 (for all together)
        options: Options,
    ) -> list[Answered]:
        """The answers to all parts, in order; none to an empty list.

        Raises:
            DeadlineExceeded: not all are there after `timeout` seconds.
            StreamfleetError: as `runner.run`, of the part that failed first; an item that is to blame is told
                by its place in the whole list. The other parts are cancelled.
        """
        if not self.items:
            return []
        loop = asyncio.get_running_loop()
        late_at = math.inf if timeout is None else loop.time() + timeout
        # All of them first: what is wrong is told before anything is submitted.
        parts = self._parts(codec.MAX_REQUEST_BYTES)
        max_bytes = await runner.max_bytes(parts[0][1])
        if max_bytes < codec.MAX_REQUEST_BYTES:
            parts = self._parts(max_bytes)
        free, turns = asyncio.Semaphore(MAX_IN_FLIGHT), _Turns()

        async def answer(part: slice, request: Request) -> Answered:
            async def run() -> End:
                left = late_at - loop.time()
                if left <= 0:
                    raise too_late()
                return await runner.run(request, timeout=None if timeout is None else left, **options)

            async with free:
                try:
                    end = await turns.run(run)
                except StreamfleetError as error:
                    raise self._moved(error, part) from None
            return Answered(part.start, part.stop - part.start, end)

        if len(parts) == 1:
            return [await answer(*parts[0])]
        answering = [asyncio.ensure_future(answer(*part)) for part in parts]
        try:
            return await asyncio.gather(*answering)
        finally:
            for one in answering:
                one.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    def _parts(self, max_bytes: int) -> list[tuple[slice, Request]]:
        weights = [(1, self.rows(item), self.size(item)) for item in self.items]
        limits = (self.most, MAX_ITEMS, max_bytes - AROUND_BYTES - self.shared_bytes)
        return [(part, self._made(part)) for part in slices(weights, limits)]

    def _made(self, part: slice) -> Request:
        try:
            return self.request(self.items[part])
        except InvalidRequest as error:
            raise self._moved(error, part) from None

    def _moved(self, error: StreamfleetError, part: slice) -> StreamfleetError:
        return moved(error, part.start, sum(map(self.rows, self.items[: part.start])))


class _Turns:
    """Parts of one list, which may itself be what fills the queue."""

    def __init__(self) -> None:
        self._running = 0
        self._has_answers = False
        self._refused = 0
        """How often in a row with no other part under way."""
        self._ended = asyncio.Event()
        """Set, and replaced, when the next part ends."""

    async def run(self, part: Callable[[], Awaitable[End]]) -> End:
        """Run a part; refused by a full queue, once more when another part has ended.

        If others fill the queue, a list that has answers already waits for them, lest these be lost.

        Raises:
            QueueFull: no other part is under way, and none has been answered; or so often in a row.
        """
        while True:
            ended, pause_s = self._ended, None
            self._running += 1
            try:
                end = await part()
            except QueueFull as error:
                if self._running == 1 and not ended.is_set():
                    self._refused += 1
                    if not self._has_answers or self._refused > MAX_REFUSALS:
                        raise
                    pause_s = error.retry_after
            else:
                self._has_answers, self._refused = True, 0
                self._ended.set()
                self._ended = asyncio.Event()
                return end
            finally:
                self._running -= 1
            await (ended.wait() if pause_s is None else asyncio.sleep(pause_s))


def size_of(value: object) -> int:
    """Bytes that a text takes in a request at most. What is none is refused by the schema."""
    if not isinstance(value, str):
        return 0
    return 5 + (len(value) if value.isascii() else len(value.encode("utf-8", "replace")))
