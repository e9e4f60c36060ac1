"""One timer for everything a client waits for, instead of one for each request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """Something that is waited for. All times are those of the event loop's clock, in seconds."""

    heard_at: float
    """When a message last came, or the record was last asked."""
    deadline_at: float
    """When the request's deadline passes."""
    late_at: float
    """When to give up."""

    def silent(self) -> None:
        """Nothing was heard for `silence_s`. Must return at once, as the other."""

    def late(self) -> None:
        """`late_at` has come. Called once."""


class Watch:
    """Notices silence, deadlines and the time to give up.

    `expire` is called when a deadline passes, so that the request ends as expired even where no worker is
    alive to end it.
    """

    def __init__(self, silence_s: float, expire: Callable[[], None]) -> None:
        self._silence_s = silence_s
        self._expire = expire
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        now = asyncio.get_running_loop().time()
        self._schedule(min(now + self._silence_s / 3, watched.deadline_at, watched.late_at))

    def discard(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def close(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, at: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        # Not before the next turn of the silence, unless something is due; and never in a tight loop.
        next_at, soonest = now + self._silence_s / 3, now + 0.001
        expired = False
        for watched in tuple(self._watched):
            if watched.deadline_at <= now:
                watched.deadline_at = math.inf
                expired = True
            if watched.late_at <= now:
                watched.late_at = math.inf
                watched.late()
            elif now - watched.heard_at >= self._silence_s:
                watched.heard_at = now
                watched.silent()
            next_at = min(next_at, max(soonest, min(watched.deadline_at, watched.late_at)))
        if expired:
            self._expire()
        if self._watched:
            self._schedule(next_at)
