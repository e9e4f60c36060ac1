"""The leases: as long as a worker renews them, what it runs is given to nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_worker.engine.base import Key

MAX_RENEW_S = 1.0
"""Leases are renewed much more often than they need it: this is also how a worker learns that a request of
which it has nothing to tell was cancelled."""

log = structlog.get_logger()


class Leases:
    """Renews the leases of what is held, and says what was lost.

    Args:
        broker: where the leases are.
        owner: the worker's name.
        lease_s: how long a lease lasts.
        held: the deliveries in memory now. Only what is there is renewed: an entry that the server gave out,
            but whose reply was lost, runs out by itself.
        moving: whether the engine makes progress. A worker that hangs must lose its work.
        lost: takes the keys that are no longer this worker's.
        drain: is called when this worker is asked to drain.
    """

    def __init__(
        self,
        broker: Broker,
        owner: str,
        *,
        lease_s: float,
        held: Callable[[], list[Delivery]],
        moving: Callable[[], bool],
        lost: Callable[[list[Key]], None],
        drain: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._period_s = min(MAX_RENEW_S, lease_s / 8)
        self._limit_s = lease_s / 3
        self._lease_s = lease_s
        self._held = held
        self._moving = moving
        self._lost = lost
        self._drain = drain
        self._clock = clock
        self.renewed_at = clock()
        """When the last renewal that was answered had begun."""

    @property
    def ran_out(self) -> bool:
        """Whether the leases may have run out: no renewal has succeeded for as long as they last."""
        return self._clock() - self.renewed_at >= self._lease_s

    async def keep(self) -> None:
        """Renew until cancelled.

        While Redis is away the work goes on: a write of a worker whose lease has run out is refused, and if
        all were cut off alike, nobody has taken anything.
        """
        while True:
            await asyncio.sleep(self._period_s)
            if self._moving():
                try:
                    # A call that has failed for long pauses for long before it tries again, and Redis may be
                    # back since: then everybody has one lease to renew, and a new call comes at once.
                    async with asyncio.timeout(self._limit_s):
                        await self.renew()
                except (BrokerUnavailable, TimeoutError) as error:
                    reason = str(error) or "no answer"
                    log.warning("leases cannot be renewed", error=reason, held=len(self._held()))

    async def renew(self) -> None:
        """Renew all once.

        Raises:
            BrokerUnavailable: Redis cannot be reached.
        """
        held, began_at = self._held(), self._clock()
        renewal = await self._broker.renew(self._owner, held)
        lost = [delivery.key for delivery, ours in zip(held, renewal.ours, strict=True) if not ours]
        if lost:
            self._lost(lost)
        self.renewed_at = began_at
        if renewal.drain:
            self._drain()
