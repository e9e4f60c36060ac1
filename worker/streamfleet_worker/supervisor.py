"""The supervisor: keeps the worker processes of one host running, and hands back the work of those that die.

A worker that dies is missed at once, and what it ran is given to others at once: nobody has to wait for its
lease to run out. Then another one takes its place, after a pause that grows while they go on dying.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from streamfleet_common.deliveries import HandedBack
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_worker.child import Child
from streamfleet_worker.settings import WRONG_SETTINGS

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SOUND_S = 60.0
"""A worker that has lived for so long did not fail at its start: the pauses begin anew."""
DRAIN_MARGIN_S = 10.0
"""What a worker may take beyond its own drain timeout, to hand back what it has not finished."""
ORPHAN_GRACE_S = 1.0
"""What workers get to hand back their work when the program that wanted them is gone."""
LAST_WORDS_S = 5.0
"""How long a supervisor that ends goes on trying to hand work back."""
HAND_BACK_AGAIN_S = 0.5
"""At most, between two tries to hand work back."""

log = structlog.get_logger()

StartChild = Callable[[int, Callable[[], None]], Child]
"""Starts the worker of a post; the second argument is to be called once it has answered a request."""


class HandBack(Protocol):
    """Gives all that a dead worker held to others."""

    async def __call__(self, owner: str, *, crashed: bool) -> HandedBack: ...


@dataclass(slots=True, eq=False)
class Post:
    """One worker's place, and who fills it; nobody between a death and the next start."""

    number: int
    child: Child | None = None
    started_at: float = 0.0
    failures: int = 0  # short lives in a row


