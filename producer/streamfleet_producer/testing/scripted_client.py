"""The real client, blocking and not, on a queue in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from streamfleet_common.connections import Connections
from streamfleet_producer import blocking
from streamfleet_producer.catalogue import Catalogue
from streamfleet_producer.client import Client
from streamfleet_producer.link import Link, Patience
from streamfleet_producer.testing.memory_broker import MemoryBroker
from streamfleet_producer.testing.memory_channels import MemorySubscriber
from streamfleet_producer.watch import Watch, Watched

if TYPE_CHECKING:
    from streamfleet_producer.testing.scripted_fleet import ScriptedFleet

URL = "redis://scripted.invalid:6379/0"
"""Where nothing ever connects to; a name that can be no host's."""


class _WakingWatch(Watch):
    """Lets time look up when somebody begins to wait. It sweeps nothing: the queue ends what is late."""

    def __init__(self, fleet: ScriptedFleet, silence_s: float) -> None:
        super().__init__(silence_s, self._sweep_never, fleet.time)
        self._sweep_never()
        self._time = fleet.time

    def add(self, watched: Watched) -> None:
        super().add(watched)
        self._time.wake()

    def _sweep_never(self) -> None:
        # The times of sweeps are drawn, and here nothing is left to chance.
        self._sweep_at = math.inf


class ScriptedLink(Link):
    """An open client's parts, with a queue in memory in place of Redis."""

    def __init__(self, fleet: ScriptedFleet, queue: str, tenant: str, patience: Patience, card_life_s: float):
        super().__init__(
            Connections.open(URL),
            queue,
            tenant,
            patience=patience,
            card_life_s=card_life_s,
            subscriber=MemorySubscriber(fleet.channels),
        )
        self._fleet = fleet
        self.broker = MemoryBroker(queue, fleet.memory, fleet.channels, fleet.cards)
        self.catalogue = Catalogue(self.broker, queue, life_s=card_life_s)
        self.watch = _WakingWatch(fleet, patience.silence_s)
        fleet.links.add(self)

    def now(self) -> float:
        return self._fleet.time.time()

    async def close(self, within_s: float | None = None) -> None:
        await super().close(within_s)
        await self._subscriber.close()
        await self._connections.close()
        self._fleet.links.discard(self)


class ScriptedClient(Client):
    """A `Client` whose queue is a `ScriptedFleet`'s; made by its `client`."""

    def __init__(self, fleet: ScriptedFleet, queue: str, **settings: Any) -> None:
        super().__init__(URL, queue, **settings)
        self._fleet = fleet

    async def open(self) -> Self:
        if self._link is None:
            self._link = ScriptedLink(self._fleet, self.queue, self.tenant, self._patience, self._card_life_s)
        return self


class BlockingScriptedClient(blocking.Client):
    """The same for programs without an event loop; made by `ScriptedFleet.blocking_client`."""

    def __init__(self, fleet: ScriptedFleet, queue: str, **settings: Any) -> None:
        super().__init__(URL, queue, **settings)
        self._client = ScriptedClient(fleet, queue, **settings)
