"""All routes of the gateway, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.routing import Route

from streamfleet_producer.gateway import fleet_state, health
from streamfleet_producer.gateway.operation import Application, Operation
from streamfleet_producer.gateway.services import Services
from streamfleet_producer.gateway.settings import GatewaySettings

OPERATIONS: tuple[Operation, ...] = (*health.OPERATIONS, *fleet_state.OPERATIONS)
"""Each module of routes brings its own."""


def application(settings: GatewaySettings) -> Starlette:
    """The gateway as an ASGI application; it connects when it is first asked."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services = Services.of(settings)
        app.state.services = services
        try:
            yield
        finally:
            await services.close()

    routes = [
        Route(operation.path, Application(operation), methods=[operation.method]) for operation in OPERATIONS
    ]
    return Starlette(routes=routes, lifespan=lifespan)
