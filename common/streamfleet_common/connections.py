"""The three Redis clients a process needs, each with the timeouts and retries that are safe for its work.

redis-py resends a command whose reply was lost. That doubles whatever is not idempotent, so the library's
own retry is off everywhere; `Broker` repeats its scripts, which are made for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from streamfleet_common.errors import BrokerUnavailable

BLOCK_MS = 500
"""How long a read waits for work. Short, so that a drain is never long, and no ghost reader lives long."""
COMMAND_TIMEOUT_S = 5.0
_PASSWORD = re.compile(r"(\bpassword=)[^&]*")


def redacted(url: str) -> str:
    """The URL without its password, for messages and logs; it need not be a valid one."""
    scheme, mark, rest = url.partition("://") if "://" in url else ("", "", url)
    user, at, host = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and colon:
        rest = f"{name}:***@{host}"
    return scheme + mark + _PASSWORD.sub(r"\1***", rest)


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

        def client(timeout_s: float | None, connections: int, **more: Any) -> Redis:
            options: dict[str, Any] = {
                "socket_timeout": timeout_s,
                "socket_connect_timeout": COMMAND_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),
                "retry_on_error": [],
                "health_check_interval": 0,
                "decode_responses": False,
                **more,
            }
            if not url.startswith("unix:"):
                options["socket_keepalive"] = True
            pool = BlockingConnectionPool.from_url(url, **options)
            # The options in a URL win over these, but what the protocol rests on is not open to choice.
            pool.connection_kwargs.update(options)
            pool.max_connections = connections
            pool.timeout = COMMAND_TIMEOUT_S
            return Redis(connection_pool=pool)

        try:
            return cls(
                url,
                commands=client(COMMAND_TIMEOUT_S, max_connections),
                # One connection: a worker has one read outstanding, never more.
                reader=client(BLOCK_MS / 1000 + COMMAND_TIMEOUT_S, 1),
                # Silence is normal on a subscription; its own liveness check is in `Subscriber`.
                # Under RESP3 redis-py formats every message for its debug log, wanted or not.
                pubsub=client(None, 1, protocol=2),
            )
        except (ValueError, RedisError) as error:
            # The reason may quote a part of the password.
            reason = type(error).__name__ if "@" in url or "password=" in url else error
            raise BrokerUnavailable(
                f"{redacted(url)!r} is no Redis URL ({reason}); "
                "write redis://host:port/0, rediss://… for TLS, or unix:///path/to/socket",
                reason="bad_url",
            ) from None

    async def close(self) -> None:
        for client in (self.commands, self.reader, self.pubsub):
            await client.aclose(close_connection_pool=True)
