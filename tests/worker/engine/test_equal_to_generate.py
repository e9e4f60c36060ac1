"""The oracle: each of many requests gets the tokens that `model.generate` gives it alone."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_driver import Driver
from streamfleet_worker.engine.models import LoadedModel


def generate_alone(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def mixed_prompts(seed: int, count: int) -> list[tuple[list[int], int]]:
    source = random.Random(seed)
    lengths = [1, 2, 31, 32, 33, 34, 64, 65, 66, *(source.randint(3, 120) for _ in range(count))]
    return [
        ([source.randrange(3, 1024) for _ in range(length)], source.choice([1, 2, 7, 15, 30, 60]))
        for length in lengths[:count]
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_64_mixed_requests_arriving_at_random_steps(
    kind: str, request: pytest.FixtureRequest, drive: Callable[..., Driver]
) -> None:
    loaded: LoadedModel = request.getfixturevalue(kind)
    prompts = mixed_prompts(1, 64)
    expected = [generate_alone(loaded, *prompt) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) > 55, "the model repeats itself: a poor oracle"

    driver = drive(loaded, max_batch_size=11, max_seq_len=256)
    source = random.Random(2)
    todo = list(enumerate(prompts))
    cancelled: set[str] = set()
    keys = {}
    while todo or driver.engine.due_in() is not None:
        for _ in range(min(len(todo), source.choice([0, 0, 0, 1, 2, 5]))):
            number, (ids, max_tokens) = todo.pop(0)
            keys[str(number)] = driver.add(str(number), prompt_token_ids=ids, max_tokens=max_tokens)
            # A second request with the same prompt, to be cancelled somewhere along its way.
            if number % 5 == 0:
                keys[f"x{number}"] = driver.add(f"x{number}", prompt_token_ids=ids, max_tokens=100)
        driver.clock.now += 0.01
        driver.step()
        for name, key in keys.items():
            if name.startswith("x") and name not in cancelled and source.random() < 0.1:
                driver.engine.cancel([key])
                cancelled.add(name)

    answers = {name: heard for name, heard in driver.heard.items() if not name.startswith("x")}
    assert len(answers) == 64
    assert cancelled
    for number, ids in enumerate(expected):
        assert answers[str(number)].token_ids == ids, number
        ended = ids[-1] == 2
        assert answers[str(number)].reason == ("eos" if ended else "length")
    assert driver.engine.room().running == 0
    assert driver.engine.room().rows == 11


def test_stop_strings_end_a_request_early_and_leave_its_tokens_as_they_were(
    llama: LoadedModel, drive: Callable[..., Driver]
) -> None:
    prompts = [(ids, 40) for ids, _ in mixed_prompts(3, 16)]
    alone = [generate_alone(llama, *prompt) for prompt in prompts]
    driver = drive(llama, max_batch_size=5, max_seq_len=256)
    stops = {}
    for number, (ids, max_tokens) in enumerate(prompts):
        text = llama.tokenizer.decode(alone[number])
        stops[number] = text[len(text) // 2 :][:4]
        driver.add(str(number), prompt_token_ids=ids, max_tokens=max_tokens, stop=[stops[number]])
    for name, heard in driver.run().items():
        number = int(name)
        text = llama.tokenizer.decode(alone[number])
        if "\ufffd" in stops[number]:
            continue
        assert heard.token_ids == alone[number][: len(heard.token_ids)]
        assert heard.text == text[: text.index(stops[number])]
        assert heard.reason == "stop"


def test_bfloat16_rows_are_the_same_alone_and_in_company(
    llama: LoadedModel, drive: Callable[..., Driver]
) -> None:
    model: Any = copy.deepcopy(llama.model).to(torch.bfloat16)
    loaded = replace(llama, model=model, dtype=torch.bfloat16)
    prompts = mixed_prompts(4, 24)
    together = drive(loaded, max_batch_size=8, max_seq_len=256)
    for number, (ids, max_tokens) in enumerate(prompts):
        together.add(str(number), prompt_token_ids=ids, max_tokens=max_tokens)
    together.run()
    for number, (ids, max_tokens) in enumerate(prompts):
        alone = drive(loaded, max_batch_size=8, max_seq_len=256)
        alone.add("a", prompt_token_ids=ids, max_tokens=max_tokens)
        assert alone.run()["a"].token_ids == together.heard[str(number)].token_ids, number
