"""A fleet as it is in production: a broker, and worker processes with a real if tiny model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from command import environment
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client
from tiny_model import tiny_model

QUEUE = "tiny"
WORKERS = 2
LIMIT_S = 150.0  # torch takes seconds to import on a busy machine


@contextmanager
def worker(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process on the queue `tiny`, drained at the end."""
    settings = {
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": QUEUE,
        "STREAMFLEET_ENGINE": "generation",
        "STREAMFLEET_MODEL": str(tiny_model()),
        "STREAMFLEET_MAX_SEQ_LEN": "256",
        "STREAMFLEET_LOG_LEVEL": "warning",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "streamfleet_worker"], env=environment(**settings)
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


@pytest.fixture(scope="session")
def fleet_url() -> Iterator[str]:
    """The URL of a broker whose queue `tiny` two workers serve."""
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        for _ in range(WORKERS):
            stack.enter_context(worker(broker.url))
        asyncio.run(_served(broker.url))
        yield broker.url


async def _served(url: str) -> None:
    async with asyncio.timeout(LIMIT_S), Client(url, queue=QUEUE) as client:
        while len(await client.models()) < WORKERS:  # noqa: ASYNC110 (other processes make it true)
            await asyncio.sleep(0.05)


@pytest.fixture
async def fleet(fleet_url: str) -> AsyncIterator[Client]:
    """A client of that queue."""
    async with Client(fleet_url, queue=QUEUE) as client:
        yield client
