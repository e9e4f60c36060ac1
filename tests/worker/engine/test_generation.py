"""The engine's behaviour around the tokens: ends, deadlines, seeds, choices and scores."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine_driver import Driver
from reference_model import reference
from scripted_runner import ScriptedRunner
from streamfleet_common.errors import DeadlineExceeded, InvalidRequest
from streamfleet_worker.engine.base import Engine, Finished
from streamfleet_worker.engine.models import LoadedModel
from tiny_model import Kind

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]
PROMPT = [40, 50, 60, 70]


def following(follows: dict[int, int]) -> Callable[..., ScriptedRunner]:
    return partial(ScriptedRunner, follows=follows)


def test_it_is_an_engine(llama: LoadedModel, drive: Make) -> None:
    engine: Engine = drive(llama).engine
    assert engine.info.max_seq_len == 512
    assert engine.info.vocab_size == 1024
    assert engine.info.precision == "float32"
    assert engine.info.device.startswith("CPU")


# --- ends -------------------------------------------------------------------------------------


def test_a_text_ends_at_any_of_the_models_end_tokens(llama: LoadedModel, drive: Make) -> None:
    # Ends {5, 9}, and the model says 3, 9, 4.
    driver = drive(replace(llama, eos_token_ids=frozenset({5, 9})), runner=following({70: 3, 3: 9, 9: 4}))
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=20)
    driver.add("last place", prompt_token_ids=PROMPT, max_tokens=2)
    driver.add("too short", prompt_token_ids=PROMPT, max_tokens=1)
    heard = driver.run()
    assert heard["a"].token_ids == [3, 9]
    assert (heard["a"].reason, heard["last place"].reason) == ("eos", "eos")
    assert heard["too short"].reason == "length"
    assert heard["a"].finished.choices[0].last_token_id == 9
    assert heard["a"].finished.usage.completion_tokens == 2


def test_a_request_may_go_on_past_end_tokens(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=following({70: 300, 300: 2, 2: 301, 301: 302}))
    driver.add("all", prompt_token_ids=PROMPT, max_tokens=4, ignore_eos=True)
    driver.add("own", prompt_token_ids=PROMPT, max_tokens=4, ignore_eos=True, stop_token_ids=[301])
    heard = driver.run()
    assert (heard["all"].token_ids, heard["all"].reason) == ([300, 2, 301, 302], "length")
    assert (heard["own"].token_ids, heard["own"].reason) == ([300, 2, 301], "stop")


def test_no_end_comes_before_min_tokens(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=following({70: 2, 0: 300, 300: 2}))
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=9, min_tokens=2)
    # With the end banned, all others are equal: the lowest id wins.
    assert driver.run()["a"].token_ids == [0, 300, 2]


def test_stop_token_ids_of_a_request_are_its_own(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=following({70: 300, 300: 301, 301: 302, 302: 2}))
    driver.add("a", prompt_token_ids=PROMPT, stop_token_ids=[301])
    driver.add("b", prompt_token_ids=PROMPT)
    heard = driver.run()
    assert (heard["a"].token_ids, heard["a"].reason) == ([300, 301], "stop")
    assert heard["a"].text == llama.tokenizer.decode([300])
    assert heard["b"].token_ids == [300, 301, 302, 2]


def test_text_held_back_comes_out_at_the_end(llama: LoadedModel, drive: Make) -> None:
    word = llama.tokenizer.encode("self")
    assert len(word) == 1
    driver = drive(llama, runner=following({70: word[0], word[0]: 2}))
    driver.add("eos", prompt_token_ids=PROMPT, stop=["selfish"])
    driver.add("length", prompt_token_ids=PROMPT, stop=["selfish"], max_tokens=1)
    driver.add("stop", prompt_token_ids=PROMPT, stop=["elf"])
    driver.add("kept", prompt_token_ids=PROMPT, stop=["el"], include_stop=True)
    heard = driver.run()
    assert (heard["eos"].texts, heard["eos"].reason) == (["", "self"], "eos")
    assert (heard["length"].texts, heard["length"].reason) == (["self"], "length")
    assert (heard["stop"].texts, heard["stop"].reason) == (["s"], "stop")
    assert (heard["kept"].texts, heard["kept"].reason) == (["sel"], "stop")


def test_text_held_back_comes_out_when_the_deadline_does(llama: LoadedModel, drive: Make) -> None:
    word = llama.tokenizer.encode("self")[0]
    driver = drive(llama, runner=following({70: word, word: 300}), max_delay_s=0)
    driver.add("a", prompt_token_ids=PROMPT, stop=["selfish"], deadline=driver.clock.now + 1)
    driver.step()
    assert driver.heard["a"].texts == [""]
    driver.clock.now += 1
    driver.step()
    assert (driver.heard["a"].text, driver.heard["a"].reason) == ("self", "expired")


@pytest.mark.parametrize("text", ["😀", "삼겹살", "ď"])
def test_a_character_over_several_tokens_comes_out_whole(text: str, llama: LoadedModel, drive: Make) -> None:
    ids = llama.tokenizer.encode(text)
    assert len(ids) == len(text.encode()), "the tokens are bytes"
    runner = partial(ScriptedRunner, at={len(PROMPT) - 1 + i: token for i, token in enumerate(ids)})
    driver = drive(llama, runner=runner)
    driver.add("whole", prompt_token_ids=PROMPT, max_tokens=len(ids))
    driver.add("cut", prompt_token_ids=PROMPT, max_tokens=len(ids) - 1)
    heard = driver.run()
    assert heard["whole"].token_ids == ids
    assert heard["whole"].text == text
    assert [piece for piece in heard["whole"].texts if piece] == list(text)
    assert heard["cut"].text == text[:-1] + "\ufffd"


def test_half_a_character_at_the_length_limit_becomes_one_mark(llama: LoadedModel, drive: Make) -> None:
    first, second, *_ = llama.tokenizer.encode("😀")
    driver = drive(llama, runner=following({70: first, first: second, second: 2}))
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=2)
    assert driver.run()["a"].texts == ["", "\ufffd"]


# --- deadlines and cancels --------------------------------------------------------------------


def test_deadlines_end_running_and_waiting_requests_before_the_next_pass(
    llama: LoadedModel, drive: Make
) -> None:
    runner = following({70: 300, 300: 301, 301: 300})
    driver = drive(llama, runner=runner, max_batch_size=1, max_delay_s=0)
    driver.add("running", prompt_token_ids=PROMPT, deadline=driver.clock.now + 10)
    driver.add("waiting", prompt_token_ids=PROMPT, deadline=driver.clock.now + 10)
    driver.step()
    driver.step()
    driver.clock.now += 10
    step = driver.step()
    assert step.rows == 0
    running, waiting = driver.heard["running"], driver.heard["waiting"]
    assert running.token_ids == [300, 301]
    assert (running.finished.state, running.reason) == ("expired", "expired")
    assert (waiting.finished.state, waiting.text) == ("expired", "")
    assert waiting.finished.usage.prompt_tokens == 0
    assert isinstance(running.finished.error, DeadlineExceeded)
    assert driver.engine.due_in() is None


def test_a_deadline_ends_all_choices_and_keeps_those_that_were_complete(
    llama: LoadedModel, drive: Make
) -> None:
    driver = drive(llama, max_batch_size=2, max_delay_s=0)
    sampling = {"temperature": 5.0, "seed": 1}
    key = driver.add(
        "a", prompt_token_ids=PROMPT, n=3, max_tokens=4, sampling=sampling, deadline=driver.clock.now + 1
    )
    for _ in range(5):
        driver.step()
    assert driver.engine.room().running == 1
    driver.clock.now += 1
    driver.step()
    end = driver.heard["a"].finished
    assert [choice.finish_reason for choice in end.choices] == ["length", "length", "expired"]
    assert end.state == "expired"
    assert key == ("a", 1)
    assert (driver.engine.room().rows, driver.engine.due_in()) == (2, None)


def test_cancel_frees_the_row_at_once(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_batch_size=2, max_delay_s=0)
    a = driver.add("a", prompt_token_ids=PROMPT, max_tokens=100)
    driver.add("b", prompt_token_ids=PROMPT, max_tokens=4)
    c = driver.add("c", prompt_token_ids=PROMPT, max_tokens=4)
    driver.step()
    driver.engine.cancel([a, c, ("nobody", 1)])
    assert (driver.engine.room().rows, driver.engine.room().running) == (1, 1)
    heard = driver.run()
    assert (heard["a"].end, heard["c"].end) == (None, None)
    assert heard["b"].finished.state == "done"


def test_the_same_key_twice_is_one_request(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=0)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    driver.step()
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    assert len(driver.run()["a"].token_ids) == 3


# --- seeds and choices ------------------------------------------------------------------------


def test_a_seed_gives_the_same_text_alone_and_in_company(llama: LoadedModel, drive: Make) -> None:
    sampling = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 77}
    alone = drive(llama)
    alone.add("a", prompt_token_ids=PROMPT, max_tokens=20, sampling=sampling)
    expected = alone.run()["a"]
    driver = drive(llama, max_batch_size=7)
    for number in range(6):
        other = {"temperature": 1.0, "seed": number}
        ids = [3 + number] * (10 * number + 1)
        driver.add(str(number), prompt_token_ids=ids, max_tokens=20, sampling=other)
    driver.run()
    driver.add("0b", prompt_token_ids=PROMPT, max_tokens=30)
    driver.run()
    driver.add("0c", prompt_token_ids=PROMPT, max_tokens=30)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=20, sampling=sampling)
    heard = driver.run()
    assert heard["a"].token_ids == expected.token_ids
    assert heard["a"].finished.seed == 77
    assert len({tuple(heard[str(n)].token_ids) for n in range(6)}) == 6


def test_a_drawn_seed_is_told_and_gives_the_text_again(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama)
    for name in ("a", "b"):
        driver.add(name, prompt_token_ids=PROMPT, max_tokens=20, sampling={"temperature": 1.0})
    first = driver.run()["a"]
    assert first.token_ids != driver.heard["b"].token_ids
    sampling = {"temperature": 1.0, "seed": first.finished.seed}
    driver.add("again", prompt_token_ids=PROMPT, max_tokens=20, sampling=sampling)
    assert driver.run()["again"].token_ids == first.token_ids


def test_a_second_attempt_draws_as_the_first_did(llama: LoadedModel, drive: Make) -> None:
    answers = []
    for _ in range(2):
        driver = drive(llama)
        driver.add("the same rid", prompt_token_ids=PROMPT, max_tokens=20, n=2, sampling={"temperature": 2.0})
        answers.append([choice.token_ids for choice in driver.run()["the same rid"].choices])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_each_choice_draws_with_a_seed_that_gives_it_again(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_batch_size=3)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=10, n=5, sampling={"temperature": 1.5, "seed": 9})
    choices = driver.run()["a"].choices
    assert choices[0].seed == driver.heard["a"].finished.seed == 9
    assert len({choice.token_ids for choice in choices}) == 5
    for choice in choices:
        sampling = {"temperature": 1.5, "seed": choice.seed}
        name = f"again {choice.index}"
        driver.add(name, prompt_token_ids=PROMPT, max_tokens=10, sampling=sampling)
        assert tuple(driver.run()[name].token_ids) == choice.token_ids


def test_greedy_choices_are_equal_and_name_no_seed(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=6, n=2)
    end = driver.run()["a"].finished
    assert end.choices[0].token_ids == end.choices[1].token_ids
    assert (end.seed, end.choices[0].seed, end.choices[1].seed) == (None, None, None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 12)


# --- scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 2, 33, 300])
def test_logprobs_are_those_of_the_model_alone(kind: Kind, length: int, load: Load, drive: Make) -> None:
    loaded = load(kind)
    ids = [3 + (17 * i) % 1000 for i in range(length)]
    driver = drive(loaded, prefill_chunk=32)
    driver.add(
        "a",
        prompt_token_ids=ids,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        prompt_logprobs=True,
        n=2,
        sampling={"temperature": 0.7, "top_k": 3, "seed": 1},
    )
    driver.add("b", prompt_token_ids=ids, max_tokens=8)
    heard = driver.run()
    prefill = heard["a"].prefill
    assert prefill is not None
    for told in heard["a"].told.values():
        scores = torch.log_softmax(reference(kind).logits([*ids, *told.token_ids]), dim=-1)[:-1]
        whole = torch.tensor([*ids, *told.token_ids])[1:, None]
        expected = scores.gather(1, whole)[:, 0].tolist()
        assert (prefill.logprobs[0], prefill.top_logprobs[0]) == (None, ())
        assert [*prefill.logprobs[1:], *told.logprobs] == pytest.approx(expected, abs=1e-3)
        tops = [*prefill.top_logprobs[1:], *told.top_logprobs]
        best, best_ids = scores.topk(3)
        assert [[token_id for token_id, _ in top] for top in tops] == best_ids.tolist()
        assert [score for top in tops for _, score in top] == pytest.approx(best.flatten().tolist(), abs=1e-3)
    assert prefill.token_ids == tuple(ids)
    assert "".join(prefill.texts) == loaded.tokenizer.decode(ids, skip_special=False)
    assert heard["b"].logprobs == []
    assert heard["b"].prefill is None


def test_a_long_prompt_is_scored_beside_running_streams(llama: LoadedModel, drive: Make) -> None:
    ids = [3 + (29 * i) % 1000 for i in range(400)]
    driver = drive(llama, prefill_chunk=32, max_delay_s=0)
    driver.add("stream", prompt_token_ids=PROMPT, max_tokens=60)
    driver.step()
    driver.add("a", prompt_token_ids=ids, max_tokens=1, prompt_logprobs=True)
    prefill = driver.run()["a"].prefill
    assert prefill is not None
    scores = torch.log_softmax(reference("llama").logits(ids), dim=-1)
    expected = scores[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    assert list(prefill.logprobs[1:]) == pytest.approx(expected, abs=1e-3)
    assert driver.heard["stream"].token_ids == reference("llama").generate(PROMPT, 60)


def test_echo_begins_the_text_with_the_prompts(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=following({70: 300, 300: 2}))
    driver.add("a", prompt_token_ids=PROMPT, echo=True)
    assert driver.run()["a"].text == llama.tokenizer.decode([*PROMPT, 300])
    assert driver.heard["a"].token_ids == [300, 2]


# --- the account ------------------------------------------------------------------------------


def test_steps_and_timings_are_accounted_for(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, runner=following({70: 300, 300: 301, 301: 2}))
    driver.add("a", prompt_token_ids=PROMPT)
    driver.add("b", prompt_token_ids=PROMPT, max_tokens=1)
    driver.clock.now += 0.5
    first = driver.step()
    assert (first.rows, first.prompt_tokens, first.generated_tokens) == (0, 8, 2)
    driver.clock.now += 0.25
    second = driver.step()
    assert (second.rows, second.prompt_tokens, second.generated_tokens) == (1, 0, 1)
    driver.clock.now += 0.25
    driver.step()
    end = driver.heard["a"].finished
    assert end.timing.wait_ms == pytest.approx(500)
    assert end.timing.prefill_ms == 0
    assert end.timing.decode_ms == pytest.approx(500)
    assert end.usage.prompt_tokens == 4


def test_it_fills_a_row_to_the_last_place(gpt2: LoadedModel, drive: Make) -> None:
    # GPT-2 knows 512 positions and no more; padding must not ask for others.
    driver = drive(gpt2, max_batch_size=2)
    driver.add("long", prompt_token_ids=[7] * 509, max_tokens=3, ignore_eos=True)
    driver.add("full", prompt_token_ids=[7] * 511, max_tokens=1)
    driver.add("fit", prompt_token_ids=[7] * 500, max_tokens="fit", ignore_eos=True)
    heard = driver.run()
    assert len(heard["long"].token_ids) == 3
    assert len(heard["fit"].token_ids) == 12
    assert heard["long"].finished.state == heard["full"].finished.state == "done"


@pytest.mark.parametrize("rows", [1, 3])
def test_any_limit_may_be_filled(rows: int, llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_batch_size=rows, max_seq_len=100)
    for number in range(4):
        driver.add(str(number), prompt_token_ids=[7 + number] * 95, max_tokens="fit", ignore_eos=True)
    assert [len(heard.token_ids) for heard in driver.run().values()] == [5] * 4


def test_whatever_the_door_accepts_runs(llama: LoadedModel, drive: Make) -> None:
    # A cache of fewer tokens than one row may have: the limit is what it holds.
    driver = drive(llama, max_batch_size=3, cache_bytes=300 * 512 * 2)
    limit = driver.engine.info.max_seq_len
    assert limit == 256
    driver.add("a", prompt_token_ids=[7] * 20, max_tokens="fit", ignore_eos=True)
    driver.add("b", prompt_token_ids=[8] * (limit - 1), max_tokens=1)
    heard = driver.run()
    assert len(heard["a"].token_ids) == limit - 20
    assert heard["b"].finished.state == "done"
    with pytest.raises(InvalidRequest):
        driver.add("c", prompt_token_ids=[8] * limit, max_tokens=1)


def test_memory_is_told_in_bytes(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=0)
    engine: Any = driver.engine
    before = dict(engine.memory)
    assert before["weights"] == sum(p.numel() for p in llama.model.parameters()) * 4
    assert before["peak"] > before["weights"]
    driver.add("a", prompt_token_ids=[9] * 70, max_tokens=3)
    driver.step()
    # Keys and values, 2 layers, 2 heads, 16 wide, 4 bytes: two blocks of 32 tokens were kept.
    assert engine.memory["prefix_cache"] == 64 * 2 * 2 * 2 * 16 * 4
    assert engine.memory["cache"] > before["cache"]


def test_outputs_of_a_key_end_with_its_finish(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=0)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=1)
    step = driver.step()
    assert isinstance(step.outputs[-1].event, Finished)
    assert driver.engine.room().rows == 8
    driver.engine.close()
