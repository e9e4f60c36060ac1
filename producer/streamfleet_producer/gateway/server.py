"""The HTTP server of a gateway: says when it serves, and ends in peace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable

import structlog
import uvicorn
from starlette.applications import Starlette

from streamfleet_common import logs
from streamfleet_producer.gateway.http_protocol import bounded
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.gateway.tls import Certificate

GRACE_S = 5.0
"""What is left to tell clients of the end, and to cancel what they wait for."""
SUPERVISED = "STREAMFLEET_SUPERVISED"
"""Set by whoever keeps this process, and then our standard input ends when the keeper does."""

log = structlog.get_logger()


class GatewayServer(uvicorn.Server):
    """When told to end it takes no more requests, and lets those under way go on for `drain_timeout_s`.

    Those that are not done by then are told so: a stream by a last chunk, others by a status 503.

    Args:
        app: the gateway.
        settings: its settings.
        serves: called once, when it is asked for its first request.

    Raises:
        InvalidRequest: the certificate or its key cannot be read, or they are no such.
    """

    def __init__(
        self, app: Starlette, settings: GatewaySettings, serves: Callable[[], None] = lambda: None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=bounded(settings.max_header_bytes),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + GRACE_S),
        )
        config.load()
        self._certificate = Certificate.of(settings)
        if self._certificate is not None:
            config.ssl = self._certificate.context
        super().__init__(config)
        self._drain_timeout_s = settings.drain_timeout_s
        self._serves = serves
        self._is_ending = False
        self._is_kept = os.environ.pop(SUPERVISED, None) is not None
        handler = _Log(lambda: self.started)
        logging.getLogger("uvicorn.error").handlers = [handler]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve. Raises SystemExit if the parts of the gateway cannot be built."""
        logs.watch_loop()
        await super().startup(sockets)
        if self._is_kept:
            asyncio.get_running_loop().add_reader(0, self._hear)
        if self._certificate is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._certificate.renew)
        self._serves()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, once the answers under way are given or out of time."""
        self._is_ending = True
        under_way = len(self.server_state.tasks)
        if under_way:
            log.info("the gateway ends", requests=under_way, within_s=self._drain_timeout_s)
        timer = asyncio.get_running_loop().call_later(self._drain_timeout_s, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        for task in tuple(self.server_state.tasks):
            task.cancel()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                # The keeper is gone, and so is Redis as a rule, whose keeper it was, too.
                asyncio.get_running_loop().remove_reader(0)
                self._drain_timeout_s = 0.0
                self.should_exit = True
                if self._is_ending:
                    self._cut_off()


class _Log(logging.Handler):
    """uvicorn's warnings in our own lines. Without the words of exceptions, which may quote a prompt."""

    def __init__(self, started: Callable[[], bool]) -> None:
        super().__init__(logging.WARNING)
        self._started = started

    def emit(self, record: logging.LogRecord) -> None:
        # What fails a start is said in our words, and by uvicorn in three lines more.
        if self._started():
            kind = record.exc_info[0] if record.exc_info else None
            details = {} if kind is None else {"kind": kind.__name__}
            log.log(record.levelno, record.getMessage().strip(), **details)
