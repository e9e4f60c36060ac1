"""Load for a fleet: requests at a rate or by so many callers, each recorded as its caller saw it."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from streamfleet_common.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    StreamfleetError,
)
from streamfleet_common.schemas import Delta, End, GenerateRequest, Request
from streamfleet_producer.client import Client
from streamfleet_producer.report.records import MAX_GAPS, Outcome, RequestLine, SampleLine
from streamfleet_producer.ticket import Options

SAMPLE_S = 0.5
BREATH_S = 0.05
"""A caller who was refused asks again so late, or the loop would do nothing else."""


@dataclass(frozen=True)
class Plan:
    """What to do: `rate` requests a second whatever comes of them, or `callers` that each wait for an answer.

    Raises:
        InvalidRequest: it is neither or both, or a number is out of its range.
    """

    seconds: float
    rate: float | None = None
    callers: int | None = None
    poisson: bool = False
    """Arrivals at random, as those of independent people are, and not evenly."""
    most_open: int = 4096
    """At a rate: so many at once; who comes then waits here, which counts as his latency."""
    seed: int = 0
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.callers is None):
            raise InvalidRequest("give either a rate (an open loop) or how many callers (a closed one)")
        if self.rate is not None and not 0 < self.rate <= 1e5:
            raise InvalidRequest("the rate has to be above 0 and at most 100,000 requests a second")
        if self.callers is not None and not 1 <= self.callers <= 10_000:
            raise InvalidRequest("from 1 to 10,000 callers are possible")
        if not 0 < self.seconds <= 86_400:
            raise InvalidRequest("the load has to last more than 0 seconds, and a day at most")
        if self.poisson and self.rate is None:
            raise InvalidRequest("arrivals at random need a rate: callers come when they were answered")

    def arrivals(self) -> Iterator[float]:
        """The times of an open loop's requests, in seconds from the start."""
        if self.rate is None:
            return
        draw, at = random.Random(self.seed), 0.0
        for number in itertools.count():
            if not self.poisson:
                at = number / self.rate
            if at >= self.seconds:
                return
            yield at
            if self.poisson:
                at += draw.expovariate(self.rate)


class LoadRun:
    """Sends requests, one after the other of those given and then from the first one again.

    `write` takes a line of records as it comes to be: of each request that has ended, and samples meanwhile.
    """

    def __init__(
        self,
        fleet: Client,
        requests: Sequence[Request],
        plan: Plan,
        write: Callable[[RequestLine | SampleLine], None],
    ) -> None:
        self._fleet = fleet
        self._requests = itertools.cycle(requests)
        self._plan = plan
        self._write = write
        self._began = 0.0

    async def run(self) -> None:
        """Load the fleet for as long as planned, then wait for what is still open.

        How long that takes, the requests' deadlines say.

        Raises:
            OSError: what was recorded could not be written; all that is open is cancelled.
        """
        self._began = time.perf_counter()
        sampling = asyncio.ensure_future(self._sample())
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._plan.callers is None:
                    await self._open_loop(tasks)
                else:
                    for _ in range(self._plan.callers):
                        tasks.create_task(self._caller())
        except ExceptionGroup as group:
            # All fail of the same, and the first one says it.
            raise group.exceptions[0] from None
        finally:
            sampling.cancel()
            with suppress(asyncio.CancelledError):
                await sampling

    async def _open_loop(self, tasks: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(self._plan.most_open)

        async def one(request: Request, due_ms: float) -> None:
            try:
                await self._send(request, due_ms)
            finally:
                room.release()

        for at in self._plan.arrivals():
            delay = at - self._now_ms() / 1000
            # Behind its time it yields all the same, or a burst would be sent before any answer is read.
            await asyncio.sleep(max(0.0, delay))
            await room.acquire()
            tasks.create_task(one(next(self._requests), at * 1000))

    async def _caller(self) -> None:
        while (now_ms := self._now_ms()) < self._plan.seconds * 1000:
            if await self._send(next(self._requests), now_ms) == "refused":
                await asyncio.sleep(BREATH_S)

    async def _send(self, request: Request, due_ms: float) -> Outcome:
        """One request from its submission to its end, which is recorded."""
        seen = _Seen(self._now_ms())
        outcome: Outcome = "done"
        error = ""
        try:
            if isinstance(request, GenerateRequest):
                async with self._fleet.stream(request, **self._plan.options) as tokens:
                    seen.is_accepted = True
                    async for delta in tokens:
                        if isinstance(delta, Delta):
                            seen.piece(self._now_ms())
                    end = tokens.result
            else:
                end = await self._fleet.run(request, **self._plan.options)
        except StreamfleetError as failure:
            outcome, error, end = _outcome(failure, seen), failure.code, None
        self._write(
            seen.line(request, due_ms=due_ms, now_ms=self._now_ms(), outcome=outcome, error=error, end=end)
        )
        return outcome

    async def _sample(self) -> None:
        while True:
            with suppress(StreamfleetError):  # what cannot be read is no sample
                depth, cards = await asyncio.gather(self._fleet.depth(), self._fleet.models())
                rows = sum(card.limits.max_batch_size for card in cards)
                self._write(
                    SampleLine(
                        at_ms=round(self._now_ms(), 3),
                        queued=depth.queued,
                        running=depth.running,
                        rows=min(depth.running, rows) if rows else None,
                        max_rows=rows or None,
                    )
                )
            await asyncio.sleep(SAMPLE_S)

    def _now_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


@dataclass
class _Seen:
    """What a caller sees of one request; times in milliseconds from the start of the run."""

    sent_ms: float
    is_accepted: bool = False
    first_ms: float | None = None
    last_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)

    def piece(self, now_ms: float) -> None:
        if self.first_ms is None:
            self.first_ms = now_ms
        elif len(self.gaps_ms) < MAX_GAPS:
            self.gaps_ms.append(round(now_ms - self.last_ms, 3))
        self.last_ms = now_ms

    def line(
        self, request: Request, *, due_ms: float, now_ms: float, outcome: Outcome, error: str, end: End | None
    ) -> RequestLine:
        started_ms = None
        if end is not None and end.started_at_ms:
            # Both on the server's clock, of which only the difference means anything here.
            latest_ms = now_ms if self.first_ms is None else self.first_ms  # its milliseconds are whole
            started_ms = min(latest_ms, self.sent_ms + max(0, end.started_at_ms - end.queued_at_ms))
        batch = None if end is None else end.batch
        size = 0 if batch is None else batch.size
        return RequestLine(
            kind=request.kind,
            submitted_ms=round(due_ms, 3),
            sent_ms=round(max(due_ms, self.sent_ms), 3),
            started_ms=None if started_ms is None else round(max(due_ms, started_ms), 3),
            first_token_ms=None if self.first_ms is None else round(self.first_ms, 3),
            ended_ms=round(now_ms, 3),
            gaps_ms=tuple(self.gaps_ms),
            prompt_tokens=0 if end is None else end.usage.prompt_tokens,
            completion_tokens=0 if end is None else end.usage.completion_tokens,
            outcome=outcome,
            error=error,
            batch_size=size or None,
        )


def _outcome(failure: StreamfleetError, seen: _Seen) -> Outcome:
    if not seen.is_accepted and isinstance(failure, (QueueFull, ModelNotFound, InvalidRequest, Conflict)):
        return "refused"
    if isinstance(failure, DeadlineExceeded):
        return "expired"
    if isinstance(failure, Cancelled):
        return "cancelled"
    return "failed"
