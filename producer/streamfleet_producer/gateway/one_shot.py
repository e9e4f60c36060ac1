"""Texts to an order, labels or decisions: one-shot work over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from streamfleet_common.decisions import DecideRequest, Decision
from streamfleet_common.one_shot import ClassifyRequest, Label, Rank, RerankRequest
from streamfleet_common.schemas import Batch, End, Timing, Usage
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.openai_key import key_to_use
from streamfleet_producer.gateway.operation import Operation


class _Answer(BaseModel):
    """What all answers have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    model: str
    revision: str
    usage: Usage
    timing: Timing
    batch: Batch | None
    """The last one that it ran in; null if it needed none."""

    @staticmethod
    def shared(rid: str, end: End) -> dict[str, Any]:
        """These fields of an end."""
        return {
            "id": rid,
            "model": end.model,
            "revision": end.revision,
            "usage": end.usage,
            "timing": end.timing,
            "batch": end.batch,
        }


class RerankAnswer(_Answer):
    """Documents in the order in which they answer the query."""

    results: tuple[Rank, ...]
    """The best first; of equals the one given first."""

    @classmethod
    def of(cls, rid: str, end: End) -> RerankAnswer:
        return cls(**cls.shared(rid, end), results=tuple(end.ranking))


class Labelled(BaseModel):
    """One text."""

    label: str
    """The likeliest."""
    score: float
    labels: tuple[Label, ...]
    """The likeliest first."""


class ClassifyAnswer(_Answer):
    """Texts in their order, with their labels."""

    results: tuple[Labelled, ...]

    @classmethod
    def of(cls, rid: str, end: End) -> ClassifyAnswer:
        results = tuple(
            Labelled(label=one.labels[0].label, score=one.labels[0].score, labels=tuple(one.labels))
            for one in end.classifications
        )
        return cls(**cls.shared(rid, end), results=results)


class DecideAnswer(_Answer):
    """Questions in their order, with what was decided."""

    results: tuple[Decision, ...]

    @classmethod
    def of(cls, rid: str, end: End) -> DecideAnswer:
        return cls(**cls.shared(rid, end), results=tuple(end.answers))


async def rerank(call: Call[RerankRequest]) -> Response:
    """Put documents in the order in which they answer a query."""
    return await _answered(call, RerankAnswer.of)


async def classify(call: Call[ClassifyRequest]) -> Response:
    """Give labels to texts, or to pairs of texts."""
    return await _answered(call, ClassifyAnswer.of)


async def decide(call: Call[DecideRequest]) -> Response:
    """Answer questions about a state, each by the likeliest of its options."""
    return await _answered(call, DecideAnswer.of)


async def _answered(
    call: Call[RerankRequest] | Call[ClassifyRequest] | Call[DecideRequest],
    told: Callable[[str, End], BaseModel],
) -> Response:
    """Run the body, which is a request of the wire. Raises as `Client.run`, and as `Call.served`."""
    body, options, said = call.body, call.options, call.idempotency_key
    served = await call.served(body.model, body.kind)
    request = body.changed({"model": served.model})  # where a queue was named, whatever it serves

    async def asked() -> tuple[str, End]:
        async with call.client(served.queue) as client:
            key = await key_to_use(client, call.tenant, call.http.headers, said)
            return await client.run_with_id(request, idempotency_key=key, **options)

    rid, end = await call.answer(asked())
    rid = f"{served.queue}:{rid}"
    return Response(
        told(rid, end).model_dump_json(), headers={"X-Request-Id": rid}, media_type="application/json"
    )


OPERATIONS = (
    Operation(
        "POST",
        "/v1/rerank",
        rerank,
        "Put documents in the order in which they answer a query.",
        "one-shot",
        body=RerankRequest,
        timed=True,
        answer=RerankAnswer,
    ),
    Operation(
        "POST",
        "/v1/classify",
        classify,
        "Give labels to texts.",
        "one-shot",
        body=ClassifyRequest,
        timed=True,
        answer=ClassifyAnswer,
    ),
    Operation(
        "POST",
        "/v1/decide",
        decide,
        "Answer questions about a state by the likeliest of their options.",
        "one-shot",
        body=DecideRequest,
        timed=True,
        answer=DecideAnswer,
    ),
)
