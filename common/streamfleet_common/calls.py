"""Calls to Redis: repeated where that is safe, in pieces where they are large, their errors in our words."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar, get_args

from redis import exceptions as redis_errors

from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.scripts import Script, ScriptName

ATTEMPTS = 3
BACKOFF_S = 0.1
BATCH = 512
"""Requests in one script call: Lua can unpack some 8,000 values, and other clients wait meanwhile."""
BATCH_BYTES = 8 * 1024 * 1024
"""Payload in one script call; Redis cuts off a client that sends more than 1 GB at once."""
TRANSIENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.BusyLoadingError, OSError)
"""What may be gone at the next try."""

_T = TypeVar("_T")


class Calls:
    """Calls on the keys under one tag.

    Raises:
        BrokerUnavailable: by every call, when Redis cannot be reached or refuses to work.
    """

    def __init__(self, connections: Connections, tag: str, *, script_flags: bool = True) -> None:
        self._url = connections.url
        self._commands = connections.commands
        self._tag = tag
        self._scripts = {name: Script.load(name, flags=script_flags) for name in get_args(ScriptName)}

    async def script_in_batches(
        self, name: ScriptName, head: Sequence[Any], items: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """One reply an item. If a later batch fails, the earlier ones stand; the whole may be repeated."""
        replies: list[Any] = []
        for batch in batches(items):
            args = [*head]
            for item in batch:
                args += item
            replies += await self.script(name, args)
        return replies

    async def script(self, name: ScriptName, args: Sequence[Any]) -> Any:
        """Run one script, which must be safe to repeat."""
        script = self._scripts[name]
        return await self.ask(lambda: script.call(self._commands, self._tag, args))

    async def ask(self, command: Callable[[], Awaitable[_T]]) -> _T:
        """Run a command that is safe to repeat; it is made anew for each of `ATTEMPTS` tries."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await command()
            except TRANSIENT as error:
                if isinstance(error, redis_errors.AuthenticationError) or attempt == ATTEMPTS:
                    raise self.unavailable(error) from error
                # Full jitter, so that a fleet does not come back all at once.
                await asyncio.sleep(random.uniform(0, BACKOFF_S * 2**attempt))
            except redis_errors.RedisError as error:
                raise self.unavailable(error) from error
        raise AssertionError("unreachable")

    def unavailable(self, error: Exception) -> BrokerUnavailable:
        """What an error of the client library means, and what to do about it."""
        where = redacted(self._url)
        if isinstance(error, redis_errors.OutOfMemoryError):
            return BrokerUnavailable(
                f"Redis at {where} is out of memory and takes no more requests: "
                "wait for running ones to end, or raise its maxmemory",
                reason="out_of_memory",
            )
        if isinstance(error, (redis_errors.AuthenticationError, redis_errors.NoPermissionError)):
            return BrokerUnavailable(
                f"Redis at {where} refuses this user: check the name, password and ACL in the URL",
                reason="forbidden",
            )
        if isinstance(error, redis_errors.ReadOnlyError):
            return BrokerUnavailable(
                f"Redis at {where} is a read-only replica: point the URL at the primary",
                reason="read_only",
            )
        if isinstance(error, TRANSIENT):
            return BrokerUnavailable(
                f"Redis at {where} cannot be reached ({type(error).__name__}: {error}): "
                "is it running, and is the URL right? `streamfleet up` starts one here",
                reason="unreachable",
            )
        return BrokerUnavailable(
            f"Redis at {where} refused a command ({error}): is it Redis 7.0 or newer, or Valkey 8 or newer?",
            reason="refused",
        )


def batches(items: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """The items in pieces that one call may carry, at most `BATCH` and about `BATCH_BYTES` each."""
    batch: list[tuple[Any, ...]] = []
    size = 0
    for item in items:
        bytes_ = sum(len(value) for value in item if isinstance(value, bytes))
        if batch and (len(batch) == BATCH or size + bytes_ > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_
    if batch:
        yield batch
