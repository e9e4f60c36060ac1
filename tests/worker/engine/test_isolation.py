"""One request's fault is its own: whoever runs beside it gets the answer it would get without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from engine_driver import Driver
from random_requests import RandomRequests
from reference_model import reference
from scripted_runner import BrokenRunner, ScriptedRunner, poisoned
from streamfleet_common.errors import GenerationFailed, InvalidRequest
from streamfleet_worker.engine import sampler, sequence
from streamfleet_worker.engine.models import LoadedModel

Make = Callable[..., Driver]
Act = Callable[[Driver], object]
PROMPT = [40, 50, 60, 70]
BAD, NAN = 999, 998
"""Tokens that healthy requests have nowhere."""
HEALTHY: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_token_ids": PROMPT, "max_tokens": 12},
    "drawn": {"prompt_token_ids": [*PROMPT, 80], "max_tokens": 12, "sampling": {"temperature": 1, "seed": 3}},
    "long": {"prompt_token_ids": [3 + 5 * i for i in range(90)], "max_tokens": 9, "logprobs": True},
}
# No answer goes over the bad token by itself.
for _fields in HEALTHY.values():
    _fields["sampling"] = {"logit_bias": {BAD: -100}, **_fields.get("sampling", {})}


def add_healthy(driver: Driver) -> None:
    for name, fields in HEALTHY.items():
        driver.add(name, **fields)


@pytest.fixture
def make(drive: Make, granule: int) -> Make:
    """Engines that are exact: what they answer may be compared to the bit."""
    return partial(drive, granule=granule)


@pytest.fixture
def expected(llama: LoadedModel, make: Make) -> dict[str, Any]:
    driver = make(llama)
    add_healthy(driver)
    return {name: heard.choices for name, heard in driver.run().items()}


@pytest.fixture
def assert_unharmed(expected: dict[str, Any]) -> Callable[[Driver], None]:
    def check(driver: Driver) -> None:
        for name, choices in expected.items():
            assert driver.heard[name].finished.state == "done"
            assert driver.heard[name].choices == choices, name
        assert_nothing_is_left(driver)

    return check


def assert_nothing_is_left(driver: Driver) -> None:
    engine: Any = driver.engine
    assert (engine.room().running, engine.room().waiting) == (0, 0)
    assert not engine._answers
    assert not any(arena.slots or arena.decoding for arena in engine._cache.arenas)
    assert engine._scheduler.reserved == 0
    assert not any(block.pins for block in engine._prefix._blocks.values())


def failure(driver: Driver, name: str) -> GenerationFailed:
    end = driver.heard[name].finished
    assert end.state == "failed"
    assert isinstance(end.error, GenerationFailed)
    return end.error


# --- passes that raise ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["prompt", "last token", "answer", "late chunk"])
def test_a_pass_that_raises_fails_the_guilty_row_alone(
    place: str, llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    prompts = {
        "prompt": [BAD, *PROMPT],
        "last token": [*PROMPT, BAD],
        "answer": [*PROMPT, 998],
        "late chunk": [*[7] * 40, BAD, 7],
    }
    runner = partial(ScriptedRunner, follows={998: BAD}, fatal={BAD})
    driver = make(llama, runner=runner, max_batch_size=4, prefill_chunk=32)
    driver.add("bad", prompt_token_ids=prompts[place], max_tokens=12)
    add_healthy(driver)
    driver.run()
    assert "the pass broke" in str(failure(driver, "bad"))
    assert_unharmed(driver)


def test_choices_of_a_guilty_request_leave_with_it(
    llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    driver = make(llama, runner=partial(ScriptedRunner, fatal={BAD}), max_batch_size=6)
    add_healthy(driver)
    driver.add("bad", prompt_token_ids=[*PROMPT, BAD], max_tokens=12, n=8)
    driver.run()
    assert [choice.finish_reason for choice in driver.heard["bad"].choices] == ["error"] * 8
    assert_unharmed(driver)


def test_several_guilty_rows_are_all_found(llama: LoadedModel, make: Make, assert_unharmed: Act) -> None:
    driver = make(llama, runner=partial(ScriptedRunner, fatal={BAD}), max_batch_size=8)
    for number in range(5):
        driver.add(f"bad {number}", prompt_token_ids=[*PROMPT, BAD, number], max_tokens=12)
        if number == 2:
            add_healthy(driver)
    driver.run()
    for number in range(5):
        failure(driver, f"bad {number}")
    assert_unharmed(driver)


def test_a_model_that_fails_on_anything_is_told_to_the_caller(llama: LoadedModel, make: Make) -> None:
    driver = make(llama, runner=BrokenRunner)
    runner = driver.engine._runner  # type: ignore[attr-defined]
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=30)
    driver.clock.now += 1
    driver.step()
    runner.broken = True
    with pytest.raises(GenerationFailed, match="any input") as caught:
        driver.step()
    assert caught.value.retryable


# --- numbers that are none --------------------------------------------------------------------


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("length", [1, 5, 70])
def test_a_row_of_nan_fails_alone(
    length: int, scored: bool, llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    driver = make(poisoned(llama, BAD), max_batch_size=4, prefill_chunk=32)
    driver.add("bad", prompt_token_ids=[BAD, *[7] * (length - 1)], max_tokens=12, n=2, prompt_logprobs=scored)
    add_healthy(driver)
    driver.run()
    error = failure(driver, "bad")
    assert "NaN" in str(error)
    assert not error.retryable
    assert driver.heard["bad"].prefill is None or length == 1
    assert_unharmed(driver)


@pytest.mark.parametrize("end", ["fails", "is cancelled", "expires"])
def test_a_row_that_held_nan_is_clean_for_its_next_owner(
    end: str, llama: LoadedModel, make: Make, expected: dict[str, Any]
) -> None:
    driver = make(
        poisoned(llama, BAD), max_batch_size=1, max_delay_s=0, prefill_chunk=32, prefix_cache_bytes=0
    )
    # Its numbers are seen only when all of its prompt is computed; by now there are more than the next has.
    key = driver.add("bad", prompt_token_ids=[BAD, *[7] * 119], max_tokens=12, deadline=driver.clock.now + 10)
    for _ in range(3):
        driver.step()
    assert driver.heard["bad"].end is None
    if end == "is cancelled":
        driver.engine.cancel([key])
    elif end == "expires":
        driver.clock.now += 10
    driver.add("long", **HEALTHY["long"])
    assert driver.run()["long"].choices == expected["long"]


def test_a_row_of_nan_leaves_nothing_where_it_was_before_others_left(
    llama: LoadedModel, make: Make, expected: dict[str, Any]
) -> None:
    """When a row leaves, another moves into its place, and may be found to be NaN only afterwards."""
    driver = make(poisoned(llama, BAD), max_batch_size=2, max_delay_s=0, prefix_cache_bytes=0)
    prompts = {"leaves": [7] * 100, "bad": [*[7] * 99, BAD]}
    for name, ids in prompts.items():
        driver.add(name, prompt_token_ids=ids, max_tokens=1)
    driver.step()
    assert driver.heard["leaves"].finished.state == "done"
    failure(driver, "bad")
    for number in range(2):
        driver.add(f"{number}", **HEALTHY["long"])
    heard = driver.run()
    assert heard["0"].choices == heard["1"].choices == expected["long"]


def test_nan_does_not_live_on_in_the_prefix_cache(
    llama: LoadedModel, make: Make, expected: dict[str, Any]
) -> None:
    """A fault that passes, of the machine and not of the prompt, does not come back with the prompt."""
    runner = Hiccup(llama)
    driver = make(llama, runner=lambda _, **__: runner, max_delay_s=0, prefill_chunk=32)
    runner.ill = True
    driver.add("ill", **HEALTHY["long"])
    driver.run()
    runner.ill = False
    failure(driver, "ill")
    driver.add("long", **HEALTHY["long"])
    assert driver.run()["long"].choices == expected["long"]


class Hiccup(ScriptedRunner):
    """A device that gives NaN for a while."""

    ill = False

    def run(self, batch: Any) -> torch.Tensor:
        layer = self._body.layers[0]
        hook = layer.register_forward_hook(lambda *_: torch.full_like(_[2], torch.nan)) if self.ill else None
        try:
            return super().run(batch)
        finally:
            if hook is not None:
                hook.remove()


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exhausted",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory."),
        lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError,
    ],
)
def test_passes_that_find_no_memory_become_smaller(
    exhausted: Callable[[], Exception], llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    runner = partial(ScriptedRunner, room=100, exhausted=exhausted)
    driver = make(llama, runner=runner, max_batch_size=8, prefill_chunk=96, max_prefill_tokens=256)
    for number in range(40):
        driver.add(str(number), prompt_token_ids=[3 + number] * 30, max_tokens=1)
    heard = driver.run()
    assert {heard[str(number)].finished.state for number in range(40)} == {"done"}
    passes = list(driver.engine._runner.passes)  # type: ignore[attr-defined]
    # Twice halved, a budget of 256 tokens fits; it grows again so slowly that few more are tried.
    assert 1 < sum(len(one) > 100 for one in passes) < 7
    add_healthy(driver)
    driver.run()
    assert_unharmed(driver)


def test_what_finds_no_memory_alone_fails_alone_and_may_be_tried_elsewhere(
    llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    driver = make(llama, runner=partial(ScriptedRunner, room=100), max_batch_size=8, prefill_chunk=512)
    driver.add("bad", prompt_token_ids=[7] * 120, max_tokens=5)
    add_healthy(driver)
    driver.run()
    assert failure(driver, "bad").retryable
    assert_unharmed(driver)


def test_memory_that_comes_back_lets_a_lonely_row_go_on(llama: LoadedModel, make: Make) -> None:
    """The prefix cache is given up before a request is."""
    driver = make(llama, runner=Crowded, max_batch_size=2)
    driver.add("first", prompt_token_ids=[9] * 70, max_tokens=2)
    driver.run()
    runner = driver.engine._runner  # type: ignore[attr-defined]
    runner.engine = driver.engine
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=12)
    assert driver.run()["a"].token_ids == reference("llama").generate(PROMPT, 12)


class Crowded(ScriptedRunner):
    """No pass has memory while the prefix cache has any."""

    engine: Any = None

    def run(self, batch: Any) -> torch.Tensor:
        if self.engine is not None and self.engine.memory["prefix_cache"]:
            raise torch.OutOfMemoryError
        return super().run(batch)


def test_a_row_for_which_the_cache_has_no_memory_fails_alone(
    llama: LoadedModel, make: Make, assert_unharmed: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(llama, max_batch_size=4)
    cache = driver.engine._cache  # type: ignore[attr-defined]
    take, grow = cache.take, cache.grow

    def no_take(length: int) -> Any:
        if length == 33:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return take(length)

    def no_grow(slot: Any, length: int) -> None:
        if length == 65:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        grow(slot, length)

    monkeypatch.setattr(cache, "take", no_take)
    monkeypatch.setattr(cache, "grow", no_grow)
    driver.add("no row", prompt_token_ids=[7] * 32, max_tokens=5)
    add_healthy(driver)
    driver.add("no wider row", prompt_token_ids=[8] * 60, max_tokens=20, ignore_eos=True)
    driver.run()
    assert failure(driver, "no row").retryable
    assert failure(driver, "no wider row").retryable
    assert len(driver.heard["no wider row"].token_ids) == 5
    assert_unharmed(driver)


# --- what surrounds the pass ------------------------------------------------------------------


class Spoilt:
    """A decoder or matcher that raises at its third token."""

    def __init__(self) -> None:
        self.count = 0

    def push(self, token_id: int) -> str:
        self.count += 1
        if self.count == 3:
            raise ValueError("cannot read this")
        return "x"

    def flush(self) -> str:
        if self.count >= 3:
            raise ValueError("cannot read this")
        return ""


def test_a_decoder_that_raises_fails_its_row_alone(
    llama: LoadedModel, make: Make, assert_unharmed: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(llama, max_batch_size=5)
    decoder = llama.tokenizer.decoder

    def spoilt(context: Any = (), **options: Any) -> Any:
        return Spoilt() if BAD in context else decoder(context, **options)

    monkeypatch.setattr(llama.tokenizer, "decoder", spoilt)
    driver.add("bad", prompt_token_ids=[*PROMPT, BAD], max_tokens=12, n=2)
    add_healthy(driver)
    driver.run()
    assert "cannot read this" in str(failure(driver, "bad"))
    assert driver.heard["bad"].text == "xx"
    assert_unharmed(driver)


def test_texts_of_a_scored_prompt_that_raise_fail_its_request_alone(
    llama: LoadedModel, make: Make, assert_unharmed: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(llama, max_batch_size=5)
    texts = llama.tokenizer.texts

    def spoilt(token_ids: Any) -> Any:
        if BAD in token_ids:
            raise ValueError("cannot read this")
        return texts(token_ids)

    monkeypatch.setattr(llama.tokenizer, "texts", spoilt)
    driver.add("bad", prompt_token_ids=[*PROMPT, BAD], max_tokens=12, prompt_logprobs=True)
    add_healthy(driver)
    driver.run()
    failure(driver, "bad")
    assert_unharmed(driver)


@pytest.mark.parametrize("broken", ["sampler", "choice", "arrival"])
def test_a_row_that_cannot_be_sampled_fails_alone(
    broken: str, llama: LoadedModel, make: Make, assert_unharmed: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(llama, max_batch_size=5)
    if broken == "sampler":
        sample = sampler.sample

        def spoilt(logits: torch.Tensor, rows: Any) -> Any:
            if any(row.seed == 4 and row.count == 2 for row in rows):
                raise ValueError("cannot draw this")
            return sample(logits, rows)

        monkeypatch.setattr(sampler, "sample", spoilt)
    else:
        monkeypatch.setattr(sequence, "Row", SpoiltRow if broken == "choice" else UnbornRow)
    sampling = {"temperature": 1.0, "seed": 4}
    driver.add("bad", prompt_token_ids=PROMPT, max_tokens=12, n=2, sampling=sampling)
    add_healthy(driver)
    driver.run()
    assert "cannot draw this" in str(failure(driver, "bad"))
    assert_unharmed(driver)


def test_who_is_cancelled_at_once_is_not_even_told_of_a_fault(
    llama: LoadedModel, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "Row", UnbornRow)
    driver = make(llama)
    fields: dict[str, Any] = {"prompt_token_ids": PROMPT, "sampling": {"temperature": 1.0, "seed": 4}}
    keys = [driver.add(name, **fields) for name in ("bad", "worse")]
    driver.engine.cancel(keys[:1])
    assert driver.engine.due_in() == 0
    driver.run()
    assert driver.heard["bad"].end is None
    failure(driver, "worse")


class SpoiltRow(sampler.Row):
    """One of several choices goes wrong at its third token."""

    def append(self, token_id: int) -> None:
        if self.sampling.seed == 4 and self.seed != 4 and self.count == 2:
            raise ValueError("cannot draw this")
        super().append(token_id)


class UnbornRow(sampler.Row):
    def __init__(self, prepared: Any, *others: Any) -> None:
        if prepared.sampling.seed == 4:
            raise ValueError("cannot draw this")
        super().__init__(prepared, *others)


# --- requests that are refused, and those that go ----------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": {"logit_bias": {191222: -100}}}, "191222"),
        ({"prompt_token_ids": [191222]}, "191222"),
        ({"stop_token_ids": [191222]}, "191222"),
        ({"max_tokens": 600}, "512"),
    ],
)
def test_an_odd_request_is_refused_at_the_door_alone(
    fields: dict[str, Any], words: str, llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    driver = make(llama, max_batch_size=4)
    add_healthy(driver)
    driver.step()
    with pytest.raises(InvalidRequest, match=words):
        driver.add("odd", **{"prompt_token_ids": PROMPT, **fields})
    driver.run()
    assert_unharmed(driver)


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": " \n "}, {"prompt": "a", "max_tokens": 0}])
def test_nothing_to_do_is_refused_at_the_door(fields: dict[str, Any], gpt2: LoadedModel, make: Make) -> None:
    # A tokenizer without a begin-of-text token makes an empty prompt of no tokens.
    driver = make(gpt2)
    with pytest.raises(ValueError, match=r"empty|max_tokens"):
        driver.add("odd", **fields)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=6)
    assert driver.run()["a"].token_ids == reference("gpt2").generate(PROMPT, 6)


def test_an_id_that_comes_again_while_it_runs_is_the_same_request(
    llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    # The fleet gives an id out once; what comes again is not computed twice, and harms nobody.
    driver = make(llama, max_batch_size=4)
    add_healthy(driver)
    driver.step()
    add_healthy(driver)
    driver.step()
    driver.add("drawn", prompt_token_ids=[1, 2, 3], max_tokens=2)
    driver.run()
    assert_unharmed(driver)


def test_cancelled_rows_leave_at_the_next_step_and_others_take_their_place(
    llama: LoadedModel, make: Make, assert_unharmed: Act
) -> None:
    # 5 of 8 are cancelled, some before they run, some on the way; ten more then succeed.
    driver = make(llama, max_batch_size=4, max_delay_s=10)
    keys = [driver.add(str(i), prompt_token_ids=[3 + i] * (5 + 30 * i), max_tokens=50) for i in range(8)]
    driver.engine.cancel(keys[:2])
    for _ in range(4):
        driver.clock.now += 10
        driver.step()
    driver.engine.cancel([keys[2], keys[6], keys[7]])
    assert driver.step().rows == 3
    add_healthy(driver)
    for number in range(10, 20):
        driver.add(str(number), prompt_token_ids=[number] * 9, max_tokens=6)
    heard = driver.run()
    assert [heard[str(i)].end is None for i in range(8)] == [i in (0, 1, 2, 6, 7) for i in range(8)]
    assert all(heard[str(number)].finished.state == "done" for number in range(10, 20))
    assert_unharmed(driver)


# --- all at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_faults_leaves_the_healthy_as_they_were(seed: int, llama: LoadedModel, make: Make) -> None:
    """Rows of NaN, passes that raise, memory that runs out, cancels and deadlines, at random and together."""
    source = random.Random(seed)
    requests = RandomRequests(seed, vocab_size=990)(24)
    fates = [source.choice(["healthy"] * 5 + ["nan", "fatal", "cancelled", "expired"]) for _ in requests]
    for fields, fate in zip(requests, fates, strict=True):
        fields["sampling"] = {**fields["sampling"], "logit_bias": {NAN: -100, BAD: -100}}
        if fate in ("nan", "fatal"):
            ids = fields["prompt_token_ids"]
            fields.pop("truncate", None)
            fields["prompt_token_ids"] = [*ids[:7], NAN if fate == "nan" else BAD, *ids[7:]]
    loaded = poisoned(llama, NAN)
    runner = partial(ScriptedRunner, fatal={BAD}, room=source.choice([None, 66]))
    settings = {
        "max_batch_size": source.choice([2, 5]),
        "prefix_cache_bytes": source.choice([30_000, 1 << 28]),
    }
    driver = make(loaded, runner=runner, prefill_chunk=32, max_seq_len=256, **settings)
    todo, doomed = list(range(len(requests))), list[Any]()
    while todo or driver.engine.due_in() is not None:
        for _ in range(min(len(todo), source.choice([0, 1, 3]))):
            number = todo.pop(0)
            life = source.uniform(0.01, 0.1) if fates[number] == "expired" else 1e9
            key = driver.add(str(number), deadline=driver.clock.now + life, **requests[number])
            if fates[number] == "cancelled":
                doomed.append(key)
        driver.clock.now += 0.01
        driver.step()
        if doomed and source.random() < 0.3:
            driver.engine.cancel([doomed.pop()])
    for number, fate in enumerate(fates):
        heard = driver.heard[str(number)]
        if fate in ("nan", "fatal"):
            failure(driver, str(number))
        elif fate == "healthy":
            alone = make(loaded, max_seq_len=256)
            alone.add(str(number), **requests[number])
            assert heard.choices == alone.run()[str(number)].choices, number
    assert_nothing_is_left(driver)
