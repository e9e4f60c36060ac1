"""What requests cost each other: steps of waiting, counted, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from engine_driver import Driver
from reference_model import reference
from scripted_runner import ScriptedRunner
from streamfleet_worker.engine.models import LoadedModel

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]
CHUNK = 512
PROMPT = [40, 50, 60, 70]


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 1024) for _ in range(count)]


class Watch:
    """At which step each request got which token."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.steps = 0
        self.at: dict[str, list[int]] = {}
        self.prompt_tokens: list[int] = []

    def step(self) -> None:
        counts = {name: len(heard.token_ids) for name, heard in self.driver.heard.items()}
        self.driver.clock.now += 0.001
        step = self.driver.step()
        self.steps += 1
        self.prompt_tokens.append(step.prompt_tokens)
        for name, heard in self.driver.heard.items():
            if len(heard.token_ids) > counts[name]:
                self.at.setdefault(name, []).append(self.steps)

    def longest_gap(self, name: str) -> int:
        at = self.at[name]
        return max(later - earlier for earlier, later in pairwise(at))


def test_a_prompt_of_4000_tokens_holds_up_no_stream_for_a_step(load: Load, drive: Make) -> None:
    # 8 streams run, and then 50 short requests come, too.
    driver = drive(load("long"), max_batch_size=16, max_seq_len=4608, prefill_chunk=CHUNK, max_delay_s=0)
    watch = Watch(driver)
    for number in range(8):
        driver.add(f"stream {number}", prompt_token_ids=tokens(9, number), max_tokens=60, ignore_eos=True)
    for _ in range(20):
        watch.step()
    long = tokens(4000, 99)
    driver.add("long", prompt_token_ids=long, max_tokens=3)
    joined = watch.steps
    for _ in range(2):
        watch.step()
    for number in range(50):
        driver.add(f"short {number}", prompt_token_ids=tokens(20, 100 + number), max_tokens=2)
    while driver.engine.due_in() is not None:
        watch.step()
    # Every step gives each stream its token, and computes one chunk beside them at most.
    for number in range(8):
        assert watch.longest_gap(f"stream {number}") == 1
        assert len(watch.at[f"stream {number}"]) == 60
    assert max(watch.prompt_tokens[20:60]) <= CHUNK
    # The long one waits for admission (16 steps at most, or three others), and is computed in at least every
    # second step.
    assert watch.at["long"][0] - joined <= 16 + 2 * -(-4000 // CHUNK)
    # Seven rows are free beside it, and the short ones have them for a few steps each, in their order.
    first = [watch.at[f"short {number}"][0] for number in range(50)]
    assert first == sorted(first)
    assert first[0] - joined <= 2 + 4
    assert first[-1] - joined <= 4 + -(-50 // 7) * 4
    expected = reference("long")
    assert driver.heard["long"].token_ids == expected.generate(long, 3)
    assert driver.heard["short 30"].token_ids == expected.generate(tokens(20, 130), 2)
    assert driver.heard["stream 5"].token_ids[:20] == expected.generate(tokens(9, 5), 20)


def test_newcomers_join_though_rows_run_and_few_are_free(llama: LoadedModel, drive: Make) -> None:
    """None waits past the 16th step while a row is free."""
    driver = drive(llama, max_batch_size=8, max_delay_s=0)
    watch = Watch(driver)
    for number in range(6):
        driver.add(f"stream {number}", prompt_token_ids=tokens(9, number), max_tokens=80, ignore_eos=True)
    watch.step()
    driver.add("late", prompt_token_ids=PROMPT, max_tokens=2)
    while "late" not in watch.at:
        watch.step()
    assert watch.at["late"][0] <= 1 + 17


def test_a_penalty_sees_the_tokens_of_its_own_row_only(llama: LoadedModel, drive: Make) -> None:
    # A short row without a penalty, a long one with; and padding is nobody's token.
    long = tokens(130, 5)
    rows: dict[str, dict[str, Any]] = {
        "short": {"prompt_token_ids": PROMPT, "max_tokens": 30},
        "frequency": {"prompt_token_ids": long, "sampling": {"frequency_penalty": 1.05}, "max_tokens": 30},
        "presence": {"prompt_token_ids": PROMPT, "sampling": {"presence_penalty": 1.0}, "max_tokens": 30},
        "repetition": {"prompt_token_ids": long, "sampling": {"repetition_penalty": 1.3}, "max_tokens": 30},
    }
    together = drive(llama, granule=8, prefill_chunk=32)
    for name, fields in rows.items():
        together.add(name, **fields)
    together.run()
    for name, fields in rows.items():
        alone = drive(llama, granule=8)
        alone.add(name, **fields)
        assert together.heard[name].token_ids == alone.run()[name].token_ids
    model = reference("llama")
    assert together.heard["short"].token_ids == model.generate(PROMPT, 30)
    assert together.heard["repetition"].token_ids == model.generate(long, 30, repetition_penalty=1.3)
    # Over so few tokens each comes once, where the model repeats itself without a penalty.
    once = together.heard["presence"].token_ids
    assert once == by_hand(PROMPT, 30, presence=1.0)
    assert together.heard["frequency"].token_ids == by_hand(long, 30, frequency=1.05)
    assert once != model.generate(PROMPT, 30)


def by_hand(prompt: list[int], count: int, *, presence: float = 0.0, frequency: float = 0.0) -> list[int]:
    """The likeliest token each time, after what OpenAI's API takes from those that the answer holds."""
    answer: list[int] = []
    while len(answer) < count and 2 not in answer:
        logits = reference("llama").logits([*prompt, *answer])[-1].clone()
        for token_id in set(answer):
            logits[token_id] -= presence + frequency * answer.count(token_id)
        answer.append(int(logits.argmax()))
    return answer


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_passes_have_no_more_tokens_than_their_rows_and_a_chunk(
    rows: int, llama: LoadedModel, drive: Make
) -> None:
    driver = drive(llama, runner=ScriptedRunner, max_batch_size=rows, prefill_chunk=32, max_prefill_tokens=96)
    for number in range(20):
        driver.add(str(number), prompt_token_ids=tokens(1 + 9 * number, number), max_tokens=6)
    driver.run()
    sizes = [len(one) for one in driver.engine._runner.passes]  # type: ignore[attr-defined]
    # Only while nothing decodes a pass has room for several chunks.
    assert max(sizes) <= max(96, rows + 32)
    assert all(heard.finished.state == "done" for heard in driver.heard.values())


def test_equal_requests_run_in_one_pass(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=ScriptedRunner, max_batch_size=8)
    for number in range(8):
        driver.add(str(number), prompt_token_ids=tokens(5, number), max_tokens=10, ignore_eos=True)
    driver.run()
    passes = driver.engine._runner.passes  # type: ignore[attr-defined]
    assert [len(one) for one in passes] == [40, *[8] * 9]
