"""OpenAI's client, a gateway and a real engine: the values are those that the fleet's own client gets."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from gateway_process import Gateway
from openai_client import client_of
from streamfleet_producer import ChatMessage, Client, GenerateRequest, Guide, Sampling
from tiny_model import tiny_model

QUEUE = "tiny"
PROMPT = "def number(self):"


@pytest.fixture
async def api(fleet_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with Gateway(fleet_url, tokenizers={QUEUE: tiny_model()}) as gateway, client_of(gateway) as api:
        yield api


async def test_tokens_and_their_log_probabilities(fleet: Client, api: AsyncOpenAI) -> None:
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=8, logprobs=True, top_logprobs=3))
    told = await api.completions.create(model=QUEUE, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    (choice,) = told.choices
    assert choice.text == end.text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == list(end.choices[0].logprobs)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    for told_top, top in zip(choice.logprobs.top_logprobs or (), end.choices[0].top_logprobs, strict=True):
        # Several tokens of a random vocabulary may have the same text: half a character.
        assert {tokenizer.decode([token_id]) for token_id, _ in top} == set(told_top)
        assert set(told_top.values()) <= {logprob for _, logprob in top}


async def test_an_echo_with_the_prompt_s_log_probabilities(fleet: Client, api: AsyncOpenAI) -> None:
    request = GenerateRequest(
        prompt=PROMPT, max_tokens=4, logprobs=True, top_logprobs=1, prompt_logprobs=True
    )
    end = await fleet.run(request)
    assert end.prefill is not None
    asked: Any = {
        "model": QUEUE,
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    told = (await api.completions.create(**asked)).choices[0]
    assert told.text == PROMPT + end.text
    assert told.logprobs is not None
    assert told.logprobs.token_logprobs == [*end.prefill.logprobs, *end.choices[0].logprobs]
    tokens = told.logprobs.tokens or []
    assert tokens[: len(end.prefill.texts)] == list(end.prefill.texts)
    for offset, token in zip(told.logprobs.text_offset or (), tokens, strict=True):
        assert told.text.startswith(token, offset) or "\ufffd" in token
    streamed = ""
    async for chunk in await api.completions.create(**asked, stream=True):
        streamed += chunk.choices[0].text
    assert streamed == told.text


async def test_a_chat_is_rendered_by_the_model_s_template(fleet: Client, api: AsyncOpenAI) -> None:
    turns: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    messages = [ChatMessage(**turn) for turn in turns]
    end = await fleet.run(GenerateRequest(messages=messages, max_tokens=9))
    asked: Any = {"model": QUEUE, "messages": turns, "temperature": 0, "max_tokens": 9}
    told = await api.chat.completions.create(**asked)
    assert told.choices[0].message.content == end.text
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (
        end.usage.prompt_tokens,
        end.usage.completion_tokens,
    )
    streamed = ""
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == end.text


async def test_a_seed_draws_what_it_draws_for_the_fleet_s_client(fleet: Client, api: AsyncOpenAI) -> None:
    # Nothing is said of the temperature: OpenAI's is 1.
    request = GenerateRequest(prompt=PROMPT, max_tokens=12, n=3, sampling=Sampling(temperature=1.0, seed=5))
    end = await fleet.run(request)
    told = await api.completions.create(model=QUEUE, prompt=PROMPT, max_tokens=12, n=3, seed=5)
    texts = [choice.text for choice in told.choices]
    assert texts == [choice.text for choice in end.choices]
    assert len(set(texts)) > 1


async def test_the_best_of_some_have_the_highest_mean_log_probability(
    fleet: Client, api: AsyncOpenAI
) -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=6, n=6, logprobs=True, sampling=sampling))
    means = {
        choice.text: math.fsum(lp for lp in choice.logprobs if lp is not None) / len(choice.token_ids)
        for choice in end.choices
    }
    told = await api.completions.create(model=QUEUE, prompt=PROMPT, max_tokens=6, n=2, best_of=6, seed=5)
    assert [choice.text for choice in told.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert told.usage is not None
    assert told.usage.completion_tokens == end.usage.completion_tokens


async def test_an_answer_of_a_form(fleet: Client, api: AsyncOpenAI) -> None:
    words = ["maybe", "never"]
    end = await fleet.run(GenerateRequest(prompt=PROMPT, max_tokens=20, guide=Guide(choice=words)))
    told = await api.completions.create(
        model=QUEUE, prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"guided_choice": words}
    )
    assert told.choices[0].text == end.text
    assert end.text in words


async def test_what_this_model_does_not_do(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embed"):
        await api.embeddings.create(model=QUEUE, input="text")
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model=QUEUE, prompt="word " * 400)
    assert caught.value.code == "context_length_exceeded"
