"""Brings the shares of the key file to the queues, whose submit script counts by them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import structlog

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.shares import Share
from streamfleet_producer.gateway.directory import Directory
from streamfleet_producer.gateway.key_file import TenantEntry
from streamfleet_producer.gateway.keys import KeyRing

TURN_S = 2.0
AGAIN_S = 60.0
"""A queue gets its shares again after so long, in case Redis has lost them."""

log = structlog.get_logger()


class ShareWriter:
    """Writes all shares to every queue that can be reached: when they change, and now and then.

    Without a key file nobody has a share, and nothing is written: somebody else may give them.
    """

    def __init__(self, keys: KeyRing, directory: Directory) -> None:
        self._keys = keys
        self._directory = directory
        self._written: dict[str, tuple[int, float]] = {}
        """By queue, which version of the file it has, and since when."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if there is a key file."""
        if not self._keys.is_open:
            self._task = asyncio.create_task(self._run(), name="share-writer")

    async def close(self) -> None:
        """Stop."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def write(self, now: float) -> None:
        """Write what is due. `now` is the loop's clock, in seconds. Raises BrokerUnavailable."""
        shares = shares_of(self._keys.entries())
        version = self._keys.changes
        for queue in await self._directory.cards():
            known, since = self._written.get(queue, (0, -math.inf))
            if known != version or now - since >= AGAIN_S:
                await self._directory.broker(queue).set_shares(shares)
                self._written[queue] = (version, now)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self.write(loop.time())
            except StreamfleetError as error:
                log.warning("shares not written; they will be tried again", reason=error.message)
            await asyncio.sleep(TURN_S)


def shares_of(entries: Mapping[str, TenantEntry]) -> dict[str, Share]:
    """The shares of those who have one."""
    return {
        name: share
        for name, entry in entries.items()
        if (share := Share(entry.max_open_requests, entry.max_open_tokens, entry.tokens_per_day)) != Share()
    }
