"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Unpack

from starlette.responses import Response

from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_common.schemas import End, Request
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.call import Call
from streamfleet_producer.gateway.dialects import json_bytes
from streamfleet_producer.gateway.openai_embedding import embed_request, embedded_texts, embeddings
from streamfleet_producer.gateway.openai_faults import embedding_names
from streamfleet_producer.gateway.openai_names import model_name
from streamfleet_producer.gateway.openai_schemas import EmbeddingBody
from streamfleet_producer.gateway.operation import Operation
from streamfleet_producer.long_list import LongList, size_of
from streamfleet_producer.one_shot import items_that_fit
from streamfleet_producer.ticket import Options

AT_ONCE = 64
"""Vectors that are put into words without a pause."""


class _Runner:
    """Runs the parts of a list, and remembers the id of the first one that is answered."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rid = ""

    async def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 (their deadline bounds them)
        **options: Unpack[Options],
    ) -> End:
        rid, end = await self._client.run_with_id(request, **options)
        self.rid = self.rid or rid
        return end

    async def max_bytes(self, request: Request) -> int:
        return await self._client.max_bytes(request)


async def embed(call: Call[EmbeddingBody]) -> Response:
    """The vector of one text, or of each of several.

    An idempotency key is not needed: the same texts have the same vectors.
    """
    body = call.body
    served = await call.served(body.model, "embed")
    texts = embedded_texts(body)

    def request(part: Sequence[str]) -> EmbedRequest:
        return embed_request(body, part, served.model)

    asked = LongList(texts, request, size_of, items_that_fit(body.dimensions and 4 * body.dimensions))
    async with call.client(served.queue) as client:
        runner = _Runner(client)
        parts = await call.answer(asked.answers(runner, None, call.options))
    answer = embeddings(body, model_name(body.model, served), [part.end for part in parts])
    if len(answer["data"]) != len(texts):
        raise IncompleteGeneration(
            f"the worker gave {len(answer['data'])} vectors where {len(texts)} were asked for: send it again"
        )
    headers = {"X-Request-Id": f"{served.queue}:{runner.rid}"}
    return Response(await encoded(answer), headers=headers, media_type="application/json")


async def encoded(answer: dict[str, Any]) -> bytes:
    """The answer as JSON. All vectors at once would hold up everybody else for a second."""
    data, parts = answer["data"], []
    for start in range(0, len(data), AT_ONCE):
        parts.append(json_bytes(data[start : start + AT_ONCE])[1:-1])
        await asyncio.sleep(0)
    head, tail = json_bytes({**answer, "data": []}).split(b'"data":[]', 1)
    return head + b'"data":[' + b",".join(parts) + b"]" + tail


OPERATIONS = (
    Operation(
        "POST",
        "/v1/embeddings",
        embed,
        "Turn texts into vectors, as OpenAI's embeddings.",
        "openai",
        body=EmbeddingBody,
        names=embedding_names,
        timed=True,
        answer_type="application/json",
    ),
)
