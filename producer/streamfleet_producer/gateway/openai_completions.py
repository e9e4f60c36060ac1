"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp

from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.openai_answers import completion_answer
from streamfleet_producer.gateway.openai_chunks import Chunks
from streamfleet_producer.gateway.openai_completion_request import CompletionWish, completion
from streamfleet_producer.gateway.openai_faults import completion_names
from streamfleet_producer.gateway.openai_key import key_to_use
from streamfleet_producer.gateway.openai_logprobs import Names, unnamed
from streamfleet_producer.gateway.openai_names import model_name, names_of, revision
from streamfleet_producer.gateway.openai_reading import events_of, merged, opened, outcomes
from streamfleet_producer.gateway.openai_schemas import CompletionBody
from streamfleet_producer.gateway.openai_told import CompletionTold
from streamfleet_producer.gateway.operation import Operation


async def completions(call: Call[CompletionBody]) -> ASGIApp | Response:
    """Text that goes on from one prompt, or from each of several."""
    body = call.body
    served = await call.served(body.model, "generate")
    wish = completion(body, served.model)
    names = unnamed if wish.logprobs is None else await names_of(call.services.settings, served)
    if body.stream:
        headers: dict[str, str] = {}
        return await call.stream(_chunks(call, served, wish, names, headers), headers=headers)
    async with call.client(served.queue) as client:
        count = len(wish.requests)
        key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key, count)
        by_token = wish.logprobs is not None
        found = await call.answer(outcomes(client, wish.requests, key, call.options, by_token=by_token))
    model, created = model_name(body.model, served), int(time.time())
    answer = completion_answer(wish, found, model=model, created=created, names=names)
    return json_response(answer, headers={"X-Request-Id": found[0].id})


async def _chunks(
    call: Call[CompletionBody], served: Served, wish: CompletionWish, names: Names, headers: dict[str, str]
) -> AsyncGenerator[bytes]:
    body = call.body
    tells_usage = bool(body.stream_options and body.stream_options.include_usage)
    async with call.client(served.queue) as client:
        count = len(wish.requests)
        key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key, count)
        async with opened(client, wish.requests, key, call.options) as streams:
            id = headers["x-request-id"] = f"{served.queue}:{streams[0].id}"  # noqa: A001 (theirs)
            chunks = Chunks(
                f"cmpl-{id}",
                "text_completion",
                created=int(time.time()),
                model=model_name(body.model, served),
                revision=revision(served),
                tells_usage=tells_usage,
            )
            told = CompletionTold(wish, chunks, names, tells_usage=tells_usage)
            sources = [
                events_of(
                    stream,
                    partial(call.services.lines.position, served.queue, stream.id),
                    with_prompt=wish.echoes,
                    is_served=bool(served.cards),
                )
                for stream in streams
            ]
            async for place, event in merged(sources):
                yield event if isinstance(event, bytes) else told.take(place, event)
            yield told.close([stream.result for stream in streams])


OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        completions,
        "Continue text, as OpenAI's completions.",
        "openai",
        body=CompletionBody,
        names=completion_names,
        timed=True,
        answer_type="application/json",
        streams=True,
    ),
)
