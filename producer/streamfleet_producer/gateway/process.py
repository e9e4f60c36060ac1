"""The gateway's process: reads the settings, builds the parts, serves."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog
from starlette.applications import Starlette

from streamfleet_common import logs, tracing
from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.settings import misspelled, read
from streamfleet_producer.early_end import Beginning
from streamfleet_producer.gateway.app import application
from streamfleet_producer.gateway.listening import listen
from streamfleet_producer.gateway.server import GatewayServer
from streamfleet_producer.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from streamfleet_producer.gateway.server_spans import ServerSpans

WRONG_SETTINGS = 2
"""The exit status that says so: to try again with the same ones is in vain."""

log = structlog.get_logger()


def main(beginning: Beginning) -> int:
    """Serve until told to end. The exit status is 0 then, 1 after a failure, 2 for wrong settings.

    `beginning` is over once it serves.
    """
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
        why = error.strerror or error
        fault = f"cannot listen on {settings.gateway_host}:{settings.gateway_port} ({why})"
        log.error("%s: choose another STREAMFLEET_GATEWAY_PORT or STREAMFLEET_GATEWAY_HOST", fault)
        return 1
    with listening:
        return _serve(settings, listening, beginning)


def _serve(settings: GatewaySettings, listening: socket.socket, beginning: Beginning) -> int:
    provider = tracing.provider("streamfleet-gateway", version("streamfleet"))
    app = application(settings, _spans(provider))

    def serves() -> None:
        beginning.is_over = True
        _greet(settings, listening)

    try:
        server = GatewayServer(app, settings, serves)
    except InvalidRequest as error:
        log.error(error.message, code=error.code)
        return WRONG_SETTINGS
    try:
        asyncio.run(server.serve(sockets=[listening]))
    except SystemExit:
        return _explained(app)
    finally:
        tracing.close(provider)
    return 0 if server.started else 1


def _spans(provider: TracerProvider | None) -> ServerSpans | None:
    if provider is None:
        return None
    from opentelemetry import trace  # noqa: PLC0415 (an extra)

    from streamfleet_producer.gateway.server_spans import ServerSpans  # noqa: PLC0415 (needs it)

    # The clients' submissions are traced by whatever the process has, as in any service.
    trace.set_tracer_provider(provider)
    return ServerSpans(provider)


def _greet(settings: GatewaySettings, listening: socket.socket) -> None:
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    shown = f"[{host}]" if ":" in host else host
    keys = "wanted" if settings.keys_file else "none"
    log.info("gateway listens", url=f"{scheme}://{shown}:{port}", port=port, keys=keys)
    if settings.keys_file is None and not ipaddress.ip_address(host).is_loopback:
        log.warning("no keys are asked for, and other machines can reach it: set STREAMFLEET_KEYS_FILE")


def _explained(app: Starlette) -> int:
    """Say why the gateway could not start; gives the exit status."""
    error: BaseException | None = getattr(app.state, "why_not", None)
    if isinstance(error, StreamfleetError):
        log.error(error.message, code=error.code)
        return WRONG_SETTINGS
    log.error("the gateway failed while starting", exc_info=error)
    return 1
