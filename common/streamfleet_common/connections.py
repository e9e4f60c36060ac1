"""The three Redis clients a process needs, each with the timeouts and retries that are safe for its work.

redis-py resends a command whose reply was lost. That doubles whatever is not idempotent, so the library's
own retry is off everywhere; `Broker` repeats its scripts, which are made for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from streamfleet_common.errors import BrokerUnavailable

BLOCK_MS = 500
"""How long a read waits for work. Short, so that a drain is never long, and no ghost reader lives long."""
COMMAND_TIMEOUT_S = 5.0


def redacted(url: str) -> str:
    """The URL without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


@dataclass(frozen=True, slots=True)
class Connections:
    """`commands` for scripts, `reader` for blocking reads of work, `pubsub` for subscriptions."""

    url: str
    commands: Redis
    reader: Redis
    pubsub: Redis

    @classmethod
    def open(cls, url: str, *, max_connections: int = 16) -> Connections:
        """Make the clients; none connects before it is used.

        Raises:
            BrokerUnavailable: the URL is not one of Redis.
        """

        def client(timeout_s: float | None, connections: int) -> Redis:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=connections,
                timeout=COMMAND_TIMEOUT_S,
                socket_timeout=timeout_s,
                socket_connect_timeout=COMMAND_TIMEOUT_S,
                socket_keepalive=True,
                retry=Retry(NoBackoff(), 0),
                retry_on_error=[],
                health_check_interval=0,
            )
            return Redis(connection_pool=pool)

        try:
            return cls(
                url,
                commands=client(COMMAND_TIMEOUT_S, max_connections),
                # One connection: a worker has one read outstanding, never more.
                reader=client(BLOCK_MS / 1000 + COMMAND_TIMEOUT_S, 1),
                # Silence is normal on a subscription; its own liveness check is in `Subscriber`.
                pubsub=client(None, 1),
            )
        except (ValueError, RedisError) as error:
            raise BrokerUnavailable(
                f"{redacted(url)!r} is no Redis URL ({error}); "
                "write redis://host:port/0, rediss://… for TLS, or unix:///path/to/socket"
            ) from None

    async def close(self) -> None:
        for client in (self.commands, self.reader, self.pubsub):
            await client.aclose(close_connection_pool=True)
