"""One path of the HTTP interface, with what its methods do."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from streamfleet_producer.gateway.operation import Application, Operation


class Resource:
    """The operations of a path as one ASGI application. HEAD is GET without its body, where that has an end.

    Raises:
        HTTPException: 405, with the methods that there are.
    """

    def __init__(self) -> None:
        self._applications: dict[str, Application] = {}

    def add(self, operation: Operation) -> None:
        """Take an operation in."""
        application = self._applications[operation.method] = Application(operation)
        if operation.method == "GET" and not operation.streams:
            self._applications["HEAD"] = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application = self._applications.get(scope["method"])
        if application is None:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self._applications))})
        await application(scope, receive, send)
