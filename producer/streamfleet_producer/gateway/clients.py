"""A client for each tenant and queue in use, all over the same connections."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from streamfleet_common.settings import Durability
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.keys import Tenant
from streamfleet_producer.hub import Hub
from streamfleet_producer.token_counter import TokenCounter

MOST_IDLE = 256
"""Clients that are kept though nobody uses them now."""


@dataclass(slots=True)
class _Lent:
    client: Client
    users: int = field(default=0)


class Clients:
    """Lends clients; those that nobody has used for longest are closed beyond `most_idle`.

    `tokenizers` are by queue.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        durability: Durability,
        tokenizers: Mapping[str, TokenCounter],
        most_idle: int = MOST_IDLE,
    ) -> None:
        self._hub = hub
        self._durability: Durability = durability
        self._tokenizers = tokenizers
        self._most_idle = most_idle
        self._lent: OrderedDict[tuple[Tenant, str], _Lent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lent)

    @asynccontextmanager
    async def of(self, tenant: Tenant, queue: str) -> AsyncIterator[Client]:
        """A client that is not closed before the context is left."""
        name = (tenant, queue)
        lent = self._lent.get(name)
        if lent is None:
            client = Client(
                queue=queue,
                tenant=tenant.name,
                secret=tenant.secret,
                durability=self._durability,
                tokenizer=self._tokenizers.get(queue),
                hub=self._hub,
            )
            lent = self._lent[name] = _Lent(await client.open())
        lent.users += 1
        try:
            yield lent.client
        finally:
            lent.users -= 1
            if name in self._lent:  # else all were closed meanwhile
                self._lent.move_to_end(name)
                await self._trim()

    async def close(self) -> None:
        """Close them all. Whoever still waits gets `Cancelled`, and his request is cancelled."""
        while self._lent:
            _, lent = self._lent.popitem()
            await lent.client.close()

    async def _trim(self) -> None:
        if len(self._lent) <= self._most_idle:
            return
        idle = [name for name, lent in self._lent.items() if not lent.users]
        for name in idle[: len(self._lent) - self._most_idle]:
            await self._lent.pop(name).client.close()
