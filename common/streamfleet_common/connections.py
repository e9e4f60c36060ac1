"""The Redis clients a process needs, each with the timeouts and retries that are safe for its work.

redis-py resends a command whose reply was lost. That doubles whatever is not idempotent, so the library's
own retry is off everywhere; `Calls` repeats the scripts, which are made for it.

What a URL may name:

* one server: `redis://host:6379/0`, `rediss://…` for TLS, `unix:///path/to/socket`. A name that a managed
  failover moves is resolved anew for every connection.
* a primary that Sentinels watch: `redis+sentinel://user:password@host:26379,host:26379/mymaster/0`, or
  `rediss+sentinel://…` for TLS to all. `sentinel_username` and `sentinel_password` are for the Sentinels,
  every other option is for the server. A new connection asks the Sentinels, then the server for its role.
* no cluster of several nodes. A queue lives in one slot, but not all keys do, and nothing here follows a
  redirection: a slot that is elsewhere is refused with `reason="cluster"`. One node that holds all slots
  works like a server of its own.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, RedisError
from redis.maint_notifications import MaintNotificationsConfig

from streamfleet_common.connection_kinds import KINDS, Following, FollowingTLS, Primary
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.line import Line

BLOCK_MS = 500
"""How long a read waits for work. Short, so that a drain is never long, and no ghost reader lives long."""
COMMAND_TIMEOUT_S = 5.0
LEASE_TIMEOUT_S = 2.0
"""A renewal that takes longer is better begun anew: leases are a matter of seconds."""
LEASE_CONNECTIONS = 2
SENTINEL_TIMEOUT_S = 1.0
"""How long one Sentinel may take; the next is asked then."""
SENTINEL_PORT = 26379
_SENTINEL = re.compile(r"(rediss?)\+sentinel://", re.IGNORECASE)
_PASSWORD = re.compile(r"((?:\b|_)password=)[^&]*")
_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:/?#@]+)(?::(\d{1,5}))?")


def redacted(url: str) -> str:
    """The URL without its passwords, for messages and logs; it need not be a valid one."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, host = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and colon:
        rest = f"{name}:***@{host}"
    return scheme + mark + _PASSWORD.sub(r"\1***", rest)


@dataclass(frozen=True, slots=True)
class Connections:
    """`commands` for scripts and questions, `reader` for blocking reads, `pubsub` for subscriptions.

    `leases` is a reserve: renewals and ends go over it, and so never wait behind anybody's questions.
    """

    url: str
    commands: Redis
    reader: Redis
    pubsub: Redis
    reserve: Redis | None = None
    _lines: dict[Redis, Line] = field(default_factory=dict)

    def line(self, client: Redis) -> Line | None:
        """The line on which scripts of this client go, if its connections are of ours."""
        line = self._lines.get(client)
        if line is None and isinstance(client.connection_pool, Pool) and Line.suits(client.connection_pool):
            timeout_s = client.connection_pool.connection_kwargs["socket_timeout"]
            line = self._lines[client] = Line(client.connection_pool, timeout_s)
        return line

    @property
    def leases(self) -> Redis:
        return self.reserve or self.commands

    @classmethod
    def open(cls, url: str, *, max_connections: int = 16) -> Connections:
        """Make the clients; none connects before it is used.

        Raises:
            BrokerUnavailable: the URL is not one of Redis.
        """
        try:
            target = _Target.of(url)
            return cls(
                url,
                commands=target.client(COMMAND_TIMEOUT_S, max_connections),
                # One connection: a worker has one read outstanding, never more.
                reader=target.client(BLOCK_MS / 1000 + COMMAND_TIMEOUT_S, 1),
                # Silence is normal on a subscription; its own liveness check is in `Subscriber`.
                # Under RESP3 redis-py formats every message for its debug log, wanted or not.
                pubsub=target.client(None, 1, protocol=2),
                reserve=target.client(LEASE_TIMEOUT_S, LEASE_CONNECTIONS),
            )
        except (TypeError, ValueError, RedisError) as error:
            # The reason may quote a part of the password.
            reason = type(error).__name__ if "@" in url or "password=" in url else error
            raise BrokerUnavailable(
                f"{redacted(url)!r} is no Redis URL ({reason}); "
                "write redis://host:port/0, rediss://… for TLS, unix:///path/to/socket, "
                "or redis+sentinel://host:port,host:port/NAME/0",
                reason="bad_url",
            ) from None

    async def drop(self, client: Redis) -> None:
        """Give up the idle connections of one client, which may lead to where nobody answers any more."""
        if isinstance(client.connection_pool, Pool):
            await client.connection_pool.drop()

    async def rediscover(self) -> None:
        """Give up every connection, since the server behind them is the primary no longer.

        Those in use end with what they do now; the subscription, which never ends, at once.
        """
        for line in self._lines.values():
            line.renew()
        for client in {self.commands, self.reader, self.leases}:
            if isinstance(client.connection_pool, Pool):
                await client.connection_pool.drop()
                client.connection_pool.renew()
        if isinstance(self.pubsub.connection_pool, Pool):
            await self.pubsub.connection_pool.drop(in_use=True)

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()
        for client in {self.commands, self.reader, self.pubsub, self.leases}:
            await client.aclose(close_connection_pool=True)


