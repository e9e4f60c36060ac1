"""What the routes of a gateway work with."""

from __future__ import annotations

from dataclasses import dataclass

from streamfleet_common import codec
from streamfleet_producer.gateway.clients import Clients
from streamfleet_producer.gateway.directory import Directory
from streamfleet_producer.gateway.keys import KeyRing
from streamfleet_producer.gateway.metrics import GatewayMetrics
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.hub import Hub


@dataclass(slots=True)
class Services:
    """All that lives as long as the gateway does, on one event loop."""

    settings: GatewaySettings
    hub: Hub
    directory: Directory
    clients: Clients
    keys: KeyRing
    metrics: GatewayMetrics

    @classmethod
    def of(cls, settings: GatewaySettings) -> Services:
        """Build the parts; nothing connects yet. To be called on the event loop.

        Raises:
            BrokerUnavailable: the URL is not one of Redis.
            InvalidRequest: the key file cannot be read.
        """
        hub = Hub(settings.redis_url)
        return cls(
            settings=settings,
            hub=hub,
            directory=Directory(hub, settings.gateway_queues),
            clients=Clients(hub, durability=settings.durability, max_request_bytes=codec.MAX_REQUEST_BYTES),
            keys=KeyRing(settings.keys_file),
            metrics=GatewayMetrics(),
        )

    async def close(self) -> None:
        """Close them all; whoever still waits is told so."""
        await self.clients.close()
        await self.directory.close()
        await self.hub.close()
