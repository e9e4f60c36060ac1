"""The gateway's process: reads the settings, builds the parts, serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog
import uvicorn

from streamfleet_common import logs
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.settings import misspelled, read
from streamfleet_producer.gateway.app import application
from streamfleet_producer.gateway.http_protocol import bounded
from streamfleet_producer.gateway.listening import listen
from streamfleet_producer.gateway.settings import GatewaySettings

WRONG_SETTINGS = 2
"""The exit status that says so: to try again with the same ones is in vain."""

log = structlog.get_logger()


def main() -> int:
    """Serve until told to end. The exit status is 0 then, 1 after a failure, 2 for wrong settings."""
    try:
        settings = read(GatewaySettings)
    except StreamfleetError as error:
        print(error, file=sys.stderr)  # noqa: T201 - nobody logs yet
        return WRONG_SETTINGS
    logs.configure(settings.log_format, settings.log_level)
    for variable, meant in misspelled(GatewaySettings, os.environ).items():
        log.warning("unknown setting", variable=variable, did_you_mean=meant)
    try:
        listening = listen(settings.gateway_host, settings.gateway_port)
    except OSError as error:
        log.error("cannot listen", host=settings.gateway_host, port=settings.gateway_port, reason=str(error))
        return 1
    config = uvicorn.Config(
        application(settings),
        http=bounded(settings.max_header_bytes),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=round(settings.drain_timeout_s),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    log.info("gateway listens", url=f"{scheme}://{host}:{port}", port=port)
    for ending in (signal.SIGTERM, signal.SIGINT):
        # uvicorn ends in peace when it gets one, and then raises it once more, for whoever was before it.
        signal.signal(ending, lambda *_: None)
    server = uvicorn.Server(config)
    asyncio.run(server.serve(sockets=[listening]))
    return 0 if server.started else 1
