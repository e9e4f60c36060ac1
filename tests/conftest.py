"""Fixtures every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from streamfleet_common.embedded import EmbeddedBroker


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedBroker]:
    """A real server, one per test process; ask for `redis_url` unless you mean to break it."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def redis_url(server: EmbeddedBroker) -> str:
    """The URL of a real and empty server."""
    server.start()  # does nothing, unless the test before killed it
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url
