"""A fleet of one worker, moved by hand, and a client that trusts nothing but messages and the log."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from hand_worker import HandWorker
from streamfleet_producer import Client


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[HandWorker]:
    async with HandWorker(redis_url) as worker:
        await worker.announce()
        yield worker


@pytest.fixture
async def fleet(redis_url: str, worker: HandWorker) -> AsyncIterator[Client]:
    # A minute of silence is never reached: what a test expects must come by itself.
    async with Client(redis_url, queue="q", silence_s=60) as fleet:
        yield fleet


@pytest.fixture
def unused_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
