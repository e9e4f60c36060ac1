"""Lines in OpenAI's form: what they ask, and answers that OpenAI's own types take."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from streamfleet_common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    StreamfleetError,
    TooLong,
)
from streamfleet_common.one_shot import Embedding, EmbedRequest
from streamfleet_common.schemas import Choice, End, GenerateRequest, Usage
from streamfleet_producer.bulk.dialects import dialect
from streamfleet_producer.bulk.line_errors import BatchExpired, DuplicateCustomId, UnknownRoute
from streamfleet_producer.bulk.openai_dialect import MOST_TEXTS

OPENAI = dialect("openai", "q")


def line(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def end(text: str = "", **fields: Any) -> End:
    choices = (Choice(text=text, token_ids=(1, 2), finish_reason="eos"),) if text else ()
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    return End(state="done", choices=choices, usage=usage, ended_at_ms=1_795_964_645_966, model="m", **fields)


def test_a_chat_there_and_back() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = OPENAI.parse(line("/v1/chat/completions", model="m", messages=turns, temperature=0, max_tokens=9))
    (request,) = asked.requests
    assert isinstance(request, GenerateRequest)
    assert request.messages is not None
    assert [(turn.role, turn.content) for turn in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (request.model, request.max_tokens, request.sampling.temperature) == ("m", 9, 0.0)
    told = json.loads(json.dumps(asked.answer("a", ["q:00aa"], [end("Hello")])))
    assert told["id"].startswith("batch_req_")
    assert (told["custom_id"], told["error"]) == ("a", None)
    assert (told["response"]["status_code"], told["response"]["request_id"]) == (200, "q:00aa")
    body = ChatCompletion.model_validate(told["response"]["body"], strict=True)
    assert (body.id, body.created, body.model) == ("chatcmpl-q:00aa", 1_795_964_645, "m")
    assert (body.choices[0].message.content, body.choices[0].finish_reason) == ("Hello", "stop")
    assert body.usage is not None
    assert body.usage.total_tokens == 5


def test_several_prompts_are_several_requests_and_one_answer() -> None:
    asked = OPENAI.parse(line("/v1/completions", model="q", prompt=["one", "two"], max_tokens=4))
    assert [getattr(request, "prompt", "") for request in asked.requests] == ["one", "two"]
    # The queue's own name asks for whatever it serves.
    assert {request.model for request in asked.requests if isinstance(request, GenerateRequest)} == {None}
    told = asked.answer("a", ["q:1", "q:2"], [end("eins"), end("zwei")])
    body = Completion.model_validate(told["response"]["body"], strict=True)
    assert [(choice.index, choice.text) for choice in body.choices] == [(0, "eins"), (1, "zwei")]
    assert body.id == "cmpl-q:1"
    assert body.usage is not None
    assert body.usage.total_tokens == 10


def test_many_texts_are_several_requests_and_one_list() -> None:
    texts = [f"text {number}" for number in range(MOST_TEXTS + 1)]
    asked = OPENAI.parse(line("/v1/embeddings", model="m", input=texts, encoding_format="float"))
    parts = [request.texts for request in asked.requests if isinstance(request, EmbedRequest)]
    assert [len(part) for part in parts] == [MOST_TEXTS, 1]
    assert [text for part in parts for text in part] == texts
    vectors = np.arange(2 * len(texts), dtype=np.float32).reshape(-1, 2)
    found = [Embedding(data=vector.tobytes()) for vector in vectors]
    ends = [end(embeddings=tuple(found[:MOST_TEXTS])), end(embeddings=tuple(found[MOST_TEXTS:]))]
    told = asked.answer("a", ["q:1", "q:2"], ends)
    body = CreateEmbeddingResponse.model_validate(told["response"]["body"], strict=True)
    assert [one.index for one in body.data] == list(range(len(texts)))
    assert body.data[-1].embedding == vectors[-1].tolist()


def test_long_texts_share_no_request() -> None:
    asked = OPENAI.parse(line("/v1/embeddings", input=["x" * 30_000, "y" * 30_000, "z"]))
    assert [len(request.texts) for request in asked.requests if isinstance(request, EmbedRequest)] == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"custom_id": "a"},
        {"custom_id": "a", "method": "GET", "url": "/v1/embeddings", "body": {"input": "x"}},
        line("/v1/embeddings", input="x") | {"more": 1},
        line("/v1/embeddings", input=""),
        line("/v1/embeddings", input=[1, 2]),
        line("/v1/chat/completions", messages=[]),
        line("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True),
        line("/v1/completions", prompt="x", unknown=1),
        line("/v1/completions", prompt="x", max_tokens="7"),
        line("/v1/completions"),
    ],
    ids=str,
)
def test_what_is_no_request_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        OPENAI.parse(wrong)


@pytest.mark.parametrize("url", ["/v1/responses", "/v1/embeddings/", "http://host/v1/embeddings", ""])
def test_other_routes_are_told_by_name(url: str) -> None:
    with pytest.raises(UnknownRoute) as caught:
        OPENAI.parse(line(url))
    assert caught.value.known == ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("no"), 400, "invalid_request_error", "invalid_request"),
        (
            TooLong(prompt_tokens=9, max_tokens=9, limit=9),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (ModelNotFound("no", known=[]), 404, "invalid_request_error", "model_not_found"),
        (GenerationFailed("no"), 500, "server_error", "generation_failed"),
        (DeadlineExceeded("no"), 504, "server_error", "deadline_exceeded"),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_a_request_that_failed_has_the_status_of_the_gateway(
    error: StreamfleetError, status: int, kind: str, code: str
) -> None:
    told = OPENAI.refusal("a", error)
    assert told["error"] is None
    assert told["response"]["status_code"] == status
    found = told["response"]["body"]["error"]
    assert (found["type"], found["code"]) == (kind, code)


def test_a_line_that_was_never_asked_has_an_error() -> None:
    for custom_id, error in (("a", BatchExpired("late")), (None, DuplicateCustomId("again"))):
        told = OPENAI.refusal(custom_id, error)
        assert told["id"].startswith("batch_req_")
        assert told["response"] is None
        assert told["error"] == {"code": error.code, "message": error.message}


def test_every_line_has_an_id_of_its_own() -> None:
    asked = OPENAI.parse(line("/v1/completions", model="m", prompt="a"))
    told = [asked.answer("a", ["q:00aa"], [end("Hello")]) for _ in range(2)]
    told += [OPENAI.refusal(custom_id, DuplicateCustomId("again")) for custom_id in ("a", None, None)]
    assert len({one["id"] for one in told}) == len(told)
