"""The page of a host: what all workers of one supervisor tell Prometheus and the probes, at one port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Shown
from prometheus_client.registry import Collector

from streamfleet_worker.child import Child
from streamfleet_worker.supervisor import Supervisor
from streamfleet_worker.tally import SUMMED, Family, Tally, Totals

ASK_S = 1.0
"""How long a worker may take to tell its tally. Whoever takes longer is left out of the gauges."""
READ_S = 5.0
"""So often all are asked, also if nobody reads the page: what a worker has counted since dies with it."""
SILENT_S = 10.0
"""A worker that has answered before, and then not for so long, hangs."""
LOOP_LIMIT_S = 3.0
"""How long this process's own event loop may take for an answer."""

_T = TypeVar("_T")


class HostPage(Collector):
    """Asks the workers when it is read. Scrapes and probes come on threads; the rest is the event loop's.

    Counters and histograms are sums over all processes there have been, so they never fall. Gauges, which
    have a label `worker`, are those of processes that live and answer, one a slot: of a worker that drains
    while its successor takes work, only what it counts is told.
    """

    def __init__(
        self, supervisor: Supervisor, queue: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._supervisor = supervisor
        self._queue = queue
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._totals = Totals()
        self._heard_at: dict[Child, float] = {}

    # --- on the event loop

    def heard(self, child: Child, tally: Tally) -> None:
        """Take in what a worker tells, whenever it does."""
        self._totals.take(child, tally)
        self._heard_at[child] = self._clock()

    async def keep(self) -> None:
        """Ask all workers now and then, until cancelled."""
        while True:
            await asyncio.sleep(READ_S)
            await self._ask()

    async def _ask(self) -> dict[Child, Tally]:
        """The tallies of those that live and answer."""
        children = [child for child in self._supervisor.children if child.tally is not None]
        answers = await asyncio.gather(*(child.tally.ask(ASK_S) for child in children if child.tally))
        for child in [child for child in self._heard_at if child.ended]:
            self._totals.end(child)
            del self._heard_at[child]
        return {
            child: tally
            for child, tally in zip(children, answers, strict=True)
            if tally is not None and not child.ended
        }

    async def _metrics(self) -> list[Shown]:
        answers = await self._ask()
        gauges: dict[str, Family] = {}
        for post in self._supervisor.posts:
            for family in answers[post.child].families if post.child in answers else ():
                if family.kind not in SUMMED:
                    found = gauges.setdefault(family.name, Family(family.name, family.kind, family.text))
                    found.samples |= family.samples
        return [*map(_shown, self._totals.families()), *map(_shown, gauges.values()), *self._own()]

    def _own(self) -> Iterator[Shown]:
        states = GaugeMetricFamily(
            "streamfleet_supervisor_workers",
            "Workers that this supervisor keeps: down are those that are to be started again.",
            labels=["queue", "state"],
        )
        for state, count in self._states().items():
            states.add_metric([self._queue, state], count)
        yield states
        restarts = CounterMetricFamily(
            "streamfleet_worker_restarts",
            "Workers started in the place of one that had ended unasked.",
            labels=["queue"],
        )
        restarts.add_metric([self._queue], self._supervisor.restarts)
        yield restarts

    def _states(self) -> dict[str, int]:
        alive = [child for child in self._supervisor.children if not child.ended]
        found = dict.fromkeys(("starting", "ready", "draining", "down"), 0)
        for child in alive:
            found["draining" if child.told_to_stop else "ready" if child.ready.is_set() else "starting"] += 1
        found["down"] = sum(post.child not in alive for post in self._supervisor.posts)
        return found

    async def _unready(self) -> str | None:
        answers = await self._ask()
        posts = self._supervisor.posts
        told = {post.number: _unready(answers.get(post.child) if post.child else None) for post in posts}
        return None if None in told.values() else f"no worker is ready ({_listed(told)})"

    async def _unhealthy(self) -> str | None:
        answers = await self._ask()
        told = {
            post.number: self._wrong(post.child, answers)
            for post in self._supervisor.posts
            if post.child is not None and not post.child.ended
        }
        # One of several is the supervisor's business, which goes on.
        return None if not told or None in told.values() else f"no worker is healthy ({_listed(told)})"

    def _wrong(self, child: Child, answers: dict[Child, Tally]) -> str | None:
        if child in answers:
            return answers[child].unhealthy
        silent_s = self._clock() - self._heard_at.get(child, self._clock())
        return f"no answer for {silent_s:.0f} s" if silent_s > SILENT_S else None

    # --- on threads

    def collect(self) -> Iterator[Shown]:
        yield from self._on_loop(self._metrics())

    def describe(self) -> Iterator[Shown]:
        # Without it the registry would ask at once.
        return iter(())

    def unready(self) -> str | None:
        """Why no worker takes work, or None if one does."""
        return self._probed(self._unready())

    def unhealthy(self) -> str | None:
        """Why all of this should be started again, or None."""
        return self._probed(self._unhealthy())

    def _probed(self, question: Coroutine[Any, Any, str | None]) -> str | None:
        try:
            return self._on_loop(question)
        except TimeoutError:
            return "the supervisor's event loop does not move"

    def _on_loop(self, question: Coroutine[Any, Any, _T]) -> _T:
        asking = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return asking.result(LOOP_LIMIT_S)
        except TimeoutError:
            asking.cancel()
            raise


def _unready(tally: Tally | None) -> str | None:
    return "no answer" if tally is None else tally.unready


def _listed(told: dict[int, str | None]) -> str:
    return "; ".join(f"{number}: {why}" for number, why in told.items())


def _shown(family: Family) -> Shown:
    shown = Shown(family.name, family.text, family.kind)
    for (name, labels), value in family.samples.items():
        shown.add_sample(name, dict(labels), value)
    return shown
