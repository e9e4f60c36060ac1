"""The routes of the exporter."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_producer.exporter.metrics import page_of
from streamfleet_producer.exporter.reading import Readings

log = structlog.get_logger()


def application(readings: Readings) -> Starlette:
    """`/metrics`, `/healthz` and `/readyz` as an ASGI application."""

    async def metrics(request: HttpRequest) -> Response:
        """What Redis says now, in the form that the scraper asks for."""
        reading = await readings.read()
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        # A thousand queues are some twenty thousand lines.
        return Response(await asyncio.to_thread(encode, page_of(reading)), media_type=kind)

    async def healthz(_: HttpRequest) -> Response:
        """The process lives, and its event loop turns."""
        return PlainTextResponse("ok\n")

    async def readyz(_: HttpRequest) -> Response:
        """Redis answers, and tells this user what a page needs: as `broker_up` says."""
        try:
            await readings.check()
        except BrokerUnavailable as error:
            log.debug("not ready", reason=error.message)  # which is not for everybody who asks
            return PlainTextResponse("Redis does not answer, or refuses this user; the log says why\n", 503)
        return PlainTextResponse("ok\n")

    async def elsewhere(_: HttpRequest, __: Exception) -> Response:
        return PlainTextResponse("try /metrics, /healthz or /readyz\n", 404)

    routes = [Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)]
    app = Starlette(routes=routes, exception_handlers={404: elsewhere})
    # It would send a client to wherever the `Host` of its request says.
    app.router.redirect_slashes = False
    return app
