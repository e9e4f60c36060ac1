"""Fixtures around a broker on the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.keys import Keys


@pytest.fixture
async def connections(redis_url: str) -> AsyncIterator[Connections]:
    opened = Connections.open(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
async def broker(connections: Connections) -> Broker:
    """A queue called `q` whose groups are there."""
    made = Broker(connections, "q")
    await made.create_groups()
    return made


@pytest.fixture
def keys() -> Keys:
    return Keys("q")


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    """A plain client, to see what is really there."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client
