"""Fixtures around a broker on the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from lossy_proxy import LossyProxy
from streamfleet_common import calls
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.keys import Keys


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module with `PROTOCOLS` in each of them: their replies differ in shape."""
    protocols = getattr(metafunc.module, "PROTOCOLS", None)
    if protocols and "connections" in metafunc.fixturenames:
        metafunc.parametrize("connections", protocols, indirect=True)


@pytest.fixture
async def connections(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Connections]:
    protocol = getattr(request, "param", "resp3")
    opened = Connections.open(f"{redis_url}?protocol={protocol[-1]}")
    yield opened
    await opened.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that fail are repeated at once, and not for long."""
    monkeypatch.setattr(calls, "BACKOFF_S", 0.001)
    monkeypatch.setattr(calls, "BUDGET_S", 0.1)


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


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_url) as made:
        yield made


@pytest.fixture
async def lossy(proxy: LossyProxy, raw: Any) -> AsyncIterator[Broker]:
    """A broker behind the proxy, all of whose scripts the server knows already."""
    connections = Connections.open(proxy.url)
    made = Broker(connections, "q")
    for script in made._calls._scripts.values():
        raw.script_load(script.text)
    await made.create_groups()
    yield made
    await connections.close()