class Pool(ConnectionPool):
    """At most `max_connections`; whoever comes when all are in use waits up to `timeout` seconds for one.

    The library's `BlockingConnectionPool` loses a wake-up when the woken task is cancelled at that moment:
    the next in line then waits for its whole timeout beside a free connection. And its `release` may be
    interrupted, which loses the connection for good. Here `release` never waits.
    """

    def __init__(self, *, timeout: float, max_connections: int, **options: Any) -> None:
        super().__init__(max_connections=max_connections, **options)
        self.timeout = timeout
        self._slots = asyncio.Semaphore(max_connections)

    async def get_connection(self, *_: Any, **__: Any) -> Any:
        """A connected connection.

        Raises:
            MaxConnectionsError: all were in use all the time.
        """
        if self._slots.locked():
            try:
                async with asyncio.timeout(self.timeout):
                    await self._slots.acquire()
            except TimeoutError:
                raise MaxConnectionsError(
                    f"all {self.max_connections} connections were in use for {self.timeout:g} s"
                ) from None
        else:
            await self._slots.acquire()
        connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        self._in_use_connections.remove(connection)
        if connection.should_reconnect():
            await connection.disconnect(nowait=True)
        self._available_connections.append(connection)
        self._slots.release()

    async def drop(self, *, in_use: bool = False) -> None:
        """Close the idle connections, and those in use too if `in_use`; they connect anew when needed."""
        doomed = [*self._available_connections, *(self._in_use_connections if in_use else ())]
        for connection in doomed:
            await connection.disconnect(nowait=True)

    def renew(self) -> None:
        """Let every connection in use be closed when it is given back."""
        for connection in self._in_use_connections:
            connection.mark_for_reconnect()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Target:
    """What a URL says of the server."""

    options: dict[str, Any]
    name: str = ""
    sentinels: list[tuple[str, int]] = field(default_factory=list)
    sentinel_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str) -> _Target:
        """Read a URL; raises ValueError or RedisError for one that is none."""
        if "+cluster" in url.partition("://")[0]:
            raise ValueError("a cluster of several nodes is not served")
        sentinel = _SENTINEL.match(url)
        if sentinel is None:
            options: dict[str, Any] = dict(parse_url(url))
            options["connection_class"] = KINDS[options.get("connection_class", Connection)]
            return cls(options)
        rest, mark, query = url[sentinel.end() :].partition("?")
        authority, _, path = rest.partition("/")
        user, at, hosts = authority.rpartition("@")
        name, _, db = path.partition("/")
        if not name:
            raise ValueError("the name of the primary is missing")
        if db and not db.isdigit():
            raise ValueError("the database must be a number")
        # The library reads all else: one host stands in for the servers that the Sentinels name.
        options = dict(parse_url(f"{sentinel[1].lower()}://{user}{at}primary/{db}{mark}{query}"))
        sentinels = [_host(text) for text in hosts.split(",")]
        theirs: dict[str, Any] = {
            key.removeprefix("sentinel_"): options.pop(key)
            for key in tuple(options)
            if key.startswith("sentinel_")
        }
        if not theirs.keys() <= {"username", "password"}:
            raise ValueError("of a Sentinel, only sentinel_username and sentinel_password can be set")
        if options.pop("connection_class", None) is SSLConnection:
            theirs["ssl"] = True
            theirs |= {key: value for key, value in options.items() if key.startswith("ssl_")}
            options["connection_class"] = FollowingTLS
        else:
            options["connection_class"] = Following
        return cls(options, unquote(name), sentinels, theirs)

    def client(self, timeout_s: float | None, connections: int, **more: Any) -> Redis:
        """A client with so many connections, each of whose replies may take `timeout_s`."""
        # The options in a URL come first: what the protocol rests on is not open to choice.
        options = self.options | {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": COMMAND_TIMEOUT_S,
            "retry_on_timeout": False,
            "health_check_interval": 0,
            "decode_responses": False,
            **self._no_surprises(),
            **more,
        }
        if "path" not in options:
            options["socket_keepalive"] = True
        if self.name:
            theirs = {
                **self.sentinel_options,
                "socket_timeout": SENTINEL_TIMEOUT_S,
                "socket_connect_timeout": SENTINEL_TIMEOUT_S,
                **self._no_surprises(),
            }
            # One for each client, since a client belongs to an event loop.
            options["primary"] = Primary(self.name, self.sentinels, theirs)
        pool = Pool(**options | {"timeout": COMMAND_TIMEOUT_S, "max_connections": connections})
        pool.make_connection()  # type: ignore[no-untyped-call]  # refuses an option that is none
        return Redis(connection_pool=pool)

    @staticmethod
    def _no_surprises() -> dict[str, Any]:
        return {
            "retry": Retry(NoBackoff(), 0),
            "retry_on_error": [],
            # While it is on, as it is by itself, a pool does not look whether a connection that it hands out
            # is closed or holds an unread reply.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }


def _host(text: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError("a Sentinel is written host:port, several with commas between them")
    port = int(found[2] or SENTINEL_PORT)
    if not 0 < port < 65536:
        raise ValueError("no such port")
    return cast("str", found[1]).strip("[]"), port
