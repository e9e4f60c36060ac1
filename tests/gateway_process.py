"""A gateway on a free port, served by uvicorn in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import uvicorn

from streamfleet_producer.gateway.app import application
from streamfleet_producer.gateway.http_protocol import SILENCE_S, bounded
from streamfleet_producer.gateway.listening import listen
from streamfleet_producer.gateway.services import Services
from streamfleet_producer.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from streamfleet_producer.gateway.server_spans import ServerSpans

PATIENCE_S = 60.0


class Gateway:
    """`async with Gateway(redis_url, heartbeat_s=1.0) as gateway`: the keywords are settings of the gateway.

    `url` is where it listens, without a slash at its end; `services` are the parts its routes work with.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        silence_s: float = SILENCE_S,
        spans: ServerSpans | None = None,
        **settings: Any,
    ) -> None:
        self.app = application(GatewaySettings(redis_url=redis_url, **settings), spans)
        self.url = ""
        self._server = _Server(
            uvicorn.Config(
                self.app,
                http=bounded(16_384, silence_s),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        """Those of the running gateway."""
        services: Services = self.app.state.services
        return services

    async def __aenter__(self) -> Self:
        listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        begun = asyncio.create_task(self._server.begun.wait())
        await asyncio.wait({self._serving, begun}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        assert self._server.started, "the gateway did not start"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._serving is not None
        self._server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await self._serving


class _Server(uvicorn.Server):
    """It leaves the signals to the tests, and tells when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()
