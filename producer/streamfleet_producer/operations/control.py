"""Pause a queue, open it again, drain one of its workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from streamfleet_common.errors import DeadlineExceeded, ModelNotFound, RequestNotFound
from streamfleet_producer.names import listed
from streamfleet_producer.operations.operator_broker import OperatorBroker

LOOK_S = 0.25
"""How often a card is looked for; a worker takes it down at the end of its drain."""


@dataclass(frozen=True, slots=True)
class Pause:
    """How a queue stands after it was paused or opened."""

    queue: str
    is_paused: bool
    has_changed: bool
    """False if it was so before."""
    queued: int
    running: int


@dataclass(frozen=True, slots=True)
class Drain:
    """That a worker was asked to drain."""

    queue: str
    worker: str
    is_first: bool
    """False if it had been asked before."""
    others: tuple[str, ...]
    """The workers of the queue that go on: alive, and not asked to drain."""
    cleaned: tuple[str, ...]
    """Workers long gone, whose marks were taken away."""


async def pause(broker: OperatorBroker) -> Pause:
    """Let the queue refuse new requests (`QueueFull`, reason "paused"); what it has accepted goes on.

    Raises:
        ModelNotFound: no worker has ever announced this queue.
    """
    await known(broker)
    return await _paused(broker, await broker.pause())


async def resume(broker: OperatorBroker) -> Pause:
    """Let the queue take new requests again.

    Raises:
        ModelNotFound: no worker has ever announced this queue.
    """
    await known(broker)
    return await _paused(broker, await broker.resume())


async def drain(broker: OperatorBroker, worker: str) -> Drain:
    """Ask a worker to finish what it runs and to end; whoever keeps it starts another in its place.

    Raises:
        ModelNotFound: no worker has ever announced this queue.
        RequestNotFound: no such worker shows a card now; the message names those that do.
    """
    await known(broker)
    control = await broker.control()
    cleaned = control.leaked
    await broker.unmark_drain(cleaned)
    if worker not in control.workers:
        alive = listed(control.workers)
        raise RequestNotFound(
            f"no worker {worker[:80]!r} of queue {broker.keys.queue!r} is alive; those that are: {alive}",
            known=list(control.workers),
        )
    if worker not in control.drains:
        await broker.mark_drain(worker)
    others = tuple(one for one in control.workers if one != worker and one not in control.drains)
    return Drain(broker.keys.queue, worker, worker not in control.drains, others, cleaned)


async def drained(broker: OperatorBroker, worker: str, *, within_s: float) -> None:
    """Wait until a worker has taken its card down, or has been silent for so long that it ran out.

    Raises:
        DeadlineExceeded: it had not after `within_s` seconds; it goes on draining.
    """
    try:
        async with asyncio.timeout(within_s):
            while worker in (await broker.control()).workers:  # noqa: ASYNC110 (Redis has no event for it)
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise DeadlineExceeded(
            f"worker {worker} still drains after {within_s:g} s: it finishes what it runs, and then ends"
        ) from None


async def known(broker: OperatorBroker) -> None:
    """Refuse a queue that nobody ever served: it is misspelled, or the URL is another server's.

    Raises:
        ModelNotFound: no worker has ever announced this queue; `known` lists those there are.
    """
    names = await broker.queues()
    if broker.keys.queue not in names:
        there = listed(names)
        raise ModelNotFound(
            f"no worker has ever announced queue {broker.keys.queue!r}; the queues there are: {there}",
            known=names,
        )


async def _paused(broker: OperatorBroker, has_changed: bool) -> Pause:
    control, depth = await broker.control(), await broker.depth()
    return Pause(broker.keys.queue, control.is_paused, has_changed, depth.queued, depth.running)
