"""What the routes of a gateway work with."""

from __future__ import annotations

from dataclasses import dataclass

from streamfleet_producer.gateway.clients import Clients
from streamfleet_producer.gateway.directory import Directory
from streamfleet_producer.gateway.keys import KeyRing
from streamfleet_producer.gateway.metrics import GatewayMetrics
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.gateway.share_writer import ShareWriter
from streamfleet_producer.gateway.waiting_lines import WaitingLines
from streamfleet_producer.hub import Hub
from streamfleet_producer.token_counter import TokenCounter


@dataclass(slots=True)
class Services:
    """All that lives as long as the gateway does, on one event loop."""

    settings: GatewaySettings
    hub: Hub
    directory: Directory
    clients: Clients
    keys: KeyRing
    metrics: GatewayMetrics
    shares: ShareWriter
    lines: WaitingLines

    @classmethod
    def of(cls, settings: GatewaySettings) -> Services:
        """Build the parts; nothing connects yet. To be called on the event loop.

        Raises:
            BrokerUnavailable: the URL is not one of Redis.
            InvalidRequest, Unsupported, TokenizerFailed: the key file or a tokenizer cannot be read.
        """
        counters = {queue: TokenCounter.from_file(path) for queue, path in settings.tokenizers.items()}
        keys = KeyRing(settings.keys_file)
        hub = Hub(settings.redis_url)
        directory = Directory(hub, settings.gateway_queues)
        return cls(
            settings=settings,
            hub=hub,
            directory=directory,
            clients=Clients(hub, durability=settings.durability, tokenizers=counters),
            keys=keys,
            metrics=GatewayMetrics(),
            shares=ShareWriter(keys, directory),
            lines=WaitingLines(directory),
        )

    async def close(self) -> None:
        """Close them all; whoever still waits is told so."""
        await self.shares.close()
        await self.clients.close()
        await self.lines.close()
        await self.directory.close()
        await self.hub.close()
