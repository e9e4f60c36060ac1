"""One pub/sub connection for all the requests that a process waits for.

Pub/sub forgets: what is published while a connection is down is gone. So the connection's own liveness is
checked, it is made anew when it fails, and everybody on it is told that something may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Protocol

from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable

SILENCE_S = 10.0
"""A connection that brought nothing for so long is asked for a sign of life, and given as long again."""
MAX_BACKOFF_S = 5.0


class Listener(Protocol):
    """Whoever waits on a channel. Called on the event loop; must return at once."""

    def heard(self, data: bytes) -> None:
        """A message came."""

    def missed(self) -> None:
        """The connection was lost and is back: messages may be missing."""


class Subscriber:
    """Subscriptions by exact channel name, one listener each."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._listeners: dict[str, Listener] = {}
        self._confirmed: dict[str, asyncio.Future[None]] = {}
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()
        self._failure: Exception | None = None
        self._heard_at = 0.0

    async def subscribe(self, listeners: Iterable[tuple[str, Listener]], timeout_s: float = 5.0) -> None:
        """Listen on channels, all in one command, and wait until the server has confirmed every one.

        Raises:
            BrokerUnavailable: not confirmed within `timeout_s`; nothing is listened to then.
        """
        new = dict(listeners)
        loop = asyncio.get_running_loop()
        for channel, listener in new.items():
            self._listeners[channel] = listener
            self._confirmed[channel] = loop.create_future()
        waiting = [self._confirmed[channel] for channel in new]
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="subscriber")
        elif self._pubsub is not None and self._connected.is_set():
            with contextlib.suppress(RedisError, OSError):
                # If this fails, so does the reading, and the new connection subscribes to all.
                await self._pubsub.subscribe(*new)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waiting)
        except TimeoutError:
            await self.unsubscribe(new)
            raise BrokerUnavailable(
                f"Redis at {redacted(self._connections.url)} cannot be reached for subscriptions "
                f"({self._failure or 'no answer'}): is it running, and is the URL right?",
                reason="unreachable",
            ) from self._failure
        except asyncio.CancelledError:
            await self.unsubscribe(new)
            raise

    async def unsubscribe(self, channels: Iterable[str]) -> None:
        """Stop listening; messages already on their way are dropped."""
        gone = [channel for channel in channels if self._listeners.pop(channel, None) is not None]
        for channel in gone:
            future = self._confirmed.pop(channel, None)
            if future is not None:
                future.cancel()
        if gone and self._pubsub is not None and self._connected.is_set():
            with contextlib.suppress(RedisError, OSError):
                await self._pubsub.unsubscribe(*gone)

    async def close(self) -> None:
        self._listeners.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._drop()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                pubsub = await self._connect()
                failures = 0
                await self._read(pubsub)
            except (RedisError, OSError, TimeoutError) as error:
                self._failure = error
                await self._drop()
                failures += 1
                # Full jitter, so that a fleet does not come back all at once.
                await asyncio.sleep(random.uniform(0, min(MAX_BACKOFF_S, 0.05 * 2**failures)))

    async def _connect(self) -> PubSub:
        # The second confirmation of a subscription is the only sign of a gap, so none is hidden from us.
        pubsub = self._pubsub = self._connections.pubsub.pubsub(ignore_subscribe_messages=False)
        await pubsub.connect()  # type: ignore[no-untyped-call]
        self._heard_at = asyncio.get_running_loop().time()
        asked: set[str] = set()
        # Whoever comes while we wait for the socket must not be forgotten.
        while new := self._listeners.keys() - asked:
            await pubsub.subscribe(*new)
            asked |= new
        self._connected.set()
        return pubsub

    async def _drop(self) -> None:
        self._connected.clear()
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with contextlib.suppress(RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _read(self, pubsub: PubSub) -> None:
        loop = asyncio.get_running_loop()
        asked = False
        while True:
            reply = await pubsub.parse_response(block=False, timeout=SILENCE_S)
            if reply is None:
                if asked:
                    raise TimeoutError(f"silent for {loop.time() - self._heard_at:.0f} s")
                await pubsub.ping()
                asked = True
                continue
            asked = False
            self._heard_at = loop.time()
            self._take(reply)

    def _take(self, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) < 3:
            return  # a pong
        kind, name, data = reply[0], reply[1], reply[2]
        if kind == b"message":
            listener = self._listeners.get(name.decode())
            if listener is not None:
                listener.heard(data)
        elif kind == b"subscribe":
            channel = name.decode()
            future = self._confirmed.pop(channel, None)
            if future is not None:
                if not future.done():
                    future.set_result(None)
            elif channel in self._listeners:
                self._listeners[channel].missed()
