"""Queues on real servers, with workers in this process and in others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
import structlog

from delivery.workers import Nursery, WorkerProcess
from gated_engine import GatedEngine
from hired import Hired
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where worker processes come from."""
    with Nursery(tmp_path_factory.mktemp("workers")) as made:
        yield made


@pytest.fixture
def launch(nursery: Nursery, redis_url: str) -> Iterator[Callable[..., WorkerProcess]]:
    """Begins worker processes on the queue `q`, and ends them after the test."""
    crew: list[WorkerProcess] = []

    def begin(**settings: object) -> WorkerProcess:
        crew.append(nursery.worker(redis_url, **settings))
        return crew[-1]

    yield begin
    for process in crew:
        process.end()


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
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    crew: list[Hired] = []

    async def hire_one(engine: GatedEngine | None = None, *, url: str = redis_url, **options: Any) -> Hired:
        hired = Hired(url, f"w{len(crew) + 1}", engine or GatedEngine(), **options)
        crew.append(hired)
        return await hired.start()

    yield hire_one
    for hired in crew:
        await hired.dismiss()
