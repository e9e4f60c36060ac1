"""One HTTP request on its way through the gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, cast, get_args

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from streamfleet_common.errors import InvalidRequest, ModelNotFound
from streamfleet_common.schemas import MAX_DEADLINE_MS, Lane
from streamfleet_common.trace_context import TraceContext
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.dialects import Dialect
from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.event_stream import EventStream
from streamfleet_producer.gateway.keys import Tenant
from streamfleet_producer.gateway.passage import Passage
from streamfleet_producer.gateway.refusals import NoWorker
from streamfleet_producer.gateway.services import Services
from streamfleet_producer.ticket import Options

_B = TypeVar("_B")
_T = TypeVar("_T")

MAX_KEY_CHARS = 256
LEAST_TIMEOUT_S = 0.001
ANY_MODEL = "tgi"
"""What TGI's clients call the model of a chat, whatever it is."""


class ClientGone(Exception):
    """The client has closed its connection: nobody reads what would be answered."""


class Call(Generic[_B]):
    """What an endpoint is given: the services, who asks, and the body, validated."""

    def __init__(
        self,
        services: Services,
        http: HttpRequest,
        receive: Receive,
        *,
        tenant: Tenant,
        dialect: Dialect,
        body: _B,
        passage: Passage | None = None,
    ) -> None:
        self.services = services
        self.http = http
        self.tenant = tenant
        self.body = body
        self.passage = Passage("GET", "") if passage is None else passage
        self._receive = receive
        self._dialect = dialect

    @property
    def receive(self) -> Receive:
        """What brings the body, for an operation that reads its own."""
        return self._receive

    @property
    def idempotency_key(self) -> str | None:
        """The header `Idempotency-Key`: sent twice with the same one, a request runs once.

        Raises:
            InvalidRequest: it is too long.
        """
        key = self.http.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
            fault = f"Idempotency-Key: 1 to {MAX_KEY_CHARS} characters are wanted"
            raise InvalidRequest(fault, problems=[fault])
        return key

    @property
    def options(self) -> Options:
        """What the header says about the request: `X-Request-Timeout` (seconds), `X-Lane`, `traceparent`.

        Raises:
            InvalidRequest: one of them is not valid.
        """
        headers = self.http.headers
        options: Options = {"deadline_s": self.services.settings.request_timeout_s}
        timeout = headers.get("x-request-timeout")
        if timeout is not None:
            options["deadline_s"] = _timeout_s(timeout)
        lane = headers.get("x-lane")
        if lane is not None:
            if lane not in get_args(Lane):
                fault = f"X-Lane: one of {', '.join(get_args(Lane))} is wanted"
                raise InvalidRequest(fault, problems=[fault])
            options["lane"] = cast("Lane", lane)
        # Where spans are made, the client takes the one of this request by itself.
        if self.passage.span is None:
            trace = TraceContext.parse(headers.get("traceparent"))
            if trace is not None:
                options["traceparent"] = str(trace)
        return options

    async def served(self, name: str | None, kind: str, default: str | None = None) -> Served:
        """The queue that does such work; see `Directory.find`. "tgi" stands for what TGI's routes ask.

        Raises:
            NoWorker: it has no live worker, and the settings say to refuse then.
            ModelNotFound, InvalidRequest, BrokerUnavailable: as there.
        """
        return self._checked(await self._found(name, kind, default))

    async def served_by(self, queue: str) -> Served:
        """The queue of this name, whatever it does. Raises as `served`."""
        return self._checked(await self.services.directory.find_queue(queue))

    def _checked(self, served: Served) -> Served:
        if not served.cards and self.services.settings.no_worker == "refuse":
            raise NoWorker(f"no worker serves queue {served.queue!r} now: start one, or try again later")
        return served

    async def _found(self, name: str | None, kind: str, default: str | None) -> Served:
        directory = self.services.directory
        try:
            return await directory.find(name, kind, default)
        except ModelNotFound:
            if name != ANY_MODEL:
                raise
        return await directory.find(None, kind, self.services.settings.tgi_model)

    def client(self, queue: str) -> AbstractAsyncContextManager[Client]:
        """A client of the queue, for this tenant."""
        return self.services.clients.of(self.tenant, queue)

    async def answer(self, asking: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what is asked for as long as somebody is there to read the answer.

        A client that leaves cancels it, and with it its request.

        Raises:
            ClientGone: he has.
        """
        task = cast("asyncio.Task[object]", asyncio.current_task())
        asked_before = task.cancelling()
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watching = asyncio.create_task(watch(), name="disconnect")
        try:
            return await asking
        except asyncio.CancelledError:
            # The server may end at the same time; then that counts.
            if not gone or task.cancelling() > asked_before + 1:
                raise
            raise ClientGone from None
        finally:
            watching.cancel()
            if gone:
                task.uncancel()

    async def stream(
        self, chunks: AsyncGenerator[bytes], *, headers: dict[str, str] | None = None
    ) -> EventStream:
        """The response that sends these chunks; see `EventStream` for what the generator has to do.

        `headers` may be filled until the generator has given something.
        """
        said = {} if headers is None else headers
        stream = EventStream(
            chunks,
            self._dialect,
            headers=lambda: said,
            heartbeat_s=self.services.settings.heartbeat_s,
            gone=self.services.metrics.gone,
            passage=self.passage,
        )
        try:
            return await self.answer(stream.opened())
        except BaseException:
            await stream.aclose()
            raise


def _timeout_s(said: str) -> float:
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not LEAST_TIMEOUT_S <= seconds <= MAX_DEADLINE_MS / 1000:
        fault = f"X-Request-Timeout: {LEAST_TIMEOUT_S:g} to {MAX_DEADLINE_MS // 1000} seconds are wanted"
        raise InvalidRequest(fault, problems=[fault])
    return seconds
