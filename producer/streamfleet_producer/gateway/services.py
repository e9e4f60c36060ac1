"""What the routes of a gateway work with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from streamfleet_producer.gateway.clients import Clients
from streamfleet_producer.gateway.directory import Directory
from streamfleet_producer.gateway.file_store import FileStore
from streamfleet_producer.gateway.keys import KeyRing
from streamfleet_producer.gateway.metrics import GatewayMetrics
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.gateway.share_writer import ShareWriter
from streamfleet_producer.gateway.waiting_lines import WaitingLines
from streamfleet_producer.hub import Hub
from streamfleet_producer.token_counter import TokenCounter

if TYPE_CHECKING:
    from streamfleet_producer.bulk.batches import Batches
    from streamfleet_producer.gateway.server_spans import ServerSpans

FILES_TURN_S = 600.0
"""How often old files are looked for."""

log = structlog.get_logger()


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
    files: FileStore | None
    batches: Batches | None
    spans: ServerSpans | None = None
    """Make the spans of requests, where they are wanted."""
    upkeep: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: GatewaySettings, spans: ServerSpans | None = None) -> Services:
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
            files=_files(settings),
            batches=_batches(settings),
            spans=spans,
        )

    def start(self) -> None:
        """Begin what goes on beside the requests."""
        self.shares.start()
        if self.files is not None:
            self.upkeep = asyncio.create_task(_keep(self.files), name="files")

    async def close(self) -> None:
        """Close them all; whoever still waits is told so."""
        await self.shares.close()
        if self.upkeep is not None:
            self.upkeep.cancel()
            await asyncio.wait([self.upkeep])
        await self.clients.close()
        await self.lines.close()
        await self.directory.close()
        await self.hub.close()
        if self.batches is not None:
            self.batches.close()


async def _keep(files: FileStore) -> None:
    while True:
        try:
            removed = await asyncio.to_thread(files.remove_expired)
        except OSError as error:
            log.warning("old files not removed; that is tried again", reason=error.strerror)
        else:
            if removed:
                log.info("old files removed", files=removed)
        await asyncio.sleep(FILES_TURN_S)


def _files(settings: GatewaySettings) -> FileStore | None:
    if settings.files_dir is None:
        return None
    return FileStore(
        settings.files_dir,
        max_file_bytes=settings.max_file_bytes,
        max_files_bytes=settings.max_files_bytes,
        ttl_s=settings.file_ttl_s,
    )


def _batches(settings: GatewaySettings) -> Batches | None:
    if settings.files_dir is None:
        return None
    try:
        from streamfleet_producer.bulk.batches import Batches  # noqa: PLC0415 (an extra)
    except ImportError:
        log.warning("no batches: they need the extra `bulk`, pip install 'streamfleet[bulk]'")
        return None
    return Batches(settings.rq_url or settings.redis_url, settings.rq_queue)
