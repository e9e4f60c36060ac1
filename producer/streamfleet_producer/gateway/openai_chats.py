"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp

from streamfleet_common.schemas import Delta
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.openai_answers import chat_answer
from streamfleet_producer.gateway.openai_chat_request import ChatWish, chat
from streamfleet_producer.gateway.openai_chunks import Chunks
from streamfleet_producer.gateway.openai_faults import chat_names
from streamfleet_producer.gateway.openai_key import key_to_use
from streamfleet_producer.gateway.openai_logprobs import Names, unnamed
from streamfleet_producer.gateway.openai_names import model_name, names_of, revision
from streamfleet_producer.gateway.openai_reading import events_of, opened, outcomes
from streamfleet_producer.gateway.openai_schemas import ChatBody
from streamfleet_producer.gateway.openai_told import ChatTold
from streamfleet_producer.gateway.operation import Operation


async def chats(call: Call[ChatBody]) -> ASGIApp | Response:
    """The next turn of a chat."""
    body = call.body
    served = await call.served(body.model, "generate")
    wish = chat(body, served.model)
    names = await names_of(call.services.settings, served) if wish.logprobs else unnamed
    if body.stream:
        headers: dict[str, str] = {}
        return await call.stream(_chunks(call, served, wish, names, headers), headers=headers)
    async with call.client(served.queue) as client:
        key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key)
        asking = outcomes(client, [wish.request], key, call.options, by_token=wish.logprobs)
        (found,) = await call.answer(asking)
    model, created = model_name(body.model, served), int(time.time())
    answer = chat_answer(wish, found, model=model, created=created, names=names)
    return json_response(answer, headers={"X-Request-Id": found.id})


async def _chunks(
    call: Call[ChatBody], served: Served, wish: ChatWish, names: Names, headers: dict[str, str]
) -> AsyncGenerator[bytes]:
    body = call.body
    tells_usage = bool(body.stream_options and body.stream_options.include_usage)
    async with call.client(served.queue) as client:
        key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key)
        async with opened(client, [wish.request], key, call.options) as (stream,):
            id = headers["x-request-id"] = f"{served.queue}:{stream.id}"  # noqa: A001 (theirs)
            chunks = Chunks(
                f"chatcmpl-{id}",
                "chat.completion.chunk",
                created=int(time.time()),
                model=model_name(body.model, served),
                revision=revision(served),
                tells_usage=tells_usage,
            )
            told = ChatTold(id, wish, chunks, names, tells_usage=tells_usage)
            position = partial(call.services.lines.position, served.queue, stream.id)
            async for event in events_of(stream, position, is_served=bool(served.cards)):
                if isinstance(event, Delta):
                    yield told.take(event)
                elif isinstance(event, bytes):
                    yield event
            yield told.close(stream.result)


OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        chats,
        "Continue a chat, as OpenAI's chat completions.",
        "openai",
        body=ChatBody,
        names=chat_names,
        timed=True,
        answer_type="application/json",
        streams=True,
    ),
)
