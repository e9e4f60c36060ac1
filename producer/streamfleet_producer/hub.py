"""Connections to one Redis that several clients share."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from streamfleet_common.connections import Connections
from streamfleet_common.subscriber import Subscriber


class Hub:
    """One set of connections, subscriptions included, for clients of many queues and tenants.

    A `Client` of its own has some three connections; a gateway would have that many for each tenant and
    queue. Belongs to one event loop. Nothing connects before it is used. Close it after its clients.

    Raises:
        BrokerUnavailable: the URL is not one of Redis.
    """

    def __init__(self, url: str = "redis://localhost:6379/0", *, max_connections: int = 16) -> None:
        self.url = url
        self.connections = Connections.open(url, max_connections=max_connections)
        self.subscriber = Subscriber(self.connections)

    async def close(self) -> None:
        """Close the connections."""
        await self.subscriber.close()
        await self.connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
