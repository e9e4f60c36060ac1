"""From a client through Redis to a model and back: right tokens, right text, shared work."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamfleet_producer import ChatMessage, Client, GenerateRequest, Sampling
from tiny_model import tiny_model


def prompts(count: int) -> list[tuple[list[int], int]]:
    """Random token ids of mixed lengths, each with the number of tokens to generate."""
    source = random.Random(7)
    return [
        ([source.randrange(3, 1024) for _ in range(source.randint(1, 90))], source.choice([1, 5, 20, 40]))
        for _ in range(count)
    ]


async def test_two_workers_share_64_prompts_and_each_gets_what_generate_gives_alone(fleet: Client) -> None:
    work = prompts(64)
    answers = await fleet.run_many(
        [GenerateRequest(prompt_token_ids=ids, max_tokens=count) for ids, count in work], timeout=60
    )

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    torch.set_num_threads(1)
    for (ids, count), answer in zip(work, answers, strict=True):
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            alone = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        assert list(answer.token_ids) == alone[0, len(ids) :].tolist()
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(answer.token_ids)
        assert answer.attempt == 1
        assert answer.queued_at_ms <= answer.started_at_ms <= answer.ended_at_ms
    taken = Counter(answer.worker for answer in answers)
    assert len(taken) == 2
    assert min(taken.values()) >= 8, taken


async def test_streams_run_side_by_side_and_their_deltas_make_the_text(fleet: Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())

    async def read(number: int) -> list[int]:
        request = GenerateRequest(prompt=f"def number_{number}(self):", max_tokens=24, logprobs=True)
        async with fleet.stream(request) as tokens:
            texts: list[str] = []
            ids: list[int] = []
            logprobs: list[float | None] = []
            async for delta in tokens:
                texts.append(delta.text)
                ids += delta.token_ids
                logprobs += delta.logprobs
        end = tokens.result
        assert "".join(texts) == end.text
        assert tuple(ids) == end.token_ids
        assert len(logprobs) == len(ids)
        assert end.text == tokenizer.decode(ids, skip_special_tokens=True)
        return ids

    alone = await read(3)
    together = await asyncio.gather(*(read(number) for number in range(12)))
    assert together[3] == alone


async def test_a_seed_gives_the_same_draw_alone_and_in_company(fleet: Client) -> None:
    request = GenerateRequest(prompt="import", max_tokens=20, sampling=Sampling(temperature=1.0, seed=11))
    other = GenerateRequest(prompt="import", max_tokens=20, sampling=Sampling(temperature=1.0))
    alone = await fleet.run(request)
    again, *others = await fleet.run_many([request, *[other] * 15])
    assert again.token_ids == alone.token_ids
    assert again.seed == 11
    assert len({answer.seed for answer in others}) == 15
    assert len({answer.token_ids for answer in others}) > 10
    # The seed that the worker chose reproduces the answer.
    one = others[0]
    repeated = await fleet.run(
        other.model_copy(update={"sampling": Sampling(temperature=1.0, seed=one.seed)})
    )
    assert repeated.token_ids == one.token_ids


async def test_chat_is_rendered_with_the_models_template(fleet: Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = await fleet.run(
        GenerateRequest(
            messages=[ChatMessage.model_validate(message) for message in messages],
            max_tokens=2,
            prompt_logprobs=True,
        )
    )
    assert answer.prefill is not None
    assert list(answer.prefill.token_ids) == expected
    assert answer.prefill.logprobs[0] is None
    assert all(value is not None and value <= 0 for value in answer.prefill.logprobs[1:])
