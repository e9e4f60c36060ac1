"""One operation of the HTTP interface: what it takes, who may ask for it, and how its errors are said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.message import problems
from streamfleet_producer.answer import too_late
from streamfleet_producer.gateway.call import Call, ClientGone
from streamfleet_producer.gateway.dialects import OPENAI, Dialect
from streamfleet_producer.gateway.failures import failure_of
from streamfleet_producer.gateway.foreign_sites import check_site
from streamfleet_producer.gateway.keys import ANYBODY, Tenant
from streamfleet_producer.gateway.passage import Passage
from streamfleet_producer.gateway.refusals import (
    ENDING,
    BodyTooLarge,
    Ending,
    HeaderTooLarge,
    Overloaded,
    Unauthorized,
)
from streamfleet_producer.gateway.services import Services
from streamfleet_producer.gateway.their_names import InTheirNames, Rename, renamed
from streamfleet_producer.giving_up import LAST_LOOK_S

Endpoint = Callable[[Call[Any]], Awaitable[ASGIApp | Response]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value in the path, the query or the header, for the description; the endpoint reads it itself."""

    name: str
    where: Literal["path", "query", "header"]
    schema: Mapping[str, Any]
    """JSON Schema."""
    text: str
    required: bool = False

    def described(self) -> dict[str, Any]:
        """As OpenAPI says it."""
        about = {"name": self.name, "in": self.where, "schema": self.schema, "required": self.required}
        return {**about, "description": self.text} if self.text else about


@dataclass(frozen=True, slots=True)
class Operation:
    """A method on a path. The description of the interface is made of these, too."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    endpoint: Endpoint
    summary: str
    tag: str
    body: type[BaseModel] | None = None
    """Of a JSON body, which is read and validated; without it the endpoint reads what comes itself."""
    body_content: Mapping[str, Any] = field(default_factory=dict)
    """What such an endpoint reads: OpenAPI's `content` of a request body."""
    parameters: tuple[Parameter, ...] = ()
    """Those in the path are taken from it, and those that every body has are known."""
    answer: type[BaseModel] | None = None
    """Of a JSON answer."""
    answer_type: str | None = None
    """The media type of an answer that has no model."""
    status: int = 200
    """Of an answer."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Further statuses, with what they mean."""
    error_schema: Literal["Error", "TgiError"] = "Error"
    streams: bool = False
    """It may answer with server-sent events."""
    dialect: Dialect = field(default=OPENAI)
    names: Callable[[Any], Rename] | None = None
    """How the body calls what the fleet finds wrong with its request, if not as the fleet does."""
    timed: bool = False
    """It is given up when the request is that it asks the fleet; of a stream that goes for its opening."""
    public: bool = False
    """It needs no key."""
    hidden: bool = False
    """Left out of the description."""


class Application:
    """An operation as an ASGI application: authenticates, reads, validates, runs, and says what is wrong."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services: Services = scope["app"].state.services
        operation = self._operation
        spans = None if operation.public else services.spans  # nobody traces probes
        passage = Passage(scope["method"], operation.path, scope["headers"], spans)
        passage.note()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = passage.answering(message)
            await send(message)

        # Nor is one of these under way for whoever wonders how many more there may be.
        open_ = int(not operation.public)
        services.metrics.open_requests += open_
        try:
            try:
                response = await self._respond(services, scope, receive, passage)
            except ClientGone:
                services.metrics.gone()
                return
            except StreamfleetError as error:
                response = self._refused(passage, error)
            except asyncio.CancelledError:
                # The server ends, and waits for nobody any more.
                response = self._refused(passage, Ending(ENDING))
            except Exception as error:  # noqa: BLE001 (whatever it is, the client has to be told)
                response = self._refused(passage, failure_of(error, passage.about()))
            await response(scope, receive, sending)
        finally:
            seconds = time.monotonic() - passage.began_at
            services.metrics.open_requests -= open_
            services.metrics.answered(operation.path, passage.status, seconds)
            passage.over(seconds, says_so=services.settings.log_level == "debug")

    def _refused(self, passage: Passage, error: StreamfleetError) -> Response:
        passage.failed(error)
        return self._operation.dialect.response(error)

    async def _respond(
        self, services: Services, scope: Scope, receive: Receive, passage: Passage
    ) -> ASGIApp | Response:
        operation, settings = self._operation, services.settings
        if not operation.public and services.metrics.open_requests > settings.max_requests:
            raise Overloaded(
                f"{settings.max_requests} requests are under way here, and no more are taken: try again",
                limit=settings.max_requests,
            )
        _check_headers(scope, settings.max_headers, settings.max_header_bytes)
        http = HttpRequest(scope, receive)
        if services.keys.is_open and not operation.public:
            check_site(http.headers, settings.gateway_names)
        tenant = ANYBODY if operation.public else _tenant(services, http)
        passage.tenant = tenant.name
        if http.headers.get("content-encoding", "identity").lower() != "identity":
            # What a packed body would grow to is not known before.
            raise InvalidRequest("Content-Encoding: bodies are taken as they are: send it unpacked")
        body: Any = None
        if operation.body is not None:
            body = _parsed(operation.body, await _read(http, receive, settings.max_body_bytes))
        dialect = operation.dialect
        rename = None if operation.names is None else operation.names(body)
        if rename is not None:
            dialect = InTheirNames(dialect, rename)
        call: Call[Any] = Call(
            services,
            http,
            receive,
            tenant=tenant,
            dialect=dialect,
            body=body,
            passage=passage,
        )
        try:
            return await (_in_time(operation.endpoint, call) if operation.timed else operation.endpoint(call))
        except StreamfleetError as error:
            raise (error if rename is None else renamed(error, rename)) from None


async def _in_time(endpoint: Endpoint, call: Call[Any]) -> ASGIApp | Response:
    """What the endpoint gives before the request's deadline.

    Raises:
        DeadlineExceeded: nothing. The fleet says so as a rule, and this while Redis hangs.
    """
    clock = asyncio.timeout(call.options["deadline_s"] + LAST_LOOK_S)
    try:
        async with clock:
            return await endpoint(call)
    except TimeoutError:
        if not clock.expired():
            raise
        raise too_late() from None


def _tenant(services: Services, http: HttpRequest) -> Tenant:
    authorization = http.headers.get("authorization")
    tenant = services.keys.tenant(authorization)
    if tenant is None:
        why = "this key is nobody's, or no longer valid" if authorization else "a key is wanted"
        raise Unauthorized(f"{why}: send `Authorization: Bearer KEY`")
    return tenant


def _check_headers(scope: Scope, most: int, most_bytes: int) -> None:
    headers = scope["headers"]
    if len(headers) > most:
        raise HeaderTooLarge(f"{len(headers)} header fields are more than {most}: send fewer", limit=most)
    if sum(len(name) + len(value) for name, value in headers) > most_bytes:
        raise HeaderTooLarge(f"the header is over {most_bytes} bytes: send less", limit=most_bytes)


async def _read(http: HttpRequest, receive: Receive, limit: int) -> bytes:
    told = http.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is over max_body_bytes ({limit}): send less", limit=limit)


def _parsed(model: type[BaseModel], body: bytes) -> BaseModel:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest(f"the request is not valid: {'; '.join(faults)}", problems=faults) from None