class Supervisor:
    """Keeps `count` workers. `stop`, `orphaned` and `roll` are safe in signal handlers of the event loop.

    Args:
        count: how many.
        start: see `StartChild`; raises OSError if no process can be started.
        hand_back: see `HandBack`; raises BrokerUnavailable.
        drain_timeout_s: how long a worker goes on when told to stop.
        lease_s: after which a silent worker's work is handed on anyway.
        max_crashes: crashes of each post, on average, without one request answered in between, after which
            another try makes no sense. Those by which a request was found to kill its workers count as one.
        clock: seconds, monotonic.
        sleep: as `asyncio.sleep`.
        jitter: a number between its two arguments.
    """

    def __init__(
        self,
        count: int,
        start: StartChild,
        hand_back: HandBack,
        *,
        drain_timeout_s: float,
        lease_s: float,
        max_crashes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._posts = [Post(number) for number in range(1, count + 1)]
        self._start_child = start
        self._hand_back = hand_back
        self._drain_limit_s = drain_timeout_s + DRAIN_MARGIN_S
        self._lease_s = lease_s
        self._max_crashes = max_crashes * count
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self.restarts = 0
        """Workers started in the place of one that had ended unasked."""
        self._crashes = 0  # in a row, without a request answered in between
        self._culprits = 0  # requests found to kill their workers, likewise
        self._attended: dict[asyncio.Task[None], Child] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._last_words_s = LAST_WORDS_S
        self._status = 0

    @property
    def posts(self) -> Sequence[Post]:
        """The places of the workers, and who fills them."""
        return self._posts

    @property
    def children(self) -> list[Child]:
        """All processes: those that drain, too, and those that have ended and whose work is still ours."""
        return [*self._attended.values()]

    async def run(self) -> int:
        """Keep the workers until `stop`, or until that makes no sense; gives an exit status.

        That is 0 if all have drained, 2 if a worker's settings are wrong, else 1.
        """
        log.info("supervising", workers=len(self._posts))
        for post in self._posts:
            self._fill(post)
        await self._stop.wait()
        await self._drain()
        log.info("stopped")
        return self._status

    def stop(self) -> None:
        """Drain all workers; `run` returns when they have. Asked again, they give up what they still run."""
        if self._stop.is_set():
            self._stop_all()
        self._stop.set()

    def orphaned(self) -> None:
        """End soon: the program that wanted the workers is gone."""
        log.warning("the program that wanted these workers is gone")
        self._last_words_s = ORPHAN_GRACE_S
        self.stop()
        self._errand(self._hurry())
        self._errand(self._kill_after(ORPHAN_GRACE_S))

    def roll(self) -> None:
        """Replace all workers, one after the other: each drains once its successor takes work."""
        if self._rolling is not None and not self._rolling.done():
            log.warning("still replacing the workers")
        elif not self._stop.is_set():
            self._rolling = self._errand(self._roll())

    # --- one worker

    def _fill(self, post: Post) -> None:
        post.started_at = self._clock()
        try:
            post.child = self._begin(post)
        except OSError as error:
            self._crashes += 1
            self._vacant(post, None, f"it could not be started ({error})", "")

    def _begin(self, post: Post) -> Child:
        child = self._start_child(post.number, self._served)
        log.info("worker started", number=post.number, worker=child.name, pid=child.pid)
        attending = asyncio.create_task(self._attend(post, child))
        self._attended[attending] = child
        attending.add_done_callback(self._unattended)
        return child

    def _unattended(self, attending: asyncio.Task[None]) -> None:
        child = self._attended.pop(attending)
        if not attending.cancelled() and (error := attending.exception()) is not None:
            log.critical("work not handed back: it waits for its lease", worker=child.name, exc_info=error)

    def _served(self) -> None:
        self._crashes = self._culprits = 0

    def _found_culprits(self) -> None:
        # Two bad requests in a row must not end a queue. But where every request kills, not all are to blame.
        self._crashes = 0
        self._culprits += 1
        for post in self._posts:
            post.failures = 0

    async def _attend(self, post: Post, child: Child) -> None:
        status = await child.wait()
        ordered = child.killed or (child.told_to_stop and status == -signal.SIGTERM)
        crashed = not (status == 0 or ordered or child.no_broker)
        self._crashes += crashed
        # Before anything else: somebody waits for an answer.
        handing_back = asyncio.create_task(self._give_to_others(child, crashed))
        how, reason = child.how(), await child.reason()
        if crashed and self._crashes >= self._max_crashes:
            await handing_back  # which may find out whose fault it was
        if post.child is not child or self._stop.is_set():
            log.info("worker ended", number=post.number, worker=child.name, reason=reason, how=how)
        elif status == WRONG_SETTINGS:
            self._give_up(f"a worker finds its settings wrong: {reason}", WRONG_SETTINGS)
        else:
            self._vacant(post, child, reason, how)
        await handing_back

    async def _give_to_others(self, child: Child, crashed: bool) -> None:
        if not (crashed or child.ready.is_set()):
            return  # it never held anything
        # Leases last for longer while Redis is away.
        limit = self._clock() + 2 * self._lease_s
        while True:
            try:
                back = await self._hand_back(child.name, crashed=crashed)
            except BrokerUnavailable as error:
                if self._clock() >= limit:
                    message = "work not handed back: it waits for its lease"
                    log.error(message, worker=child.name, error=str(error))
                    return
                await self._sleep(self._jitter(0.0, HAND_BACK_AGAIN_S))
            else:
                if back.requests:
                    log.info(
                        "work handed back",
                        worker=child.name,
                        requests=back.requests,
                        crashed=crashed,
                        rids=list(back.rids),
                        buried=list(back.buried),
                    )
                if crashed and back.buried:
                    self._found_culprits()
                return

    def _vacant(self, post: Post, child: Child | None, reason: str, how: str) -> None:
        """Fill a post again, after a pause, or give up."""
        post.child = None
        if self._clock() - post.started_at >= SOUND_S:
            post.failures = 0
        # Full jitter, so that what failed together does not come back together.
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(post.failures, 16))
        pause_s = self._jitter(0.0, longest_s)
        post.failures += 1
        name, again_in_s = child.name if child else None, round(pause_s, 3)
        log.warning(
            "worker ended", number=post.number, worker=name, reason=reason, how=how, again_in_s=again_in_s
        )
        if max(self._crashes, self._culprits) < self._max_crashes:
            self._errand(self._refill(post, pause_s))
            return
        last = f"{how}, after the line {child.last_line()!r}" if child else reason
        what = f"{self._crashes} crashes"
        if self._crashes < self._max_crashes:
            what = f"{self._culprits} times a request that kills its workers"
        self._give_up(f"{what} without one answered request; of the last worker: {last}", 1)

    async def _refill(self, post: Post, pause_s: float) -> None:
        await self._sleep(pause_s)
        if post.child is None and not self._stop.is_set():
            self.restarts += 1
            self._fill(post)

    # --- all workers

    async def _roll(self) -> None:
        log.info("replacing the workers")
        for post in self._posts:
            try:
                successor = self._begin(post)
            except OSError as error:
                log.error("the other workers stay: no successor can be started", error=str(error))
                return
            if not await _sooner(successor.ready.wait(), successor.wait()):
                log.error("the other workers stay: a successor has ended", number=post.number)
                return
            predecessor, post.child = post.child, successor
            post.started_at, post.failures = self._clock(), 0
            if predecessor is not None:
                predecessor.stop()
                self._errand(self._kill_after(self._drain_limit_s, [predecessor]))
                await predecessor.wait()
        log.info("all workers are replaced")

    async def _drain(self) -> None:
        log.info("draining", workers=len(self._attended))
        if self._rolling is not None:
            self._rolling.cancel()
        self._stop_all()
        self._errand(self._kill_after(self._drain_limit_s))
        await asyncio.gather(*(child.wait() for child in self._attended.values()))
        for errand in self._errands:
            errand.cancel()
        if self._attended:
            # Work is still to be handed back, which the leases do if Redis stays away.
            await asyncio.wait(list(self._attended), timeout=self._last_words_s)
        for attending in self._attended:
            attending.cancel()

    async def _hurry(self) -> None:
        # Not in one go: of two equal signals that wait, a process sees one.
        await self._sleep(ORPHAN_GRACE_S / 4)
        self.stop()

    def _stop_all(self) -> None:
        for child in self._attended.values():
            child.stop()

    async def _kill_after(self, limit_s: float, children: Iterable[Child] | None = None) -> None:
        await self._sleep(limit_s)
        for child in self._attended.values() if children is None else children:
            if not child.ended:
                log.error("worker killed: it did not drain in time", worker=child.name)
                if self._stop.is_set():
                    self._status = self._status or 1
                child.kill()

    def _give_up(self, why: str, status: int) -> None:
        if not self._stop.is_set():
            message = f"giving up: {why}"
            log.error(message)
            self._status = status
            self._stop.set()

    def _errand(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task


async def _sooner(hoped_for: Coroutine[Any, Any, Any], feared: Coroutine[Any, Any, Any]) -> bool:
    """Whether the first comes before the second."""
    tasks = [asyncio.create_task(hoped_for), asyncio.create_task(feared)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return not tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
