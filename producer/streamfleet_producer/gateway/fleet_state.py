"""What the fleet does now: its queues and their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from streamfleet_common.cards import Card, Limits
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.operation import Operation

AT_ONCE = 32
"""Queues that Redis is asked about at a time."""


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WorkerState(_Answer):
    """One live worker, as its card says."""

    worker: str
    model: str
    revision: str
    tasks: tuple[str, ...]
    state: str
    """ready, or draining."""
    capacity: int
    """Requests it could take now."""
    device: str
    precision: str
    streams: bool
    """A handler whose output comes in parts."""
    limits: Limits

    @classmethod
    def of(cls, card: Card) -> WorkerState:
        """A worker's state."""
        return cls(
            worker=card.worker,
            model=card.model,
            revision=card.revision,
            tasks=tuple(card.tasks),
            state=card.state,
            capacity=card.capacity,
            device=card.device,
            precision=card.precision,
            streams=card.handler is not None and card.handler.streams,
            limits=card.limits,
        )


class QueueState(_Answer):
    """One queue; counts are of accepted and unfinished requests."""

    queue: str
    queued: int
    """Nobody has read them."""
    running: int
    limit: int
    """So many may be queued and running."""
    dead: int
    """Dead letters."""
    oldest_wait_ms: int
    """How long the one that waits longest has waited; 0 if none waits."""
    workers: tuple[WorkerState, ...]


class FleetState(_Answer):
    """All queues that can be reached here, by name."""

    queues: tuple[QueueState, ...]


async def fleet(call: Call[None]) -> Response:
    """Queues and workers as they are now. Raises BrokerUnavailable."""
    cards = await call.services.directory.cards()
    turn = asyncio.Semaphore(AT_ONCE)

    async def look(queue: str) -> QueueState:
        async with turn:
            return await _state(call, queue, cards[queue])

    states = await asyncio.gather(*(look(queue) for queue in sorted(cards)))
    return json_response(FleetState(queues=tuple(states)).model_dump(mode="json"))


async def _state(call: Call[None], queue: str, cards: Sequence[Card]) -> QueueState:
    broker = call.services.directory.broker(queue)
    depth, backlog = await asyncio.gather(broker.depth(), broker.backlog(1))
    return QueueState(
        queue=queue,
        queued=depth.queued,
        running=depth.running,
        limit=depth.limit,
        dead=depth.dead,
        oldest_wait_ms=backlog.oldest_ms,
        workers=tuple(map(WorkerState.of, cards)),
    )


OPERATIONS = (
    Operation(
        "GET",
        "/v1/fleet",
        fleet,
        "The queues with what waits and runs, and the workers that live.",
        "fleet",
        answer=FleetState,
    ),
)
