"""Handlers over HTTP: an input in, an output out, or its parts as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import ConfigDict, RootModel
from starlette.responses import Response
from starlette.types import ASGIApp

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.one_shot import CallRequest, Json
from streamfleet_common.schemas import End
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.event_stream import OPENED
from streamfleet_producer.gateway.fleet_events import EVENTS, told
from streamfleet_producer.gateway.openai_key import key_to_use
from streamfleet_producer.gateway.operation import Operation

KIND = "call"


class HandlerInput(RootModel[Json]):
    """Any JSON value; what a handler takes, its worker's card says."""

    model_config = ConfigDict(frozen=True)


async def call_handler(call: Call[HandlerInput]) -> ASGIApp | Response:
    """What the handler makes of the body: its output as JSON, of one that comes in parts the last.

    With `Accept: text/event-stream` all parts come as they are made, as events.

    Raises:
        ModelNotFound: nobody serves such a handler.
        InvalidRequest: it takes no such input.
        QueueFull, Conflict, DeadlineExceeded, GenerationFailed, …: as `Client.call`.
    """
    name, options, said = call.http.path_params["name"], call.options, call.idempotency_key
    served = await call.served(name, KIND)
    if served.model is None:
        # The queue's name: what is called there is its handler, if it has only one. While no worker lives
        # nobody knows of any, and what waits for one is called as it was named.
        names = {card.model for card in served.cards} or {name}
        if len(names) != 1:
            raise InvalidRequest(f"queue {served.queue!r} serves {len(names)} handlers: name one of them")
        (name,) = names
    request = CallRequest(handler=name, input=call.body.root)
    headers: dict[str, str] = {}

    async def asked() -> tuple[str, End]:
        async with call.client(served.queue) as client:
            key = await key_to_use(client, call.tenant, call.http.headers, said)
            return await client.run_with_id(request, idempotency_key=key, **options)

    async def chunks() -> AsyncGenerator[bytes]:
        async with call.client(served.queue) as client:
            key = await key_to_use(client, call.tenant, call.http.headers, said)
            async with client.call_stream(name, request.input, idempotency_key=key, **options) as parts:
                headers["x-request-id"] = f"{served.queue}:{parts.id}"
                yield OPENED
                lines = call.services.lines
                events = told(
                    parts,
                    lambda: lines.position(served.queue, parts.id),
                    is_queued=parts.ticket.state == "queued",
                    look_s=lines.life_s,
                )
                async with aclosing(events):
                    async for chunk in events:
                        yield chunk

    if "text/event-stream" in call.http.headers.get("accept", "").lower():
        return await call.stream(chunks(), headers=headers)
    rid, end = await call.answer(asked())
    return json_response(end.output, headers={"X-Request-Id": f"{served.queue}:{rid}"})


OPERATIONS = (
    Operation(
        "POST",
        "/v1/handlers/{name}",
        call_handler,
        "Call a handler, whose input is the body; with `Accept: text/event-stream` its parts come as events.",
        "handlers",
        body=HandlerInput,
        timed=True,
        answer_type="application/json",
        streams=True,
        dialect=EVENTS,
    ),
)
