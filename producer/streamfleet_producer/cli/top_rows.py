"""From readings to what is shown: rates, percentiles, and how full batches are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from streamfleet_common.figures import QueueFigures
from streamfleet_common.worker_stats import TOKEN_BOUNDS_S, WAIT_BOUNDS_S, WorkerStats
from streamfleet_producer.cli.top_reading import Member, Reading

SPAN_S = 10.0
"""How far back the rate of a queue goes: over one interval it would jump."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker. None stands for what it does not say, or has nothing to say of."""

    queue: str
    worker: str
    model: str
    device: str
    state: str
    """ready, draining, or asked: to drain, but its card does not say yet that it does."""
    capacity: int
    max_batch_size: int
    window_s: float | None
    running: int | None
    waiting: int | None
    batch_rows: float | None
    """The mean over its batches."""
    batch_fill: float | None
    """That as a share of what a batch may have."""
    kv_usage: float | None
    ended_per_s: float | None
    failed_per_s: float | None
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue. None stands for what nobody says."""

    figures: QueueFigures
    models: tuple[str, ...]
    oldest_s: float | None
    """The age of the oldest request that waits; None where none does."""
    ended_per_s: float | None
    failed_per_s: float | None
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    batch_fill: float | None
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None

    @property
    def queue(self) -> str:
        return self.figures.queue

    @property
    def is_unserved(self) -> bool:
        """Whether something waits, and no worker takes it."""
        return self.figures.queued > 0 and self.figures.ready == 0


class EndedRates:
    """How fast requests of each queue end, by what Redis counted at the last readings."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, int]]] = deque(maxlen=1000)

    def take(self, reading: Reading) -> dict[str, float]:
        """Requests a second by queue; a queue that was seen for the first time is left out."""
        self._seen.append((reading.at_ms, {one.queue: one.ended for one in reading.queues}))
        while len(self._seen) > 2 and reading.at_ms - self._seen[0][0] > SPAN_S * 1000:
            self._seen.popleft()
        then_ms, before = self._seen[0]
        seconds = (reading.at_ms - then_ms) / 1000
        if seconds <= 0:
            return {}
        return {
            one.queue: (one.ended - before[one.queue]) / seconds
            for one in reading.queues
            # Less than before: somebody has emptied Redis.
            if before.get(one.queue, one.ended + 1) <= one.ended
        }


def queue_rows(reading: Reading, ended_per_s: dict[str, float]) -> list[QueueRow]:
    """A row a queue; where `ended_per_s` has no rate of it, its workers' last half minute stands in."""
    members: dict[str, list[Member]] = {}
    for member in reading.workers:
        members.setdefault(member.card.queue, []).append(member)
    return [_queue_row(one, members.get(one.queue, []), ended_per_s.get(one.queue)) for one in reading.queues]


def worker_rows(reading: Reading) -> list[WorkerRow]:
    """A row a worker."""
    return [_worker_row(member) for member in reading.workers]


def percentiles(counts: Iterable[Sequence[int]], bounds: Sequence[float]) -> Percentiles | None:
    """Of values that were counted by these bounds, by several workers; None where there are none."""
    summed = [0] * (len(bounds) + 1)
    for some in counts:
        for at, count in enumerate(some[: len(summed)]):
            summed[at] += count
    if not any(summed):
        return None
    return Percentiles(*(_percentile(summed, bounds, share) for share in (0.50, 0.95, 0.99)))


def _percentile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """As Prometheus' `histogram_quantile`: values are thought to lie evenly between two bounds."""
    rank = share * sum(counts)
    below = 0
    for at, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[at - 1] if at else 0.0
            return low + (bounds[at] - low) * (rank - below) / count
        below += count
    return bounds[-1]


def _queue_row(figures: QueueFigures, members: list[Member], ended_per_s: float | None) -> QueueRow:
    told = [(member.card, member.card.stats) for member in members]
    stats = [some for _, some in told if some is not None]
    room = sum(some.batches * card.limits.max_batch_size for card, some in told if some is not None)
    ages = [age for lane, age in figures.oldest_s.items() if figures.lanes.get(lane)]
    return QueueRow(
        figures=figures,
        models=tuple(sorted({member.card.model for member in members})),
        oldest_s=max(ages, default=None) if figures.queued else None,
        ended_per_s=_rate(stats, lambda some: some.ended) if ended_per_s is None else ended_per_s,
        failed_per_s=_rate(stats, lambda some: some.failed),
        prompt_tokens_per_s=_rate(stats, lambda some: some.prompt_tokens),
        generated_tokens_per_s=_rate(stats, lambda some: some.generated_tokens),
        batch_fill=sum(some.batch_rows for some in stats) / room if room else None,
        ttft_s=percentiles([some.ttft for some in stats], WAIT_BOUNDS_S),
        itl_s=percentiles([some.itl for some in stats], TOKEN_BOUNDS_S),
        e2e_s=percentiles([some.e2e for some in stats], WAIT_BOUNDS_S),
    )


def _worker_row(member: Member) -> WorkerRow:
    card, stats = member.card, member.card.stats
    some = [] if stats is None else [stats]
    rows = stats.batch_rows / stats.batches if stats is not None and stats.batches else None
    return WorkerRow(
        queue=card.queue,
        worker=card.worker,
        model=card.model,
        device=card.device,
        state="asked" if member.is_asked and card.state == "ready" else card.state,
        capacity=card.capacity,
        max_batch_size=card.limits.max_batch_size,
        window_s=None if stats is None else stats.window_s,
        running=None if stats is None else stats.running,
        waiting=None if stats is None else stats.waiting,
        batch_rows=rows,
        batch_fill=None if rows is None else rows / card.limits.max_batch_size,
        kv_usage=None if stats is None else stats.kv_usage,
        ended_per_s=_rate(some, lambda one: one.ended),
        failed_per_s=_rate(some, lambda one: one.failed),
        prompt_tokens_per_s=_rate(some, lambda one: one.prompt_tokens),
        generated_tokens_per_s=_rate(some, lambda one: one.generated_tokens),
        ttft_s=percentiles([one.ttft for one in some], WAIT_BOUNDS_S),
        itl_s=percentiles([one.itl for one in some], TOKEN_BOUNDS_S),
        e2e_s=percentiles([one.e2e for one in some], WAIT_BOUNDS_S),
    )


def _rate(stats: Iterable[WorkerStats], count: Callable[[WorkerStats], int]) -> float | None:
    """So many a second, of all together; None where none has looked back yet."""
    rates = [count(some) / some.window_s for some in stats if some.window_s > 0]
    return sum(rates) if rates else None
