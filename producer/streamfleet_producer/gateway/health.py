"""Probes and metrics."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse, Response

from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.operation import Operation

PROBE_S = 2.0
"""How long a probe waits for Redis: those who send it have no patience."""

log = structlog.get_logger()


async def healthz(_call: Call[None]) -> Response:
    """The process lives, and its event loop turns."""
    return PlainTextResponse("ok\n")


async def readyz(call: Call[None]) -> Response:
    """Redis answers. Raises BrokerUnavailable."""
    try:
        await reach(call)
    except BrokerUnavailable as error:
        log.warning("not ready", reason=error.message)  # which is not for everybody who asks
        raise
    return PlainTextResponse("ok\n")


async def reach(call: Call[None]) -> None:
    """Have Redis answer.

    Raises:
        BrokerUnavailable: it does not, or not within `PROBE_S`.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            await Broker(call.services.hub.connections, call.services.settings.queue).ping()
    except TimeoutError:
        raise BrokerUnavailable(f"Redis has not answered within {PROBE_S:g} seconds") from None


async def metrics(call: Call[None]) -> Response:
    """What is counted, in the form that the scraper asks for."""
    encode, kind = choose_encoder(call.http.headers.get("accept", ""))
    return Response(encode(call.services.metrics.registry), media_type=kind)


OPERATIONS = (
    Operation("GET", "/healthz", healthz, "Whether the gateway lives.", "health", public=True),
    Operation("GET", "/readyz", readyz, "Whether it can reach Redis.", "health", public=True),
    Operation("GET", "/metrics", metrics, "Its counters, for Prometheus.", "health", public=True),
)
