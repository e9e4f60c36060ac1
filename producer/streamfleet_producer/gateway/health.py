"""Probes and metrics."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse, Response

from streamfleet_common.broker import Broker
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.operation import Operation


async def healthz(_call: Call[None]) -> Response:
    """The process lives, and its event loop turns."""
    return PlainTextResponse("ok\n")


async def readyz(call: Call[None]) -> Response:
    """Redis answers. Raises BrokerUnavailable."""
    await Broker(call.services.hub.connections, call.services.settings.queue).ping()
    return PlainTextResponse("ok\n")


async def metrics(call: Call[None]) -> Response:
    """What is counted, in the form that the scraper asks for."""
    encode, kind = choose_encoder(call.http.headers.get("accept", ""))
    return Response(encode(call.services.metrics.registry), media_type=kind)


OPERATIONS = (
    Operation("GET", "/healthz", healthz, "Whether the gateway lives.", "health", public=True),
    Operation("GET", "/readyz", readyz, "Whether it can reach Redis.", "health", public=True),
    Operation("GET", "/metrics", metrics, "Its counters, for Prometheus.", "health", public=True),
)
