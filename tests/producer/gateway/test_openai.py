"""Answers of OpenAI's routes as the `openai` client reads them, from workers that do as they are told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway_process import Gateway
from hand_worker import HandWorker
from hired import Hired
from streamfleet_common.one_shot import Embedding
from streamfleet_common.schemas import Usage
from streamfleet_producer import ChatMessage, Client, GenerateRequest, Sampling
from streamfleet_producer.gateway.openai_embeddings import encoded

USER = {"role": "user", "content": "ECHO 3"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


async def test_a_completion_is_what_the_client_gets(redis_url: str, hired: Hired, api: AsyncOpenAI) -> None:
    told = await api.completions.create(model="scripted", prompt="ECHO 3", temperature=0)
    async with Client(redis_url, queue="q") as fleet:
        end = await fleet.run(GenerateRequest(prompt="ECHO 3", max_tokens=16))
    assert [choice.text for choice in told.choices] == [end.text] == ["tok0 tok1 tok2"]
    assert (told.choices[0].finish_reason, told.model, told.system_fingerprint) == ("stop", "scripted", "0")
    assert told.usage is not None
    assert told.usage.prompt_tokens == end.usage.prompt_tokens == 2
    assert told.usage.completion_tokens == end.usage.completion_tokens == 3
    assert told.id.startswith("cmpl-q:00")


async def test_what_is_asked_reaches_the_worker(redis_url: str, hand: HandWorker, api: AsyncOpenAI) -> None:
    asking = asyncio.create_task(
        api.chat.completions.create(
            model="q",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            max_completion_tokens=5,
            seed=7,
            stop=["a"],
            timeout=30,
            extra_body={"top_k": 4},
            extra_headers={"X-Lane": "high"},
        )
    )
    (work,) = await hand.take()
    assert work.envelope.request == GenerateRequest(
        messages=[ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")],
        max_tokens=5,
        sampling=Sampling(temperature=1.0, seed=7, top_k=4),
        stop=["a"],
    )
    assert (work.envelope.lane, work.envelope.stream, work.envelope.deadline_ms) == ("high", False, 600_000)
    await hand.finish(work, "Hello", usage=Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=8))
    answer = await asking
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.id == f"chatcmpl-q:{work.rid}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (14, 8)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_several_prompts_streamed_and_not(hired: Hired, api: AsyncOpenAI, logprobs: int | None) -> None:
    asked: Any = {
        "model": "q",
        "prompt": ["ECHO 3 AS a", "ECHO 2 AS b", "ECHO 5 AS c"],
        "n": 2,
        "max_tokens": 4,
        "logprobs": logprobs,
    }
    whole = await api.completions.create(**asked)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in whole.choices] == [
        (0, "a0#0 a1#0 a2#0", "stop"),
        (1, "a0#1 a1#1 a2#1", "stop"),
        (2, "b0#0 b1#0", "stop"),
        (3, "b0#1 b1#1", "stop"),
        (4, "c0#0 c1#0 c2#0 c3#0", "length"),
        (5, "c0#1 c1#1 c2#1 c3#1", "length"),
    ]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (12, 2 * (3 + 2 + 4))
    texts, tokens, usage = [""] * 6, [list[str]() for _ in range(6)], None
    stream = await api.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage
    if logprobs is not None:
        told = [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]
        assert tokens == told
        assert ["".join(one or []) for one in told] == texts


async def test_a_chat_streamed_and_not(hired: Hired, api: AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 1}
    whole = await api.chat.completions.create(**asked)
    assert [choice.message.content for choice in whole.choices] == [
        "tok0#0 tok1#0 tok2#0",
        "tok0#1 tok1#1 tok2#1",
    ]
    texts, tokens, roles, reasons = ["", ""], [list[str](), list[str]()], list[str](), list[str]()
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.delta.role:
                assert not texts[choice.index]  # it comes first
                roles.append(choice.delta.role)
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                tokens[choice.index] += [one.token for one in choice.logprobs.content or []]
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert texts == [choice.message.content for choice in whole.choices]
    assert (roles, reasons) == (["assistant"] * 2, ["stop"] * 2)
    for choice in whole.choices:
        assert choice.logprobs is not None
        told = choice.logprobs.content or []
        assert [one.token for one in told] == tokens[choice.index]
        # What the scripted engine says of its tokens: it has no others.
        assert [one.logprob for one in told] == [-0.125, -0.25, -0.375]
        assert [[top.token for top in one.top_logprobs] for one in told] == [[one.token] for one in told]


async def test_the_sync_client(hired: Hired, gateway: Gateway) -> None:
    def ask() -> tuple[str, str]:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as api:
            whole = api.chat.completions.create(model="q", messages=[{"role": "user", "content": "ECHO 2"}])
            stream = api.completions.create(model="q", prompt="ECHO 2", stream=True)
            return whole.choices[0].message.content or "", "".join(one.choices[0].text for one in stream)

    assert await asyncio.to_thread(ask) == ("tok0 tok1", "tok0 tok1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool(hired: Hired, api: AsyncOpenAI, stream: bool) -> None:
    asked: Any = {"model": "q", "messages": [{"role": "user", "content": f"Well. {CALL}"}], "tools": TOOLS}
    whole = await api.chat.completions.create(**asked)
    message = whole.choices[0].message
    if stream:
        async with api.chat.completions.stream(**asked) as events:
            final = await events.get_final_completion()
        told = final.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in told.tool_calls or ()]
        assert (told.content, final.choices[0].finish_reason) == ("Well.", "tool_calls")
    else:
        calls = [
            (call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
        assert (message.content, whole.choices[0].finish_reason) == ("Well.", "tool_calls")
    ((name, arguments),) = calls
    assert (name, json.loads(arguments)) == ("weather", {"city": "Rome"})


async def test_vectors_of_a_list_that_takes_several_requests(
    redis_url: str, gateway: Gateway, api: AsyncOpenAI
) -> None:
    def answer(request: Any) -> dict[str, Any]:
        vectors = [
            Embedding(data=bytes.fromhex("0000803f") * len(text))
            for text in request.texts  # 1.0, len times
        ]
        return {"embeddings": vectors, "usage": Usage(prompt_tokens=len(request.texts))}

    texts = ["x" * (1 + place % 7) for place in range(1500)]
    async with HandWorker(redis_url) as hand:
        await hand.announce(model="sentences/mini", tasks=("embed",))
        async with hand.serving(answer) as asked:
            told = await api.embeddings.create(model="sentences/mini", input=texts)
            assert [one.embedding for one in told.data] == [[1.0] * len(text) for text in texts]
            assert [one.index for one in told.data] == list(range(1500))
            assert told.usage.prompt_tokens == told.usage.total_tokens == 1500
            assert len(asked) > 1
            plain = await api.embeddings.create(model="q", input="xy", encoding_format="float", dimensions=2)
            assert plain.data[0].embedding == [1.0, 1.0]
            assert asked[-1].dimensions == 2
            with pytest.raises(openai.BadRequestError, match="token ids"):
                await api.embeddings.create(model="q", input=[1, 2])


async def test_models_by_their_names_and_by_their_queues(
    redis_url: str, hired: Hired, api: AsyncOpenAI
) -> None:
    async with HandWorker(redis_url, queue="other") as hand:
        await hand.announce(model="org/some-model", tasks=("embed",), max_seq_len=77)
        models = {model.id: model async for model in api.models.list()}
        assert set(models) == {"scripted", "org/some-model"}
        told = (await api.models.retrieve("org/some-model")).model_dump()
        assert (told["queue"], told["tasks"], told["max_model_len"]) == ("other", ["embed"], 77)
        assert (told["object"], told["owned_by"], told["created"]) == ("model", "streamfleet", 0)
        by_queue = (await api.models.retrieve("q")).model_dump()
        assert (by_queue["id"], by_queue["model"], by_queue["workers"]) == ("q", "scripted", 1)
        with pytest.raises(openai.NotFoundError) as caught:
            await api.models.retrieve("org/none")
        assert "org/some-model" in str(caught.value)


async def test_others_go_on_while_many_vectors_are_put_into_words() -> None:
    data = [{"object": "embedding", "index": place, "embedding": [0.5, place]} for place in range(650)]
    answer = {"object": "list", "data": data, "model": '"data":[]', "usage": {"total_tokens": 1}}
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert json.loads(await encoded(answer)) == answer
    beside.cancel()
    assert turns >= 10
