"""The exporter's process: reads the settings, builds the parts, serves."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

import structlog
import uvicorn

from streamfleet_common import logs
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, StreamfleetError
from streamfleet_common.figures_reader import FiguresReader
from streamfleet_common.settings import misspelled, read
from streamfleet_producer.early_end import Beginning
from streamfleet_producer.exporter.app import application
from streamfleet_producer.exporter.reading import Readings
from streamfleet_producer.exporter.settings import ExporterSettings
from streamfleet_producer.gateway.http_protocol import bounded
from streamfleet_producer.gateway.listening import listen

WRONG_SETTINGS = 2
"""The exit status that says so: to try again with the same ones is in vain."""
MAX_HEADER_BYTES = 16_384
MAX_CONNECTIONS = 256
"""Open at a time; who comes then is answered with 503."""
KEEP_ALIVE_S = 75
"""How long a connection may idle: longer than from one scrape to the next."""

log = structlog.get_logger()


class ExporterServer(uvicorn.Server):
    """Serves on one socket, and says when it does; `beginning` is over then."""

    def __init__(self, config: uvicorn.Config, beginning: Beginning) -> None:
        super().__init__(config)
        self._beginning = beginning

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._beginning.is_over = True
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("exporter listens", url=f"http://{shown}:{port}/metrics", port=port)


def main(beginning: Beginning) -> int:
    """Serve until told to end. The exit status is 0 then, 1 after a failure, 2 for wrong settings.

    `beginning` is over once it serves.
    """
    try:
        settings = read(ExporterSettings)
    except StreamfleetError as error:
        print(error, file=sys.stderr)  # noqa: T201 - nobody logs yet
        return WRONG_SETTINGS
    logs.configure(settings.log_format, settings.log_level)
    for variable, meant in misspelled(ExporterSettings, os.environ).items():
        log.warning("unknown setting", variable=variable, did_you_mean=meant)
    try:
        listening = listen(settings.exporter_host, settings.exporter_port)
    except OSError as error:
        why = error.strerror or error
        fault = f"cannot listen on {settings.exporter_host}:{settings.exporter_port} ({why})"
        log.error("%s: choose another STREAMFLEET_EXPORTER_PORT or STREAMFLEET_EXPORTER_HOST", fault)
        return 1
    with listening:
        return asyncio.run(serve(settings, listening, beginning))


async def serve(settings: ExporterSettings, listening: socket.socket, beginning: Beginning) -> int:
    """Serve on this socket until told to end; gives the exit status."""
    try:
        connections = Connections.open(settings.redis_url, max_connections=2)
    except BrokerUnavailable as error:
        log.error(error.message, code=error.code)
        return WRONG_SETTINGS
    reader = FiguresReader(connections)
    readings = Readings(reader, settings.exporter_queues, timeout_s=settings.exporter_timeout_s)
    config = uvicorn.Config(
        application(readings),
        http=bounded(MAX_HEADER_BYTES),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what it warns of, we say ourselves
    server = ExporterServer(config, beginning)
    try:
        await server.serve(sockets=[listening])
    finally:
        await readings.close()
        await connections.close()
    return 0 if server.started else 1
