"""What became of a worker in this process and of its requests, in a word."""

from __future__ import annotations

from eventually import eventually
from hired import Hired, events, text_of
from streamfleet_common.broker import Broker


def echo(count: int) -> str:
    """What the scripted engine answers to `ECHO count`."""
    return " ".join(f"tok{i}" for i in range(count))


async def polled_again(hired: Hired) -> None:
    """Wait until the worker has looked for work, or found no room for it, twice more."""
    consumer = hired.worker._consumer
    for _ in range(2):
        last = consumer.polled_at
        await eventually(lambda: consumer.polled_at != last, "a poll")  # noqa: B023


async def states(broker: Broker, rids: list[str]) -> dict[str, int]:
    """How many of them are in which state."""
    counted: dict[str, int] = {}
    for found in await broker.status(rids, "default"):
        assert found is not None
        counted[found.state] = counted.get(found.state, 0) + 1
    return counted


async def has_text(broker: Broker, rid: str) -> bool:
    """Whether a stream has shown any text."""
    return bool(text_of(await events(broker, rid)))


async def is_empty(broker: Broker) -> bool:
    """Whether the queue is."""
    depth = await broker.depth()
    return (depth.queued, depth.running) == (0, 0)
