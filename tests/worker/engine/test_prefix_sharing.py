"""Prompts that begin alike are computed once, and nobody can tell by the answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from engine_driver import Driver
from reference_model import reference
from scripted_runner import ScriptedRunner
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.prefix_cache import BLOCK
from tiny_model import Kind

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]

BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
"""Keys and values, 2 layers, 2 heads, 16 wide, 4 bytes."""


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 1024) for _ in range(count)]


HEAD = tokens(100, seed=0)


@pytest.fixture
def make(drive: Make, granule: int) -> Make:
    """Engines that are exact, and remember the passes they ran."""
    return partial(drive, runner=ScriptedRunner, granule=granule, max_delay_s=0)


def computed(driver: Driver) -> int:
    """Prompt tokens that were computed so far, if nobody decoded."""
    engine: Any = driver.engine
    return sum(map(len, engine._runner.passes))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_a_prompt_goes_on_from_the_blocks_of_another(kind: Kind, load: Load, drive: Make) -> None:
    driver = drive(load(kind), max_delay_s=0, prefill_chunk=32)
    tails = {"first": tokens(20, 1), "second": tokens(33, 2), "none": []}
    for name, tail in tails.items():
        driver.add(name, prompt_token_ids=HEAD + tail, max_tokens=12)
        heard = driver.run()[name]
        assert heard.token_ids == reference(kind).generate(HEAD + tail, 12)
        assert heard.finished.usage.cached_tokens == (0 if name == "first" else 96)
        assert heard.finished.usage.prompt_tokens == len(HEAD + tail)


def test_the_last_token_is_always_computed(llama: LoadedModel, make: Make) -> None:
    driver = make(llama)
    for name, length in {"whole": 96, "again": 96, "one more": 97}.items():
        driver.add(name, prompt_token_ids=HEAD[:length], max_tokens=1)
        driver.run()
    cached = [driver.heard[name].finished.usage.cached_tokens for name in ("whole", "again", "one more")]
    # Whole blocks of what is before the last token.
    assert cached == [0, 95 // BLOCK * BLOCK, 96]
    assert driver.heard["again"].token_ids == driver.heard["whole"].token_ids


def test_what_comes_from_the_cache_is_the_same_to_the_bit(llama: LoadedModel, make: Make) -> None:
    fields: dict[str, Any] = {
        "prompt_token_ids": [*HEAD, 9, 8],
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 20,
    }
    alone = make(llama, prefix_cache_bytes=0)
    alone.add("a", **fields)
    alone.run()
    driver = make(llama, prefill_chunk=64)
    driver.add("other", prompt_token_ids=[*HEAD, 5], max_tokens=1)
    driver.run()
    driver.add("a", **fields)
    assert driver.run()["a"].choices == alone.heard["a"].choices
    assert driver.heard["a"].finished.usage.cached_tokens == 96
    assert alone.heard["a"].finished.usage.cached_tokens == 0


def test_choices_share_their_prompt(llama: LoadedModel, make: Make) -> None:
    driver = make(llama, prefill_chunk=64)
    sampling = {"temperature": 1.5, "seed": 4}
    driver.add("a", prompt_token_ids=HEAD, max_tokens=1, n=4, sampling=sampling)
    end = driver.run()["a"].finished
    # Three blocks and four tokens; the three that follow have only these four to compute.
    assert computed(driver) == 100 + 3 * 4
    # The request as a whole found nothing.
    assert end.usage.cached_tokens == 0
    for choice in end.choices:
        alone = make(llama)
        again = {"temperature": 1.5, "seed": choice.seed}
        alone.add("a", prompt_token_ids=HEAD, max_tokens=1, sampling=again)
        assert alone.run()["a"].choices[0].token_ids == choice.token_ids


def test_requests_that_come_together_compute_what_they_share_once(llama: LoadedModel, make: Make) -> None:
    driver = make(llama, max_batch_size=6, prefill_chunk=32)
    for number in range(6):
        driver.add(str(number), prompt_token_ids=[*HEAD, number + 3], max_tokens=1)
    driver.run()
    assert computed(driver) == 101 + 5 * 5
    for number in range(6):
        expected = reference("llama").generate([*HEAD, number + 3], 1)
        assert driver.heard[str(number)].token_ids == expected


def test_a_prompt_that_is_scored_is_computed_in_full(llama: LoadedModel, make: Make) -> None:
    fields: dict[str, Any] = {"prompt_token_ids": [*HEAD, 9], "max_tokens": 3, "prompt_logprobs": True}
    driver = make(llama)
    driver.add("first", **fields)
    driver.run()
    driver.add("second", **fields)
    driver.run()
    first, second = driver.heard["first"], driver.heard["second"]
    assert first.prefill is not None
    assert first.prefill == second.prefill
    assert second.finished.usage.cached_tokens == 0


def test_it_takes_no_more_memory_than_it_may(llama: LoadedModel, make: Make) -> None:
    driver = make(llama, prefix_cache_bytes=5 * BLOCK_BYTES + 1, max_batch_size=3)
    engine: Any = driver.engine
    for number in range(8):
        ids = HEAD[: 40 * (number % 3)] + tokens(90, number)
        driver.add(str(number), prompt_token_ids=ids, max_tokens=4)
        driver.step()
        assert engine.memory["prefix_cache"] <= 5 * BLOCK_BYTES
        driver.run()
        assert driver.heard[str(number)].token_ids == reference("llama").generate(ids, 4)
    assert engine.memory["prefix_cache"] == 5 * BLOCK_BYTES


def test_without_a_cache_nothing_is_shared(llama: LoadedModel, make: Make) -> None:
    driver = make(llama, prefix_cache_bytes=0)
    for name in ("a", "b"):
        driver.add(name, prompt_token_ids=HEAD, max_tokens=1)
    driver.run()
    assert computed(driver) == 200
    assert driver.engine.memory["prefix_cache"] == 0


@pytest.mark.parametrize("end", ["cancel", "deadline", "fault"])
def test_who_leaves_early_lets_go_of_its_blocks(end: str, llama: LoadedModel, drive: Make) -> None:
    driver = drive(
        llama, runner=partial(ScriptedRunner, fatal={999}), max_delay_s=0, prefill_chunk=32, max_batch_size=1
    )
    driver.add("first", prompt_token_ids=[*HEAD, 5], max_tokens=1)
    driver.run()
    tail = [7] * 50 + [999 if end == "fault" else 7]
    key = driver.add("a", prompt_token_ids=HEAD + tail, max_tokens=9, deadline=driver.clock.now + 5)
    waiting = driver.add("b", prompt_token_ids=HEAD + tail[:-1], max_tokens=9)
    driver.step()
    assert driver.engine.room().running == 1
    if end == "cancel":
        driver.engine.cancel([key, waiting])
    elif end == "deadline":
        driver.clock.now += 5
    driver.run()
    prefix = driver.engine._prefix  # type: ignore[attr-defined]
    assert len(prefix) >= 3
    assert not any(block.pins for block in prefix._blocks.values())


def test_steps_tell_what_was_asked_and_what_was_found(llama: LoadedModel, make: Make) -> None:
    driver = make(llama)
    told = []
    for name in ("a", "b"):
        driver.add(name, prompt_token_ids=[*HEAD, 5], max_tokens=1)
        step = driver.step()
        told.append((step.asked_tokens, step.cached_tokens, step.prompt_tokens))
    assert told == [(101, 0, 101), (101, 96, 5)]
