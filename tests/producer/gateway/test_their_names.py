"""Faults that the fleet finds are told by the names that the caller has sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
import pytest
from pydantic import BaseModel

from gateway_process import Gateway
from hand_worker import HandWorker, delta
from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_producer.gateway.openai_faults import chat_names, completion_names, embedding_names
from streamfleet_producer.gateway.openai_schemas import ChatBody, CompletionBody, EmbeddingBody
from streamfleet_producer.gateway.tgi_request import tgi_names
from streamfleet_producer.gateway.tgi_schemas import TgiGenerateBody
from streamfleet_producer.gateway.their_names import renamed

_B = TypeVar("_B", bound=BaseModel)


def of(kind: type[_B], **fields: Any) -> _B:
    return kind.model_validate(fields)


MESSAGES = [{"role": "user", "content": "x"}]
PLAIN = of(CompletionBody, prompt="x")
TOKENS = of(CompletionBody, prompt=[[1, 2], [1, 9]])
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOO_HIGH = "token id 9 is not below the vocabulary size of 8"


@pytest.fixture
async def http(redis_url: str, hand: HandWorker) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose worker knows ten tokens."""
    await hand.announce(vocab_size=10)
    async with Gateway(redis_url) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("names", "problem", "theirs"),
    [
        (completion_names(of(CompletionBody, prompt=[9])), f"prompt_token_ids.0: {TOO_HIGH}", "prompt.0: "),
        (completion_names(TOKENS), f"prompt_token_ids.1: {TOO_HIGH}", "prompt.1.1: "),
        (completion_names(PLAIN), f"sampling.logit_bias.0: {TOO_HIGH}", "logit_bias.9: "),
        (completion_names(PLAIN), "sampling.bad_words.0: this model has no tokens for it", "bad_words.0: "),
        (completion_names(PLAIN), "truncate: Input should be smaller", "truncate_prompt_tokens: "),
        (completion_names(PLAIN), "truncate_prompt_tokens: so", "truncate_prompt_tokens: "),
        (completion_names(PLAIN), "prompt of 5 tokens is long: shorten it", "prompt of 5 tokens"),
        (
            completion_names(of(CompletionBody, prompt="x", guided_json={})),
            "guide.json_schema/type: no such type",
            "guided_json/type: ",
        ),
        (
            completion_names(of(CompletionBody, prompt="x", structured_outputs={"regex": "("})),
            "guide.regex at '(': unclosed group",
            "structured_outputs.regex at '(': ",
        ),
        (
            chat_names(of(ChatBody, messages=MESSAGES, response_format=FORMAT)),
            "guide.json_schema/type: no such type",
            "response_format.json_schema.schema/type: ",
        ),
        (chat_names(of(ChatBody, messages=MESSAGES)), "guide.json_schema/type: no such type", "tools/type: "),
        (
            chat_names(of(ChatBody, messages=MESSAGES, max_completion_tokens=1)),
            "max_tokens: too many",
            "max_completion_tokens: ",
        ),
        (embedding_names(of(EmbeddingBody, input="x")), "texts.0: too long", "input: "),
        (embedding_names(of(EmbeddingBody, input=["x", "y"])), "texts.1: too long", "input.1: "),
        (
            tgi_names(of(TgiGenerateBody, inputs="x", parameters={"grammar": {"type": "json", "value": {}}})),
            "guide.json_schema/type: no such type",
            "parameters.grammar.value/type: ",
        ),
        (tgi_names(of(TgiGenerateBody, inputs="x")), "sampling.top_k: too large", "parameters.top_k: "),
    ],
)
def test_a_problem_has_the_callers_name(names: Any, problem: str, theirs: str) -> None:
    told = renamed(InvalidRequest(f"not valid: {problem}", problems=[problem]), names)
    assert told.details["problems"][0].startswith(theirs)
    assert told.message.startswith(f"not valid: {theirs}")
    alone = renamed(Unsupported(problem, feature="f"), names)
    assert (type(alone), alone.message.startswith(theirs), alone.feature) == (Unsupported, True, "f")


async def test_the_param_of_an_error_is_what_was_sent(http: httpx.AsyncClient) -> None:
    async def param(path: str, body: dict[str, Any], **headers: str) -> str:
        answer = await http.post(path, json=body, headers=headers)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])

    completions, asked = "/v1/completions", {"model": "q", "prompt": "x"}
    assert await param(completions, {"model": "q", "prompt": [1, 99]}) == "prompt.1"
    assert await param(completions, asked | {"logit_bias": {"99": 1}, "stream": True}) == "logit_bias.99"
    assert await param(completions, asked, **{"X-Request-Timeout": "0"}) == "X-Request-Timeout"
    assert await param(completions, asked, **{"X-Lane": "fast"}) == "X-Lane"
    tokens = {"queue": "q", "request": {"prompt_token_ids": [99]}}
    assert await param("/v1/requests", tokens) == "request.prompt_token_ids.0"
    plain = {"queue": "q", "request": {"prompt": "x"}}
    assert await param("/v1/requests", plain | {"deadline_s": 0}) == "deadline_s"
    assert await param("/v1/requests", plain | {"retry": {"max_attempts": 3}}) == "retry.max_attempts"


async def test_what_a_worker_finds_amid_a_stream_has_the_callers_name(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    body = {"model": "q", "prompt": "x", "stream": True, "guided_regex": "("}
    asking = asyncio.create_task(http.post("/v1/completions", json=body))
    [work] = await hand.take()
    await hand.emit(work, delta("a"))
    await hand.fail(work, InvalidRequest("guide.regex at '(': unclosed group"))
    answer = await asking
    chunk = next(line for line in answer.text.splitlines() if "error" in line)
    assert (
        json.loads(chunk.removeprefix("data: "))["error"]["message"] == "guided_regex at '(': unclosed group"
    )
