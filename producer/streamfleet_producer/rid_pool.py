"""Request ids that are listened to already, so that a submission need not wait for its subscription."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.listeners import Listener
from streamfleet_common.schemas import new_rids
from streamfleet_common.subscriber import Subscriber

LEAST = 32
MOST = 512
"""Channels that are subscribed ahead of need; one costs Redis some 250 bytes."""


class RidPool:
    """Fresh ids, subscribed in one command for many.

    Empty until an id is first wanted, and from then on filled up in the background. Whoever finds it empty
    takes the longer way, and makes it larger. Until an id is handed over the pool itself listens to it, deaf.
    """

    def __init__(self, subscriber: Subscriber, channel: Callable[[str], str]) -> None:
        self._subscriber = subscriber
        self._channel = channel
        self._rids: deque[str] = deque()
        self._size = 0
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, rid: str) -> bool:
        return rid in self._rids

    def take(self) -> str:
        """An id, to be handed over or given back. It is only a fresh one if the pool is empty."""
        if self._rids:
            rid = self._rids.popleft()
        else:
            self._size = min(max(LEAST, 2 * self._size), MOST)
            [rid] = new_rids(1)
        if self._filling is None and not self._closed and len(self._rids) <= self._size // 2:
            self._filling = asyncio.create_task(self._fill(), name="rid-pool")
        return rid

    def hand_over(self, rid: str, listener: Listener) -> bool:
        """Let somebody listen to an id that was taken. False if he has to subscribe to it himself."""
        channel = self._channel(rid)
        if self._subscriber.hand_over(channel, self, listener):
            return True
        self._subscriber.unsubscribe((channel,), self)  # on a line that is down, or it was never ours
        return False

    def give_back(self, rid: str) -> None:
        """Put back an id that was taken and not handed over."""
        if self._subscriber.listens(self._channel(rid), self):
            self._rids.append(rid)

    async def close(self) -> None:
        """Stop filling, and listen no more."""
        self._closed = True
        filling = self._filling
        if filling is not None:
            filling.cancel()
            await asyncio.wait([filling])
        self._subscriber.unsubscribe([self._channel(rid) for rid in self._rids], self)
        self._rids.clear()

    # --- a Listener

    def heard(self, data: bytes) -> None:
        """Nobody knows these ids yet: whatever it is, it is noise."""

    def missed(self) -> None:
        """There was nothing to be missed."""

    async def _fill(self) -> None:
        rids = new_rids(self._size - len(self._rids))
        try:
            await self._subscriber.subscribe([(self._channel(rid), self) for rid in rids])
        except BrokerUnavailable:
            return  # whoever needs an id subscribes to it himself, and is told what is wrong
        finally:
            self._filling = None
        self._rids.extend(rids)
