"""A broker and a worker with the scripted engine, for all tests of the commands in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer.cli.workers import Workers

READY_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def fleet_url() -> Iterator[str]:
    """The URL of a broker of its own, with a scripted worker on the queue `smollm2`."""
    with EmbeddedBroker() as broker:
        worker = Workers({"redis_url": broker.url, "queue": "smollm2", "engine": "scripted"})
        try:
            assert worker.wait_ready(READY_LIMIT_S), worker.tail()
            yield broker.url
        finally:
            worker.kill()
