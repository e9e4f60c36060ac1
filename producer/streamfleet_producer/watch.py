"""One timer for everything a client waits for, instead of one for each request."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Protocol

SWEEP_S = 5.0
"""A third of a lease: somewhat less often than each worker sweeps, so that it is theirs as a rule."""


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


class Timer(Protocol):
    """A call that is to come, as event loops have them."""

    def when(self) -> float:
        """Its time."""

    def cancel(self) -> None:
        """Let it not come."""


class Clock(Protocol):
    """What a `Watch` goes by: an event loop, or a time of one's own."""

    def time(self) -> float:
        """Seconds."""

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        """Call once it is `when`."""


class Watch:
    """Notices silence, deadlines and the time to give up.

    `sweep` is called every `SWEEP_S` or so while anybody waits, and when a deadline passes: so overdue
    requests end, and those of lost workers are given to others, even where no worker is alive to do it.
    """

    def __init__(self, silence_s: float, sweep: Callable[[], None], clock: Clock | None = None) -> None:
        self._silence_s = silence_s
        self._sweep = sweep
        self._sweep_at = -math.inf
        self._watched: set[Watched] = set()
        self._timer: Timer | None = None
        self._clock: Clock = clock or asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        now = self._clock.time()
        if self._sweep_at + SWEEP_S < now:
            # Nobody has waited for long: whoever is answered soon need not sweep.
            self._sweep_at = _next_sweep(now)
        at = min(now + self._silence_s / 3, self._sweep_at, watched.deadline_at, watched.late_at)
        if self._timer is None or at < self._timer.when():
            self._schedule(at)

    def discard(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def close(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.time()
        # Not before the next turn of the silence, unless something is due; and never in a tight loop.
        next_at, soonest = now + self._silence_s / 3, now + 0.001
        due = bool(self._watched) and self._sweep_at <= now
        for watched in tuple(self._watched):
            if watched.deadline_at <= now:
                watched.deadline_at = math.inf
                due = True
            if watched.late_at <= now:
                watched.late_at = math.inf
                watched.late()
            elif now - watched.heard_at >= self._silence_s:
                watched.heard_at = now
                watched.silent()
            next_at = min(next_at, watched.deadline_at, watched.late_at)
        if due:
            self._sweep_at = _next_sweep(now)
            self._sweep()
        if self._watched:
            self._schedule(max(soonest, min(next_at, self._sweep_at)))


def _next_sweep(now: float) -> float:
    # At odds, so that a fleet of clients does not come all at once.
    return now + SWEEP_S * random.uniform(0.7, 1.3)
