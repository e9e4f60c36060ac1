"""URLs: what they may say, and what is never repeated of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection

from streamfleet_common.broker import Broker
from streamfleet_common.connections import BLOCK_MS, Connections, redacted
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user:s3cret@host/0", "redis://user:***@host/0"),
        ("redis://user@host/0", "redis://user@host/0"),
        ("rediss://user:s3@cret@host:1/0", "rediss://user:***@host:1/0"),
        ("redis://user:s3/cret@host", "redis://user:***@host"),
        ("redis://user:s3#cret@host", "redis://user:***@host"),
        ("redis://user:s3?cret@host", "redis://user:***@host"),
        ("redis://user:://s3cret@host", "redis://user:***@host"),
        ("redis://host/0?password=s3cret&db=1", "redis://host/0?password=***&db=1"),
        ("redis://host/0?db=1&password=s3cret", "redis://host/0?db=1&password=***"),
        ("unix://user:s3cret@/path/socket", "unix://user:***@/path/socket"),
        ("unix:///path/socket?db=1", "unix:///path/socket?db=1"),
        ("user:s3cret@host", "user:***@host"),
        ("redis://[::1", "redis://[::1"),
        ("", ""),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis://user:s3cret@host:port/0",
        "redis://user:s3/cret@host:6379/0",
        "http://user:s3cret@host",
        "redis://host:port?password=s3cret",
        "redis://[::1",
        "redis://host:99999999/0",
        "redis://host/0?socket_timeout=soon",
    ],
)
def test_no_redis_url(url: str) -> None:
    with pytest.raises(BrokerUnavailable, match="is no Redis URL") as caught:
        Connections.open(url)
    for secret in ("s3cret", "s3", "cret"):
        assert secret not in str(caught.value)


OPTIONS = (
    "socket_timeout=0.001&socket_connect_timeout=0.001&retry_on_timeout=true&health_check_interval=1"
    "&max_connections=1&decode_responses=true&timeout=0"
)


@pytest.mark.parametrize("options", ["", "?" + OPTIONS])
async def test_options_in_the_url_do_not_loosen_what_counts(options: str) -> None:
    connections = Connections.open(f"redis://localhost:1/0{options}", max_connections=7)
    clients = (connections.commands, connections.reader, connections.pubsub)
    for client, size, timeout_s in zip(clients, (7, 1, 1), (5.0, BLOCK_MS / 1000 + 5.0, None), strict=True):
        pool: Any = client.connection_pool
        assert pool.max_connections == size
        connection = pool.make_connection()
        assert connection.socket_timeout == timeout_s
        assert connection.socket_connect_timeout == 5.0
        assert connection.retry.get_retries() == 0
        assert connection.health_check_interval == 0
        assert not connection.encoder.decode_responses
    await connections.close()


async def test_tls_and_sockets_have_connections_of_their_own() -> None:
    for url, kind in (("rediss://h", SSLConnection), ("unix:///s", UnixDomainSocketConnection)):
        connections = Connections.open(url)
        pool: Any = connections.commands.connection_pool
        assert isinstance(pool.make_connection(), kind)
        await connections.close()


async def test_a_unix_socket(tmp_path: Path) -> None:
    with EmbeddedBroker(unix_socket=tmp_path / "s") as server:
        connections = Connections.open(server.url)
        await Broker(connections, "q").ping()
        await connections.close()


async def test_close_twice(connections: Connections) -> None:
    await Broker(connections, "q").ping()
    await connections.close()
    await copy.copy(connections).close()
