"""The connection to the Redis that RQ keeps its jobs in: a client of its own, since RQ is synchronous.

It is the only module of the producer that speaks to Redis itself, and never for a request: those go through
`Client` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streamfleet_common.connections import redacted
from streamfleet_common.errors import BrokerUnavailable

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 10.0
AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError)
"""What is raised while Redis is not there, or has only just come back."""
REFUSING = (OutOfMemoryError, ReadOnlyError)
"""What is raised while it takes nothing: it is full, or another has taken its place. That passes, too."""

Connection = redis.Redis
__all__ = ["AWAY", "REFUSING", "Connection", "RedisError", "connect", "reaching"]


def connect(url: str) -> Connection:
    """A client of the jobs' Redis; nothing connects before it is used.

    Raises:
        BrokerUnavailable: the URL is none that RQ can use.
    """
    try:
        return redis.Redis.from_url(
            url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=COMMAND_TIMEOUT_S, protocol=2
        )
    except (TypeError, ValueError, RedisError):
        raise BrokerUnavailable(
            f"{redacted(url)!r} is no Redis URL for bulk jobs: write redis://host:port/0, rediss://…, "
            "or unix:///path/to/socket. RQ follows no Sentinels: name a server of its own with "
            "STREAMFLEET_RQ_URL",
            reason="bad_url",
        ) from None


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn what goes wrong with the jobs' Redis into our own error.

    Raises:
        BrokerUnavailable: it cannot be reached, or refuses.
    """
    try:
        yield
    except AWAY:
        raise BrokerUnavailable(
            f"the Redis of bulk jobs cannot be reached at {redacted(url)}: "
            "start it, or name another with STREAMFLEET_RQ_URL"
        ) from None
    except RedisError as error:
        raise BrokerUnavailable(
            f"the Redis of bulk jobs at {redacted(url)} refuses to work ({type(error).__name__})",
            reason="refused",
        ) from error
