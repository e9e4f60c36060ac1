"""Requests by their ids: handed in, asked for, read event by event, cancelled."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp

from streamfleet_common.errors import (
    BrokerUnavailable,
    InvalidRequest,
    RequestNotFound,
    StreamfleetError,
)
from streamfleet_common.schemas import Request
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.event_stream import OPENED
from streamfleet_producer.gateway.fleet_events import EVENTS, told
from streamfleet_producer.gateway.operation import Operation, Parameter
from streamfleet_producer.gateway.requests_schemas import (
    CancelledState,
    RequestState,
    SubmitBody,
    Submitted,
    request_names,
)
from streamfleet_producer.intake import not_found

MAX_WAIT_S = 300.0
_ID = re.compile(r"(?:chatcmpl-|cmpl-)?([A-Za-z0-9_.-]{1,64}):([0-9a-f]{34})")
_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?([0-9]{1,6})\"?(?:$|[,;\s])", re.IGNORECASE)


async def submit(call: Call[SubmitBody]) -> Response:
    """Hand a request in and come back for it later; with `Prefer: wait=SECONDS` wait a while at once.

    Raises:
        QueueFull, Conflict, ModelNotFound, NoWorker, InvalidRequest: it is not accepted.
    """
    body = call.body
    options = body.options(call.options)
    wait_s = _preferred_wait_s(call)
    served = await _served(call)
    request = _addressed(body.request, served)
    async with call.client(served.queue) as client:
        ticket = await call.answer(
            client.submit(request, idempotency_key=call.idempotency_key, stream=body.stream, **options)
        )
        receipt = Submitted.of(served.queue, ticket)
        headers = {"Location": f"/v1/requests/{receipt.id}", "X-Request-Id": receipt.id}
        if wait_s:
            state = await call.answer(_state(client, ticket.id, wait_s))
            headers["Preference-Applied"] = f"wait={wait_s:g}"
            if state.result is not None:
                return _said(state, headers=headers)
        return _said(receipt, 202, headers)


async def show(call: Call[None]) -> Response:
    """Where a request stands, and its result once it has ended; `?wait=SECONDS` waits for that.

    Raises:
        RequestNotFound: the tenant has no such request, or its result has expired.
    """
    queue, rid = _place(call)
    wait_s = _seconds("wait", call.http.query_params.get("wait"))
    async with call.client(queue) as client:
        return _said(await call.answer(_state(client, rid, wait_s)))


async def cancel(call: Call[None]) -> Response:
    """End a request, waiting or running. Raises as `show`."""
    queue, rid = _place(call)
    async with call.client(queue) as client:
        return _said(CancelledState(id=f"{queue}:{rid}", state=await call.answer(client.cancel(rid))))


async def events(call: Call[None]) -> ASGIApp | Response:
    """The events of a request from the first one on, or behind the one that `Last-Event-ID` names.

    Leaving does not cancel the request: others may read it, or the same reader again.

    Raises:
        RequestNotFound: the tenant has no such request, or its result has expired.
        InvalidRequest: no event of the request has that id.
    """
    queue, rid = _place(call)
    query = call.http.query_params.get("last_event_id")
    after = call.http.headers.get("last-event-id") or query or None
    headers = {"x-request-id": f"{queue}:{rid}"}
    over = False

    async def chunks() -> AsyncGenerator[bytes]:
        nonlocal over
        async with call.client(queue) as client, client.attach(rid, after=after) as stream:
            over = stream.is_over
            yield OPENED
            is_queued = stream.ticket.state == "queued"
            lines = call.services.lines
            said = told(stream, lambda: lines.position(queue, rid), is_queued=is_queued, look_s=lines.life_s)
            async with aclosing(said):
                async for chunk in said:
                    yield chunk

    response = await call.stream(chunks(), headers=headers)
    if over:
        # What tells a browser's EventSource, which comes back by itself, that there is no more to come.
        await response.aclose()
        return Response(status_code=204, headers=headers)
    return response


# --- parts


async def _served(call: Call[SubmitBody]) -> Served:
    body = call.body
    if body.queue is None:
        return await call.served(body.model or body.request.model, body.request.kind)
    if body.model is not None:
        raise InvalidRequest("model: give a queue or a model, not both", problems=["model: or a queue"])
    return await call.served_by(body.queue)


def _addressed(request: Request, served: Served) -> Request:
    """The request, for the very model that found the queue."""
    # A call has one always: its handler.
    return request.changed({"model": served.model}) if served.model and request.model is None else request


async def _state(client: Client, rid: str, wait_s: float) -> RequestState:
    if wait_s:
        try:
            await client.result(rid, timeout=wait_s)
        except (RequestNotFound, BrokerUnavailable):
            raise
        except StreamfleetError:
            pass  # it has failed, or not ended yet: its record tells
    return RequestState.of(*await client.status_with_end(rid))


def _place(call: Call[Any]) -> tuple[str, str]:
    """Queue and id of the request that the path names. What is none gets the words of one that is unknown."""
    found = _ID.fullmatch(call.http.path_params["id"])
    if found is None or not call.services.directory.reaches(found[1]):
        raise not_found()
    call.passage.requests.append((found[1], found[2]))
    return found[1], found[2]


def _seconds(name: str, text: str | None) -> float:
    if text is None:
        return 0.0
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or float(text) > MAX_WAIT_S:
        fault = f"{name}: 0 to {MAX_WAIT_S:g} seconds are wanted"
        raise InvalidRequest(fault, problems=[fault])
    return float(text)


def _preferred_wait_s(call: Call[Any]) -> float:
    # A preference may be left alone, says its standard: more than we wait is as much as we wait.
    found = _PREFER_WAIT.search(call.http.headers.get("prefer", ""))
    return min(MAX_WAIT_S, float(found[1])) if found else 0.0


def _said(answer: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), status, headers, "application/json")


_WAIT = Parameter(
    "wait",
    "query",
    {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
    "So many seconds its end is waited for.",
)
_AFTER = {"type": "string", "pattern": r"^[1-9][0-9]{0,8}-(0|[1-9][0-9]{0,8})(\.[1-9][0-9]{0,3})?$"}

OPERATIONS = (
    Operation(
        "POST",
        "/v1/requests",
        submit,
        "Hand in a request of any kind, and come back for it later.",
        "requests",
        body=SubmitBody,
        names=request_names,
        answer=Submitted,
        status=202,
        parameters=(
            Parameter("Prefer", "header", {"type": "string"}, "`wait=SECONDS` waits a while for its end."),
        ),
        errors={"200": "It ended while it was waited for, as `Prefer` asked."},
    ),
    Operation(
        "GET",
        "/v1/requests/{id}",
        show,
        "Where a request stands, and its result.",
        "requests",
        answer=RequestState,
        parameters=(_WAIT,),
    ),
    Operation("DELETE", "/v1/requests/{id}", cancel, "End a request.", "requests", answer=CancelledState),
    Operation(
        "GET",
        "/v1/requests/{id}/events",
        events,
        "The events of a request, from the first one on or behind the last one that was read.",
        "requests",
        streams=True,
        parameters=(
            Parameter("Last-Event-ID", "header", _AFTER, "The id of the last event that was read."),
            Parameter("last_event_id", "query", _AFTER, "The same, for who cannot send a header."),
        ),
        errors={"204": "The end itself was read: nothing follows."},
        dialect=EVENTS,
    ),
)
