"""OpenAI's client against a gateway over real SmolLM2 and MiniLM workers: what its users do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from chat_templates import HERMES
from command import environment
from gateway_process import Gateway
from openai_client import client_of
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import ChatMessage, Client, EmbedRequest, GenerateRequest
from streamfleet_worker.engine.smollm2 import folder as smollm2_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 200.0
ASKED: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    city: Literal["Rome", "Paris"]
    is_capital: bool


@contextmanager
def worker(url: str, queue: str, model: str) -> Iterator[None]:
    told = {"REDIS_URL": url, "QUEUE": queue, "MODEL": model, "ENGINE": "auto", "LOG_LEVEL": "error"}
    env = environment(**{f"STREAMFLEET_{name}": value for name, value in told.items()})
    with subprocess.Popen([sys.executable, "-P", "-m", "streamfleet_worker"], env=env) as process:
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # The model as it is, but for a template that shows it tools: its own knows none.
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    folder.mkdir()
    for file in smollm2_folder(print).iterdir():
        if file.suffix != ".jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(HERMES)
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        stack.enter_context(worker(broker.url, "smol", str(folder)))
        stack.enter_context(worker(broker.url, "mini", "minilm"))
        asyncio.run(_served(broker.url, ["smol", "mini"]))
        yield broker.url


async def _served(url: str, queues: list[str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        for queue in queues:
            async with Client(url, queue=queue) as client:
                while not await client.models():  # noqa: ASYNC110 (other processes make it true)
                    await asyncio.sleep(0.05)


@pytest.fixture
async def gateway(url: str) -> AsyncIterator[Gateway]:
    async with Gateway(url) as gateway:
        yield gateway


@pytest.fixture
async def api(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(gateway) as api:
        yield api


async def test_a_chat(url: str, api: AsyncOpenAI) -> None:
    asked: Any = {"model": "smol", "messages": ASKED, "temperature": 0, "max_tokens": 12}
    told = await api.chat.completions.create(**asked)
    async with Client(url, queue="smol") as fleet:
        end = await fleet.run(GenerateRequest(messages=[ChatMessage(**ASKED[0])], max_tokens=12))
    assert told.choices[0].message.content == end.text
    assert "Paris" in end.text
    parts = [
        chunk.choices[0].delta.content
        async for chunk in await api.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(part or "" for part in parts) == end.text


async def test_legacy_completions(api: AsyncOpenAI) -> None:
    told = await api.completions.create(
        model="smol",
        prompt=["The capital of France is", "The opposite of hot is"],
        temperature=0,
        max_tokens=4,
        stop=["\n", "."],
        logprobs=2,
    )
    assert told.choices[0].text == " Paris"
    assert told.choices[0].finish_reason == "stop"
    assert told.choices[1].index == 1
    for choice in told.choices:
        assert choice.logprobs is not None
        assert all(logprob < 0 for logprob in choice.logprobs.token_logprobs or ())


def test_the_sync_client_reads_a_stream(url: str) -> None:
    async def served() -> str:
        async with Gateway(url) as gateway:
            return await asyncio.to_thread(ask, gateway.url)

    def ask(base: str) -> str:
        with OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0) as api:
            stream = api.completions.create(
                model="smol", prompt="The capital of France is", temperature=0, max_tokens=1, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    assert asyncio.run(served()) == " Paris"


async def test_an_answer_that_is_an_object_of_a_class(api: AsyncOpenAI) -> None:
    told = await api.chat.completions.parse(
        model="smol", messages=ASKED, temperature=0, max_tokens=60, response_format=Place
    )
    assert isinstance(told.choices[0].message.parsed, Place)
    told_json = await api.chat.completions.create(
        model="smol", messages=ASKED, temperature=0, max_tokens=80, response_format={"type": "json_object"}
    )
    if told_json.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(told_json.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"]
)
async def test_a_tool_that_must_be_called(api: AsyncOpenAI, choice: Any) -> None:
    asked: Any = {
        "model": "smol",
        "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
        "temperature": 0,
        "max_tokens": 80,
        "tools": [WEATHER],
        "tool_choice": choice,
    }
    told = (await api.chat.completions.create(**asked)).choices[0]
    assert told.finish_reason == "tool_calls"
    (call,) = told.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Paris")
    async with api.chat.completions.stream(**asked) as events:
        final = await events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert json.loads(streamed.function.arguments) == arguments
    # And on with what the tool gave.
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."}
    turns = [*asked["messages"], told.message, result]
    more = await api.chat.completions.create(model="smol", messages=turns, tools=[WEATHER], max_tokens=8)
    assert more.choices[0].finish_reason in ("stop", "length")


async def test_vectors(url: str, api: AsyncOpenAI) -> None:
    texts = ["A cat sits on the mat.", "A kitten is on the rug.", "Stocks fell sharply today."]
    told = await api.embeddings.create(model="minilm", input=texts)
    async with Client(url, queue="mini") as fleet:
        end = await fleet.run(EmbedRequest(texts=texts))
    assert [one.embedding for one in told.data] == [one.vector.tolist() for one in end.embeddings]
    assert told.usage.prompt_tokens == end.usage.prompt_tokens
    as_numbers = await api.embeddings.create(model="minilm", input=texts[0], encoding_format="float")
    assert as_numbers.data[0].embedding == told.data[0].embedding
    cat, kitten, stocks = (np.array(one.embedding) for one in told.data)
    assert cat @ kitten > 0.5 > cat @ stocks


async def test_errors_by_their_classes(gateway: Gateway, api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embed"):
        await api.embeddings.create(model="smol", input="text")
    with pytest.raises(openai.NotFoundError):
        await api.chat.completions.create(model="gpt-4", messages=ASKED)
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model="smol", prompt="a", max_tokens=32_768)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError) as late:
        await api.completions.create(
            model="smol", prompt="a", max_tokens=2000, extra_headers={"X-Request-Timeout": "0.2"}
        )
    assert late.value.status_code == 504
    async with client_of(gateway, timeout=0.2) as hasty:
        with pytest.raises(openai.APITimeoutError):
            await hasty.completions.create(model="smol", prompt="a", max_tokens=2000)


async def test_models(api: AsyncOpenAI) -> None:
    models = [model async for model in api.models.list()]
    assert {model.model_dump()["queue"] for model in models} == {"smol", "mini"}
    assert (await api.models.retrieve("minilm")).id == "minilm"
