"""The routes of text-generation-inference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from starlette.responses import Response
from starlette.types import ASGIApp

from streamfleet_common.cards import Card
from streamfleet_common.errors import InvalidRequest, ModelNotFound, StreamfleetError
from streamfleet_common.schemas import Delta, End, GenerateRequest
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_bytes, json_response
from streamfleet_producer.gateway.directory import Served
from streamfleet_producer.gateway.event_stream import OPENED
from streamfleet_producer.gateway.health import reach
from streamfleet_producer.gateway.openai_key import key_to_use
from streamfleet_producer.gateway.openai_reading import events_of
from streamfleet_producer.gateway.operation import Operation
from streamfleet_producer.gateway.refusals import NoWorker
from streamfleet_producer.gateway.tgi_answer import Gathered, TokenWriter, generated
from streamfleet_producer.gateway.tgi_errors import TGI
from streamfleet_producer.gateway.tgi_request import parameters_of, request_of, tgi_names
from streamfleet_producer.gateway.tgi_schemas import (
    MAX_BEST_OF,
    MAX_STOP_SEQUENCES,
    TgiGenerateBody,
    TgiGenerated,
    TgiGeneratedList,
    TgiInfo,
)
from streamfleet_producer.gateway.tgi_stream import TgiEvents
from streamfleet_producer.gateway.tgi_vocabulary import vocabulary

KIND = "generate"


async def generate(call: Call[TgiGenerateBody]) -> Response:
    """The whole answer, as an object."""
    return await _answered(call, full_text=bool(parameters_of(call.body).return_full_text))


async def generate_stream(call: Call[TgiGenerateBody]) -> ASGIApp:
    """The answer token by token."""
    return await _streamed(call, full_text=bool(parameters_of(call.body).return_full_text))


async def generate_either(call: Call[TgiGenerateBody]) -> ASGIApp | Response:
    """The one or the other, as `stream` says. The whole answer comes in a list."""
    said = parameters_of(call.body).return_full_text
    full_text = True if said is None else said  # as a text generation pipeline does
    if call.body.stream:
        return await _streamed(call, full_text=full_text)
    return await _answered(call, full_text=full_text, listed=True)


async def info(call: Call[None]) -> Response:
    """What is served.

    Raises:
        NoWorker: nobody serves it now.
        ModelNotFound, BrokerUnavailable: see `Directory.find`.
    """
    served = await _served(call)
    if not served.cards:
        raise NoWorker(f"no worker serves queue {served.queue!r} now, so its model is not known: start one")
    return json_response(_info(served.cards))


async def health(call: Call[None]) -> Response:
    """Whether a request could be answered now."""
    try:
        await reach(call)
        is_well = bool((await _served(call)).cards)
    except StreamfleetError:
        is_well = False
    if is_well:
        return Response()
    return json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503)


# --- answers


@dataclass(slots=True)
class _Asked:
    """A request that is ready to be sent."""

    request: GenerateRequest
    served: Served
    writer: TokenWriter
    began_at: float
    ready_at: float


async def _answered(call: Call[TgiGenerateBody], *, full_text: bool, listed: bool = False) -> Response:
    asked = await _asked(call, stream=False)
    body, told = call.body, Gathered()
    wants_tokens = parameters_of(body).details or parameters_of(body).decoder_input_details

    async def answer() -> tuple[str, End]:
        async with call.client(asked.served.queue) as client:
            key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key)
            if not wants_tokens:
                return await client.run_with_id(asked.request, idempotency_key=key, **call.options)
            # Only a stream has the texts of single tokens.
            async with client.stream(asked.request, idempotency_key=key, **call.options) as tokens:
                async for event in tokens.events():
                    told.add(event)
                return tokens.id, tokens.result

    rid, end = await call.answer(answer())
    value = generated(body, end, told, asked.writer, full_text=full_text)
    headers = {
        "x-request-id": f"{asked.served.queue}:{rid}",
        **_compute(asked.served.cards, body),
        **_times(asked, end),
    }
    return json_response([value] if listed else value, headers=headers)


async def _streamed(call: Call[TgiGenerateBody], *, full_text: bool) -> ASGIApp:
    asked = await _asked(call, stream=True)
    cards = asked.served.cards
    headers = _compute(cards, call.body)
    # A real model tells how its tokens lie; of any other worker nothing is known.
    knows_ends = bool(cards) and all(card.layout is not None for card in cards)
    events = TgiEvents(call.body, asked.writer, full_text=full_text, knows_ends=knows_ends)

    async def chunks() -> AsyncGenerator[bytes]:
        async with call.client(asked.served.queue) as client:
            key = await key_to_use(client, call.tenant, call.http.headers, call.idempotency_key)
            async with client.stream(asked.request, idempotency_key=key, **call.options) as tokens:
                headers["x-request-id"] = f"{asked.served.queue}:{tokens.id}"
                async for event in events_of(tokens, _unknown, is_served=bool(cards)):
                    yield b"".join(map(_sent, events.of(event))) if isinstance(event, Delta) else OPENED
                yield _sent(events.last(tokens.result))

    return await call.stream(chunks(), headers=headers)


async def _unknown() -> None:
    """Its place in the queue: TGI has no word for that."""


def _sent(event: dict[str, object]) -> bytes:
    return b"data: " + json_bytes(event) + b"\n\n"


async def _asked(call: Call[TgiGenerateBody], *, stream: bool) -> _Asked:
    began_at = time.monotonic()
    served = await _served(call)
    longest = max((card.limits.max_seq_len for card in served.cards), default=None)
    request = request_of(call.body, model=served.model, stream=stream, max_seq_len=longest)
    writer = await _writer(call, served.queue) if request.logprobs else TokenWriter()
    return _Asked(request, served, writer, began_at, time.monotonic())


async def _served(call: Call[TgiGenerateBody] | Call[None]) -> Served:
    chosen = call.services.settings.tgi_model
    try:
        return await call.served(None, KIND, chosen)
    except InvalidRequest:
        raise ModelNotFound(
            "no queue generates here now, or several do, and these requests name no model: "
            "set STREAMFLEET_TGI_MODEL for the gateway, to a model or a queue",
            known=[],
        ) from None


async def _writer(call: Call[TgiGenerateBody], queue: str) -> TokenWriter:
    path = call.services.settings.tokenizers.get(queue)
    return TokenWriter(None if path is None else await asyncio.to_thread(vocabulary, path))


# --- headers


def _compute(cards: Sequence[Card], body: TgiGenerateBody) -> dict[str, str]:
    headers = {"x-compute-characters": str(len(body.inputs))}
    device = next((card.device for card in cards if card.device), "")
    return {"x-compute-type": device, **headers} if device else headers


def _times(asked: _Asked, end: End) -> dict[str, str]:
    """Milliseconds, but for `x-compute-time`. The server's clock tells the waiting, the worker's the rest."""
    total_s = time.monotonic() - asked.began_at
    timing, tokens = end.timing, end.usage.completion_tokens
    queue_ms = max(0, end.started_at_ms - end.queued_at_ms) + timing.wait_ms
    inference_ms = timing.prefill_ms + timing.decode_ms
    return {
        "x-compute-time": f"{total_s:.6f}",
        "x-total-time": str(round(total_s * 1000)),
        "x-validation-time": str(round((asked.ready_at - asked.began_at) * 1000)),
        "x-queue-time": str(round(queue_ms)),
        "x-inference-time": str(round(inference_ms)),
        "x-time-per-token": str(round(inference_ms / max(1, tokens))),
        "x-prompt-tokens": str(end.usage.prompt_tokens),
        "x-generated-tokens": str(tokens),
    }


# --- what is served


def _info(cards: Sequence[Card]) -> dict[str, object]:
    card = max(cards, key=lambda card: card.limits.max_seq_len)
    limits = card.limits
    said = TgiInfo(
        model_id=card.model,
        model_sha=card.revision or None,
        model_dtype=card.precision,
        model_device_type=card.device,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=limits.max_queue_depth,
        max_best_of=MAX_BEST_OF,
        max_stop_sequences=MAX_STOP_SEQUENCES,
        max_input_tokens=limits.max_seq_len - 1,
        max_input_length=limits.max_seq_len - 1,
        max_total_tokens=limits.max_seq_len,
        max_batch_size=limits.max_batch_size,
        router="streamfleet",
        version=version("streamfleet"),
        sha=None,
        docker_label=None,
    )
    return said.model_dump()


_ERRORS = {
    "422": "The request is not valid; the message names every problem.",
    "424": "The model or its worker failed on the request.",
    "500": "The answer broke off.",
}
_operation = partial(Operation, tag="tgi", dialect=TGI, errors=_ERRORS, error_schema="TgiError")
_generation = partial(_operation, "POST", body=TgiGenerateBody, timed=True, names=tgi_names)

OPERATIONS = (
    _generation("/generate", generate, "Continue a text.", answer=TgiGenerated),
    _generation(
        "/generate_stream",
        generate_stream,
        "Continue a text, token by token.",
        streams=True,
    ),
    _generation(
        "/",
        generate_either,
        "Continue a text, token by token if `stream` is set.",
        answer=TgiGeneratedList,
        streams=True,
    ),
    _operation("GET", "/info", info, "What model is served.", answer=TgiInfo),
    _operation("GET", "/health", health, "Whether a request could be answered.", public=True),
)
