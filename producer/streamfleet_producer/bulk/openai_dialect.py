"""Lines as OpenAI's batches have them: `{"custom_id", "method": "POST", "url": "/v1/…", "body": {…}}`.

What a body asks and how its answer looks is the gateway's, whose pure parts are used. An answer says 200,
a request that failed the status that the gateway would have said; a line that is no request has an `error`
instead of a `response`, as one whose job ended before it was answered.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from streamfleet_common.errors import InvalidRequest, QueueFull, StreamfleetError
from streamfleet_common.message import problems
from streamfleet_common.schemas import End, Request
from streamfleet_producer.bulk.dialects import Asked
from streamfleet_producer.bulk.line_errors import BadLine, BatchExpired, UnknownRoute
from streamfleet_producer.gateway.openai_answers import Outcome, chat_answer, completion_answer
from streamfleet_producer.gateway.openai_chat_request import chat
from streamfleet_producer.gateway.openai_completion_request import completion
from streamfleet_producer.gateway.openai_embedding import embed_request, embedded_texts, embeddings
from streamfleet_producer.gateway.openai_schemas import ChatBody, CompletionBody, EmbeddingBody
from streamfleet_producer.gateway.refusals import code_of, status_of

MOST_TEXTS = 64
"""Of one request: its vectors fit an answer, however long they are."""
MOST_CHARACTERS = 50_000
"""Of one request: four bytes each fit it."""

_B = TypeVar("_B", bound=BaseModel)
_Telling = Callable[[Sequence[str], Sequence[End]], dict[str, Any]]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class OpenAIDialect:
    """Lines for one queue; a body's `model` is the queue's name, or what it serves."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._routes: dict[str, Callable[[dict[str, Any]], Asked]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/embeddings": self._embeddings,
        }

    def parse(self, line: dict[str, Any]) -> Asked:
        """What a line asks; see `Dialect`."""
        given = _validated(_Line, line)
        route = self._routes.get(given.url)
        if route is None:
            raise UnknownRoute(f"url: one of {', '.join(self._routes)} is wanted", known=list(self._routes))
        if given.body.get("stream"):
            raise InvalidRequest(
                "stream: a batch has no streams: leave it out", problems=["stream: not in a batch"]
            )
        return route(given.body)

    def refusal(self, custom_id: str | None, error: StreamfleetError) -> dict[str, Any]:
        """The error file's line; see `Dialect`."""
        if custom_id is None or isinstance(error, (BadLine, BatchExpired)):
            return _line(custom_id, None, {"code": error.code, "message": error.message})
        told = {
            "message": error.message,
            "type": _kind(error),
            "param": None,
            "code": code_of(error),
        }
        return _line(
            custom_id, {"status_code": status_of(error), "request_id": "", "body": {"error": told}}, None
        )

    # --- routes

    def _chat(self, fields: dict[str, Any]) -> Asked:
        body = _validated(ChatBody, fields)
        wish = chat(body, self._model(body.model))

        def tell(ids: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
            model = self._name(body.model, ends)
            return chat_answer(wish, Outcome(ids[0], ends[0]), model=model, created=_created(ends))

        return _Asked((wish.request,), tell)

    def _completion(self, fields: dict[str, Any]) -> Asked:
        body = _validated(CompletionBody, fields)
        wish = completion(body, self._model(body.model))

        def tell(ids: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
            outcomes = [Outcome(id_, end) for id_, end in zip(ids, ends, strict=True)]
            model = self._name(body.model, ends)
            return completion_answer(wish, outcomes, model=model, created=_created(ends))

        return _Asked(tuple(wish.requests), tell)

    def _embeddings(self, fields: dict[str, Any]) -> Asked:
        body = _validated(EmbeddingBody, fields)
        model = self._model(body.model)
        parts = tuple(embed_request(body, part, model) for part in _parts(embedded_texts(body)))

        def tell(_: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
            return embeddings(body, self._name(body.model, ends), ends)

        return _Asked(parts, tell)

    def _model(self, asked: str | None) -> str | None:
        return None if asked == self._queue else asked

    def _name(self, asked: str | None, ends: Sequence[End]) -> str:
        return asked or ends[0].model or self._queue


@dataclass(frozen=True, slots=True)
class _Asked:
    requests: tuple[Request, ...]
    tell: _Telling

    def answer(self, custom_id: str, ids: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
        body = self.tell(ids, ends)
        return _line(custom_id, {"status_code": 200, "request_id": ids[0], "body": body}, None)


def _line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    # Each line's own: other batches have the same custom_ids.
    id_ = f"batch_req_{secrets.token_hex(16)}"
    return {"id": id_, "custom_id": custom_id, "response": response, "error": error}


def _parts(texts: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = []
    room = 0
    for text in texts:
        if not parts or len(parts[-1]) >= MOST_TEXTS or len(text) > room:
            parts.append([])
            room = MOST_CHARACTERS
        parts[-1].append(text)
        room -= len(text)
    return parts


def _validated(model: type[_B], fields: dict[str, Any]) -> _B:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest("; ".join(faults), problems=faults) from None


def _created(ends: Sequence[End]) -> int:
    """The Unix time of the last end; seconds."""
    return max(end.ended_at_ms for end in ends) // 1000


def _kind(error: StreamfleetError) -> str:
    if isinstance(error, QueueFull):
        return "rate_limit_error"
    return "invalid_request_error" if status_of(error) < 500 else "server_error"
