"""All routes of the gateway, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from streamfleet_common.errors import StreamfleetError
from streamfleet_producer.gateway import (
    batches,
    files,
    fleet_state,
    handlers,
    health,
    one_shot,
    openai_routes,
    pages,
    requests,
    tgi,
)
from streamfleet_producer.gateway.dialects import OPENAI
from streamfleet_producer.gateway.operation import Operation
from streamfleet_producer.gateway.refusals import NoSuchMethod, NoSuchPath
from streamfleet_producer.gateway.resource import Resource
from streamfleet_producer.gateway.services import Services
from streamfleet_producer.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from streamfleet_producer.gateway.server_spans import ServerSpans

OPERATIONS: tuple[Operation, ...] = (
    *openai_routes.OPERATIONS,  # first: it is where most requests go
    *pages.OPERATIONS,
    *health.OPERATIONS,
    *fleet_state.OPERATIONS,
    *requests.OPERATIONS,
    *one_shot.OPERATIONS,
    *handlers.OPERATIONS,
    *tgi.OPERATIONS,
    *files.OPERATIONS,
    *batches.OPERATIONS,
)
"""Each module of routes brings its own."""

log = structlog.get_logger()


def application(settings: GatewaySettings, spans: ServerSpans | None = None) -> Starlette:
    """The gateway as an ASGI application; it connects when it is first asked.

    `spans` makes a span of each request, if there is one.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            services = Services.of(settings, spans)
        except Exception as error:
            app.state.why_not = error  # for the process, which has better words for it than the server
            raise
        app.state.operations = OPERATIONS
        app.state.services = services
        services.start()
        try:
            yield
        finally:
            await services.close()

    resources: dict[str, Resource] = {}
    for operation in OPERATIONS:
        resources.setdefault(operation.path, Resource()).add(operation)
    routes = [Route(path, resource) for path, resource in resources.items()]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _nowhere})
    # It would send a client to wherever the `Host` of its request says.
    app.router.redirect_slashes = False
    return app


async def _nowhere(http: HttpRequest, error: Exception) -> Response:
    """No such path, or no such method there."""
    refusal: StreamfleetError = NoSuchPath("no such path: /docs shows what there is")
    if isinstance(error, HTTPException) and error.status_code == 405:
        refusal = NoSuchMethod("this path has no such method: /docs shows what there is")
    response = OPENAI.response(refusal)
    response.headers.update(getattr(error, "headers", None) or {})
    # Without the path, which may be anything.
    log.debug("answered", method=http.method, route="", status=response.status_code)
    return response
