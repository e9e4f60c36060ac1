"""The connections that clients are made of: the library's, which can be cancelled or lost at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

T = TypeVar("T")


async def cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`; if it swallows a cancellation, raise that as it ends.

    The library writes under `asyncio.wait_for`, which on Python 3.11 loses a cancellation that comes just as
    the write has ended (python/cpython#86296): whoever cancelled would wait for a task that goes on.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    done = await work
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return done


class _Sound(AbstractConnection):
    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._writer is not None and self._writer.transport.is_closing():
            # Writing to it raises an AttributeError on Python 3.12 and 3.13, which no caller expects.
            await self.disconnect(nowait=True)
            raise RedisConnectionError("the connection was closed")
        try:
            await cancellable(super().send_packed_command(command, check_health))
        except asyncio.CancelledError:
            # Its answer is nobody's.
            await self.disconnect(nowait=True)
            raise


class Plain(_Sound, Connection):
    """A connection over TCP."""


class TLS(_Sound, SSLConnection):
    """A connection over TLS."""


class Socket(_Sound, UnixDomainSocketConnection):
    """A connection over a Unix socket."""


KINDS: Mapping[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: Plain,
    SSLConnection: TLS,
    UnixDomainSocketConnection: Socket,
}
"""Ours for each of the library's."""


class Primary:
    """Where the Sentinels say that the primary is."""

    def __init__(self, name: str, hosts: list[tuple[str, int]], options: Mapping[str, Any]) -> None:
        self._name = name
        self._hosts = hosts
        self._sentinel = Sentinel(hosts, sentinel_kwargs=dict(options))  # type: ignore[no-untyped-call]
        # One at a time: it closes its connections to the Sentinels after each answer.
        self._lock = asyncio.Lock()

    async def find(self) -> tuple[str, int]:
        """Host and port of the primary.

        Raises:
            redis.exceptions.ConnectionError: no Sentinel answers, or none knows a primary that is up.
        """
        async with self._lock:
            try:
                host, port = await self._sentinel.discover_master(self._name)
            except (RedisError, OSError) as error:
                asked = ", ".join(f"{host}:{port}" for host, port in self._hosts)
                raise RedisConnectionError(
                    f"no Sentinel of {asked} names a primary of {self._name!r} that is up"
                ) from error
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await self._sentinel.aclose()
        return host, port


class Following(Plain):
    """A connection to whatever server is the primary when it is made."""

    def __init__(self, *, primary: Primary, **options: Any) -> None:
        super().__init__(**options)
        self._primary = primary

    async def _connect(self) -> None:
        self.host, self.port = await cancellable(self._primary.find())
        await super()._connect()  # type: ignore[no-untyped-call]

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        # Sentinels learn of a failover one after the other, and a server of its end last.
        try:
            await self.send_command("ROLE", check_health=False)
            role = await self.read_response()
        except ResponseError:
            return  # a user who may not ask
        if role[0] not in (b"master", "master"):
            raise ReadOnlyError(f"{self.host}:{self.port} is no primary any more", status_code="READONLY")


class FollowingTLS(Following, SSLConnection):
    """As `Following`, over TLS to all."""
