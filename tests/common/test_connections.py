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
        ("redis+sentinel://u:s3cret@a:1,b:2/m/0", "redis+sentinel://u:***@a:1,b:2/m/0"),
        (
            "redis+sentinel://a/m?sentinel_password=s3cret&db=1",
            "redis+sentinel://a/m?sentinel_password=***&db=1",
        ),
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
        "redis://host/0?no_such_option=1",
        "redis+cluster://host/0",
        "redis+sentinel://a:1,b:2",
        "redis+sentinel://a:1,b:2/m/x",
        "redis+sentinel://:s3cret@a:1,b:99999/m",
        "redis+sentinel://:s3cret@a:b/m",
        "redis+sentinel:///m",
        "redis+sentinel://a/m?sentinel_socket_timeout=1",
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
    for client, size, timeout_s in (
        (connections.commands, 7, 5.0),
        (connections.reader, 1, BLOCK_MS / 1000 + 5.0),
        (connections.pubsub, 1, None),
        (connections.leases, 2, 2.0),
    ):
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


async def test_a_url_of_sentinels() -> None:
    url = "rediss+sentinel://u:p%40w@a:1,[::1]:3,c/my%20name/2?sentinel_password=q&ssl_ca_certs=/ca&timeout=0"
    connections = Connections.open(url)
    for client in (connections.commands, connections.reader, connections.pubsub, connections.leases):
        pool: Any = client.connection_pool
        connection: Any = pool.make_connection()
        assert issubclass(type(connection), SSLConnection)
        assert (connection.username, connection.password, connection.db) == ("u", "p@w", 2)
        assert connection.retry.get_retries() == 0
        primary = connection._primary
        assert (primary._name, primary._hosts) == ("my name", [("a", 1), ("::1", 3), ("c", 26379)])
        for sentinel in primary._sentinel.sentinels:
            options = sentinel.connection_pool.connection_kwargs
            assert (options["username"], options["password"]) == (None, "q")
            assert options["ssl_ca_certs"] == "/ca"
            assert options["socket_timeout"] == options["socket_connect_timeout"] == 1.0
            assert sentinel.connection_pool.connection_class is SSLConnection
    await connections.close()


async def test_no_sentinel() -> None:
    connections = Connections.open(
        "redis+sentinel://:s3cret@127.0.0.1:1,127.0.0.1:2/m/0?sentinel_password=s3cret"
    )
    with pytest.raises(BrokerUnavailable, match="names a primary of 'm'") as caught:
        await Broker(connections, "q").ping()
    assert caught.value.reason == "unreachable"
    assert "127.0.0.1:1, 127.0.0.1:2" in str(caught.value)
    assert "s3cret" not in str(caught.value)
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
