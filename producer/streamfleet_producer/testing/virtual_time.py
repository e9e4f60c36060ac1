"""Time that does not pass: it stands until it is moved, or jumps to what comes next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

TURNS = 20
"""Turns of the event loop without anything due before time jumps: who was just told something acts first."""
START_MS = 1_800_000_000_000
"""The server's clock when it begins, in milliseconds: some moment in 2027."""


class Timer:
    """A callback that waits for its time."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when = when
        self.callback: Callable[[], None] | None = callback

    def when(self) -> float:
        """Its time, in seconds."""
        return self._when

    def cancel(self) -> None:
        self.callback = None


class VirtualTime:
    """A clock of seconds, and the timers that go by it. Belongs to one event loop at a time.

    `jumps`: while somebody waits and nothing is due, time jumps to the next timer. Otherwise it stands until
    `advance` moves it. What is due runs at the end of the loop's current turn, in the order of its time.
    """

    def __init__(self, *, jumps: bool) -> None:
        self.jumps = jumps
        self.is_waited_for: Callable[[], bool] = lambda: False
        self._now = 0.0
        self._count: Iterator[int] = itertools.count()
        self._timers: list[tuple[float, int, Timer]] = []
        self._turn: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = 0

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def server_ms(self) -> int:
        """What the server's clock shows."""
        return START_MS + round(self._now * 1000)

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        """Call back once it is `when`; never, if that is infinite."""
        timer = Timer(when, callback)
        if when < math.inf:
            heapq.heappush(self._timers, (when, next(self._count), timer))
        self.wake()
        return timer

    def wake(self) -> None:
        """Look at the timers again: somebody has begun to wait."""
        self._idle = 0
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("this scripted fleet is used on another event loop: make one for each")
            self._loop, self._turn = loop, None
        if self._turn is None:
            self._turn = loop.call_soon(self._look)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it is used.

        Raises:
            RuntimeError: it is used on none yet.
        """
        if self._loop is None:
            raise RuntimeError("nothing has been asked of this scripted fleet yet")
        return self._loop

    async def advance(self, seconds: float) -> None:
        """Move time on. What becomes due meanwhile happens in order, and whoever it concerns acts on it."""
        until = self._now + seconds
        await self.settle()
        while (timer := self._next()) is not None and timer.when() <= until:
            self._now = max(self._now, timer.when())
            self.wake()
            await self.settle()
        self._now = max(self._now, until)

    async def settle(self) -> None:
        """Let everybody act who has something to do now."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _look(self) -> None:
        self._turn = None
        if self._run_due():
            self._idle = 0
        self._idle += 1
        timer = self._next()
        if timer is not None and (timer.when() <= self._now or self._idle < TURNS or self._jump(timer)):
            self._turn = asyncio.get_running_loop().call_soon(self._look)

    def _jump(self, timer: Timer) -> bool:
        if not self.jumps or not self.is_waited_for():
            return False
        self._now, self._idle = timer.when(), 0
        return True

    def _run_due(self) -> bool:
        due = []
        while (timer := self._next()) is not None and timer.when() <= self._now:
            heapq.heappop(self._timers)
            due.append(timer)
        for timer in due:
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        return bool(due)

    def _next(self) -> Timer | None:
        while self._timers:
            timer = self._timers[0][2]
            if timer.callback is not None:
                return timer
            heapq.heappop(self._timers)
        return None
