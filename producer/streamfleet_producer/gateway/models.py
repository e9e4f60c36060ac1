"""`GET /v1/models`: what is served, in OpenAI's words and with what they have none for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from streamfleet_common.cards import Card
from streamfleet_common.errors import ModelNotFound
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_response
from streamfleet_producer.gateway.operation import Operation

OWNER = "streamfleet"


def models(found: Mapping[str, tuple[Card, ...]]) -> list[dict[str, Any]]:
    """Each model of each queue, by the name under which it is to be asked for.

    That is the model's own on the first queue that serves it. On others, and where no worker lives, it is the
    queue's. Cards do not say since when there is a model, so `created` is 0.
    """
    told: dict[str, dict[str, Any]] = {}
    for queue in sorted(found):
        by_model: dict[str, list[Card]] = {}
        for card in found[queue]:
            by_model.setdefault(card.model, []).append(card)
        for model, cards in by_model.items():
            name = queue if model in told else model
            told.setdefault(name, _told(name, queue, model, cards))
        if not by_model:
            told.setdefault(queue, _told(queue, queue, None, []))
    return list(told.values())


def _told(name: str, queue: str, model: str | None, cards: list[Card]) -> dict[str, Any]:
    limits = [card.limits for card in cards]
    revisions = {card.revision for card in cards}
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": OWNER,
        "queue": queue,
        "model": model,
        "revision": revisions.pop() if len(revisions) == 1 else None,
        "tasks": sorted({task for card in cards for task in card.tasks}),
        "workers": len(cards),
        # As vLLM calls it.
        "max_model_len": max((limit.max_seq_len for limit in limits), default=None),
        "max_queue_depth": max((limit.max_queue_depth for limit in limits), default=None),
        "max_request_bytes": max((limit.max_request_bytes for limit in limits), default=None),
    }


async def list_models(call: Call[None]) -> Response:
    """All of them."""
    return json_response({"object": "list", "data": models(await call.services.directory.cards())})


async def show_model(call: Call[None]) -> Response:
    """One of them, by the name of a model or of a queue.

    Raises:
        ModelNotFound: there is none.
    """
    name = call.http.path_params["model"]
    found = await call.services.directory.cards()
    for told in models(found):
        if told["id"] == name:
            return json_response(told)
    cards = list(found.get(name, ()))
    if not cards:
        known = [told["id"] for told in models(found)]
        raise ModelNotFound(
            f"no model or queue of this name; there are: {', '.join(known[:16]) or 'none yet'}", known=known
        )
    return json_response(_told(name, name, cards[0].model, cards))


OPERATIONS = (
    Operation("GET", "/v1/models", list_models, "What is served.", "openai", answer_type="application/json"),
    Operation(
        "GET",
        "/v1/models/{model:path}",
        show_model,
        "One model, or one queue.",
        "openai",
        answer_type="application/json",
    ),
)
