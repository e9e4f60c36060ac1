"""The presence: the card by which clients and other workers know that this one serves the queue."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card, Limits
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.housekeeping import CARD_LIFE_MS
from streamfleet_common.worker_stats import WorkerStats
from streamfleet_worker.engine.base import EngineInfo

ANNOUNCE_S = CARD_LIFE_MS / 1000 / 3
CROWDED = 0.8
"""The share of Redis's memory in use from which no more requests are admitted: what runs needs the rest."""
COURTESY_S = 2.0
"""How long a worker on its way out tries to say so."""


class Presence:
    """Shows a worker's card and keeps it fresh, until it leaves."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        max_queue_depth: int,
        info: Callable[[], EngineInfo],
        room: Callable[[], int],
        *,
        lease_s: float,
        max_queue_tokens: int = 0,
        keep_payload: bool = False,
        sub_lanes: int = 1,
        stats: Callable[[], WorkerStats | None] = lambda: None,
        version: str = "",
    ) -> None:
        self._broker = broker
        self._name = name
        self._max_queue_depth = max_queue_depth
        self._info = info
        self._room = room
        self._lease_ms = round(lease_s * 1000)
        self._max_queue_tokens = max_queue_tokens
        self._keep_payload = keep_payload
        self._sub_lanes = sub_lanes
        self._stats = stats
        self._version = version
        self._draining = False
        self._has_named = False

    def card(self) -> Card:
        """The card as of now."""
        info = self._info()
        return Card(
            worker=self._name,
            queue=self._broker.keys.queue,
            model=info.model,
            revision=info.revision,
            tasks=info.tasks,
            handler=info.handler,
            layout=info.layout,
            device=info.device,
            precision=info.precision,
            limits=Limits(
                max_batch_size=info.max_batch_size,
                max_seq_len=info.max_seq_len,
                max_queue_depth=self._max_queue_depth,
                max_queue_tokens=self._max_queue_tokens,
                max_request_bytes=codec.MAX_REQUEST_BYTES,
                vocab_size=info.vocab_size,
            ),
            capacity=max(0, self._room()),
            state="draining" if self._draining else "ready",
            stats=self._stats(),
            version=self._version,
            lease_ms=self._lease_ms,
            sub_lanes=self._sub_lanes,
        )

    async def herald(self) -> None:
        """Name the queue before there is a card, so that callers wait for the model rather than be refused.

        Raises:
            BrokerUnavailable: it cannot be named.
        """
        self._has_named = await self._broker.announce_queue()

    async def withdraw(self) -> None:
        """Of a worker that cannot start: take a name that was new with it back, if Redis will hear it.

        Where requests wait already it stays.
        """
        if self._has_named:
            await _courteously(self._broker.withdraw_queue())

    async def announce(self) -> None:
        """Show the card.

        Raises:
            BrokerUnavailable: it cannot be shown.
        """
        await self._broker.announce(
            self.card(),
            lease_ms=self._lease_ms,
            keep_payload=self._keep_payload,
            crowded=await self._crowded(),
            sub_lanes=self._sub_lanes,
        )

    async def _crowded(self) -> bool:
        try:
            return await self._broker.memory_used() >= CROWDED
        except BrokerUnavailable:
            return False  # this user may not ask; a Redis that is really full refuses by itself

    async def keep(self, peers: Callable[[int], None]) -> None:
        """Keep the card fresh until cancelled; tells how many workers, this one included, take work now."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                cards = await self._broker.cards()
                peers(max(1, sum(card.state == "ready" for card in cards)))
            await asyncio.sleep(ANNOUNCE_S * random.uniform(0.8, 1.0))
            with contextlib.suppress(BrokerUnavailable):
                await self.announce()

    async def drain(self) -> None:
        """Say that no more work is taken, if Redis will hear it."""
        self._draining = True
        await _courteously(self.announce())

    async def leave(self) -> None:
        """Take the card down, if Redis will hear it; otherwise it runs out by itself."""
        await _courteously(self._broker.announce(self.card(), life_ms=0))


async def _courteously(call: Awaitable[None]) -> None:
    with contextlib.suppress(BrokerUnavailable, TimeoutError):
        async with asyncio.timeout(COURTESY_S):
            await call
