"""A queue on the real server, and workers for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
import structlog

from gated_engine import GatedEngine
from hired import Hired
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_worker import consumer as consumer_module
from stub_queue import Post, StubQueue


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    # Not what an earlier test's worker has set up, and no tracebacks full of pictures: they take long.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    """The queue `q`, as a producer or an onlooker sees it."""
    connections = Connections.open(redis_url)
    yield Broker(connections, "q")
    await connections.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client, to see what is really there."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
async def hire(redis_url: str) -> AsyncIterator[Callable[..., Awaitable[Hired]]]:
    """Starts workers in this process, and dismisses them after the test."""
    crew: list[Hired] = []

    async def hire_one(engine: GatedEngine | None = None, *, url: str = redis_url, **options: Any) -> Hired:
        hired = Hired(url, f"w{len(crew) + 1}", engine or GatedEngine(), **options)
        crew.append(hired)
        return await hired.start()

    yield hire_one
    for hired in crew:
        await hired.dismiss()


@pytest.fixture
def queue() -> StubQueue:
    return StubQueue()


@pytest.fixture
async def post(queue: StubQueue, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Post]:
    monkeypatch.setattr(consumer_module, "MAX_BACKOFF_S", 0.01)
    made = Post(queue)
    yield made
    made.consumer.stop()
    if made.task is not None:
        await made.task
