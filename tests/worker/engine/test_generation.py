"""The engine's behaviour around the tokens: ends, faults, deadlines, seeds and scores."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_driver import Driver
from streamfleet_common.errors import DeadlineExceeded, GenerationFailed, ModelLoadFailed
from streamfleet_worker.engine.base import Engine, Finished
from streamfleet_worker.engine.models import LoadedModel

Make = Callable[..., Driver]
PROMPT = [40, 50, 60, 70]


class Script(torch.nn.Module):
    """A model's forward with the logits replaced: after `after` must come the token the script says.

    The script maps a token to the one that follows it, so each row has a story of its own, wherever it
    runs. A token in `nan` makes its row's logits NaN, one in `fatal` makes the whole pass raise.
    """

    def __init__(self, model: Any, follows: dict[int, int], nan: set[int], fatal: set[int]) -> None:
        super().__init__()
        self.inner = model
        self.base_model = model.base_model
        self.follows, self.nan, self.fatal = follows, nan, fatal

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if self.fatal & set(input_ids.flatten().tolist()):
            raise RuntimeError("the pass broke")
        output = self.inner(input_ids=input_ids, **inputs)
        for row, ids in enumerate(input_ids[:, -1].tolist()):
            if ids in self.follows:
                output.logits[row] = 0.0
                output.logits[row, :, self.follows[ids]] = 9.0
            if ids in self.nan:
                output.logits[row] = torch.nan
        return output


def scripted(
    loaded: LoadedModel,
    follows: dict[int, int],
    *,
    eos: set[int] | None = None,
    nan: set[int] | None = None,
    fatal: set[int] | None = None,
) -> LoadedModel:
    model = Script(copy.deepcopy(loaded.model), follows, nan or set(), fatal or set())
    eos_token_ids = loaded.eos_token_ids if eos is None else frozenset(eos)
    return replace(loaded, model=model, eos_token_ids=eos_token_ids)


def test_it_is_an_engine(llama: LoadedModel, drive: Make) -> None:
    engine: Engine = drive(llama).engine
    assert engine.info.max_seq_len == 512
    assert engine.info.vocab_size == 1024
    assert engine.info.precision == "float32"
    assert engine.info.device.startswith("CPU")


def test_every_end_of_text_token_counts(llama: LoadedModel, drive: Make) -> None:
    loaded = scripted(llama, {70: 300, 300: 9, 9: 400}, eos={5, 9})
    driver = drive(loaded)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=20)
    driver.add("last place", prompt_token_ids=PROMPT, max_tokens=2)
    driver.add("too short", prompt_token_ids=PROMPT, max_tokens=1)
    heard = driver.run()
    assert heard["a"].token_ids == [300, 9]
    assert (heard["a"].reason, heard["last place"].reason) == ("eos", "eos")
    assert heard["too short"].reason == "length"
    assert heard["a"].finished.choices[0].last_token_id == 9
    assert heard["a"].finished.usage.completion_tokens == 2


def test_stop_token_ids_of_a_request_are_its_own(llama: LoadedModel, drive: Make) -> None:
    loaded = scripted(llama, {70: 300, 300: 301, 301: 302, 302: 2})
    driver = drive(loaded)
    driver.add("a", prompt_token_ids=PROMPT, stop_token_ids=[301])
    driver.add("b", prompt_token_ids=PROMPT)
    heard = driver.run()
    assert (heard["a"].token_ids, heard["a"].reason) == ([300, 301], "stop")
    assert heard["a"].text == llama.tokenizer.decode([300])
    assert heard["b"].token_ids == [300, 301, 302, 2]


def test_text_held_back_comes_out_at_the_end(llama: LoadedModel, drive: Make) -> None:
    word = llama.tokenizer.encode("self")
    assert len(word) == 1
    loaded = scripted(llama, {70: word[0], word[0]: 2})
    driver = drive(loaded)
    driver.add("eos", prompt_token_ids=PROMPT, stop=["selfish"])
    driver.add("length", prompt_token_ids=PROMPT, stop=["selfish"], max_tokens=1)
    driver.add("stop", prompt_token_ids=PROMPT, stop=["elf"])
    driver.add("kept", prompt_token_ids=PROMPT, stop=["el"], include_stop=True)
    heard = driver.run()
    assert (heard["eos"].texts, heard["eos"].reason) == (["", "self"], "eos")
    assert (heard["length"].texts, heard["length"].reason) == (["self"], "length")
    assert (heard["stop"].texts, heard["stop"].reason) == (["s"], "stop")
    assert (heard["kept"].texts, heard["kept"].reason) == (["sel"], "stop")


def test_half_a_character_at_the_length_limit_becomes_one_mark(llama: LoadedModel, drive: Make) -> None:
    first, second, *_ = llama.tokenizer.encode("😀")
    loaded = scripted(llama, {70: first, first: second, second: 2})
    driver = drive(loaded)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=2)
    assert driver.run()["a"].texts == ["", "\ufffd"]


def test_a_nan_fails_its_row_alone_and_leaves_no_trace(llama: LoadedModel, drive: Make) -> None:
    loaded = scripted(llama, {}, nan={999})
    driver = drive(loaded, max_batch_size=3)
    for name, ids in {"a": PROMPT, "bad": [*PROMPT, 999], "c": PROMPT}.items():
        driver.add(name, prompt_token_ids=ids, max_tokens=12)
    # Spoils the cache of the bad row too, as a true NaN would.
    driver.step()
    assert driver.heard["bad"].finished.state == "failed"
    error = driver.heard["bad"].finished.error
    assert isinstance(error, GenerationFailed)
    assert not error.retryable
    driver.add("next", prompt_token_ids=PROMPT, max_tokens=12)
    heard = driver.run()
    assert heard["a"].token_ids == heard["c"].token_ids == heard["next"].token_ids
    assert heard["a"].finished.state == "done"


def test_a_prompt_whose_scores_are_nan_fails_alone(llama: LoadedModel, drive: Make) -> None:
    driver = drive(scripted(llama, {}, nan={999}), max_batch_size=2)
    driver.add("bad", prompt_token_ids=[*PROMPT, 999, 41], max_tokens=12, prompt_logprobs=True)
    driver.add("good", prompt_token_ids=PROMPT, max_tokens=12, prompt_logprobs=True)
    heard = driver.run()
    assert isinstance(heard["bad"].finished.error, GenerationFailed)
    assert heard["bad"].prefill is None
    assert heard["good"].finished.state == "done"


def test_a_slot_that_held_nan_is_clean_for_its_next_owner(llama: LoadedModel, drive: Make) -> None:
    driver = drive(scripted(llama, {}, nan={999}), max_batch_size=1)
    driver.add("reference", prompt_token_ids=PROMPT, max_tokens=12)
    driver.run()
    driver.add("bad", prompt_token_ids=[*PROMPT, 999], max_tokens=12)
    engine: Any = driver.engine
    for layer in engine._runner.cache.slot_layers:
        layer.key_slots[0].fill_(torch.nan)
        layer.value_slots[0].fill_(torch.nan)
    driver.add("next", prompt_token_ids=PROMPT, max_tokens=12)
    heard = driver.run()
    assert heard["bad"].finished.state == "failed"
    assert heard["next"].token_ids == heard["reference"].token_ids


@pytest.mark.parametrize("place", ["prompt", "last token", "answer"])
def test_a_pass_that_raises_fails_the_guilty_row_alone(llama: LoadedModel, drive: Make, place: str) -> None:
    guilty = {"prompt": [999, *PROMPT], "last token": [*PROMPT, 999], "answer": [*PROMPT, 998]}[place]
    loaded = scripted(llama, {998: 999}, fatal={999})
    if place == "prompt":
        loaded.model.base_model = Script(copy.deepcopy(llama.model.base_model), {}, set(), {999})
        loaded.model.base_model.forward = lambda input_ids, **inputs: _fatal(
            llama.model.base_model, input_ids, **inputs
        )
    driver = drive(loaded, max_batch_size=4)
    for name, ids in {"a": PROMPT, "bad": guilty, "c": [*PROMPT, 80]}.items():
        driver.add(name, prompt_token_ids=ids, max_tokens=12)
    heard = driver.run()
    assert heard["bad"].finished.state == "failed"
    assert isinstance(heard["bad"].finished.error, GenerationFailed)
    alone = drive(llama, max_batch_size=4)
    alone.add("a", prompt_token_ids=PROMPT, max_tokens=12)
    alone.add("c", prompt_token_ids=[*PROMPT, 80], max_tokens=12)
    for name, expected in alone.run().items():
        assert heard[name].finished.state == "done"
        assert heard[name].token_ids == expected.token_ids


def _fatal(model: Any, input_ids: torch.Tensor, **inputs: Any) -> Any:
    if (input_ids == 999).any():
        raise RuntimeError("the pass broke")
    return model(input_ids=input_ids, **inputs)


def test_a_model_that_fails_on_anything_is_told_to_the_caller(llama: LoadedModel, drive: Make) -> None:
    driver = drive(scripted(llama, {}, fatal=set(range(1024))))
    driver.add("a", prompt_token_ids=PROMPT)
    driver.clock.now += 1
    with pytest.raises(GenerationFailed, match="any input") as caught:
        driver.step()
    assert caught.value.retryable


def test_deadlines_end_running_and_waiting_requests_before_the_next_pass(
    llama: LoadedModel, drive: Make
) -> None:
    driver = drive(scripted(llama, {70: 300, 300: 301, 301: 300}), max_batch_size=1, max_delay_s=0)
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


def test_cancel_frees_the_slot_at_once(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_batch_size=2, max_delay_s=0)
    a = driver.add("a", prompt_token_ids=PROMPT, max_tokens=100)
    b = driver.add("b", prompt_token_ids=PROMPT, max_tokens=4)
    c = driver.add("c", prompt_token_ids=PROMPT, max_tokens=4)
    driver.step()
    driver.engine.cancel([a, c, ("nobody", 1)])
    assert (driver.engine.room().rows, driver.engine.room().running) == (1, 1)
    heard = driver.run()
    assert (heard["a"].end, heard["c"].end) == (None, None)
    assert heard["b"].finished.state == "done"
    assert b not in [a, c]


def test_the_same_key_twice_is_one_request(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=0)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    driver.step()
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=3)
    assert len(driver.run()["a"].token_ids) == 3


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
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=20, sampling={"temperature": 1.0})
    driver.add("b", prompt_token_ids=PROMPT, max_tokens=20, sampling={"temperature": 1.0})
    first = driver.run()["a"]
    assert first.token_ids != driver.heard["b"].token_ids
    sampling = {"temperature": 1.0, "seed": first.finished.seed}
    driver.add("again", prompt_token_ids=PROMPT, max_tokens=20, sampling=sampling)
    assert driver.run()["again"].token_ids == first.token_ids


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 5, 300])
def test_logprobs_are_those_of_the_model_alone(
    kind: str, length: int, request: pytest.FixtureRequest, drive: Make
) -> None:
    loaded: LoadedModel = request.getfixturevalue(kind)
    ids = [3 + (17 * i) % 1000 for i in range(length)]
    driver = drive(loaded)
    driver.add(
        "a",
        prompt_token_ids=ids,
        max_tokens=8,
        logprobs=True,
        prompt_logprobs=True,
        sampling={"temperature": 0.7, "top_k": 3, "seed": 1},
    )
    driver.add("b", prompt_token_ids=ids, max_tokens=8)
    heard = driver.run()
    with torch.inference_mode():
        whole = torch.tensor([[*ids, *heard["a"].token_ids]])
        scores = torch.log_softmax(loaded.model(input_ids=whole).logits[0], dim=-1)
    expected = scores[:-1].gather(1, whole[0, 1:, None])[:, 0].tolist()
    prefill = heard["a"].prefill
    assert prefill is not None
    assert prefill.token_ids == tuple(ids)
    assert prefill.logprobs[0] is None
    assert [*prefill.logprobs[1:], *heard["a"].logprobs] == pytest.approx(expected, abs=1e-3)
    assert "".join(prefill.texts) == loaded.tokenizer.decode(ids, skip_special=False)
    assert heard["b"].logprobs == []
    assert heard["b"].prefill is None


def test_steps_and_timings_are_accounted_for(llama: LoadedModel, drive: Make) -> None:
    driver = drive(scripted(llama, {70: 300, 300: 301, 301: 2}))
    driver.add("a", prompt_token_ids=PROMPT)
    driver.add("b", prompt_token_ids=PROMPT, max_tokens=1)
    driver.clock.now += 0.5
    first = driver.step()
    assert (first.rows, first.prompt_tokens, first.generated_tokens) == (2, 8, 2)
    driver.clock.now += 0.25
    second = driver.step()
    assert (second.rows, second.prompt_tokens, second.generated_tokens) == (1, 0, 1)
    driver.clock.now += 0.25
    driver.step()
    end = driver.heard["a"].finished
    assert end.timing.wait_ms == pytest.approx(500)
    assert end.timing.decode_ms == pytest.approx(500)
    assert end.usage.prompt_tokens == 4


def test_it_fills_a_row_to_the_last_place(gpt2: LoadedModel, drive: Make) -> None:
    # GPT-2 knows 512 positions and no more; padding must not ask for others.
    loaded = scripted(gpt2, {}, eos=set())
    driver = drive(loaded, max_batch_size=2)
    driver.add("long", prompt_token_ids=[7] * 509, max_tokens=3)
    driver.add("full", prompt_token_ids=[7] * 511, max_tokens=1)
    heard = driver.run()
    assert len(heard["long"].token_ids) == 3
    assert heard["long"].finished.state == heard["full"].finished.state == "done"


def test_warm_up_compares_batch_and_model(llama: LoadedModel, gpt2: LoadedModel, drive: Make) -> None:
    for loaded in (llama, gpt2):
        engine: Any = drive(loaded).engine
        engine.warm_up()


def test_warm_up_refuses_a_model_that_ignores_positions(llama: LoadedModel, drive: Make) -> None:
    class Stubborn(Script):
        def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
            if inputs.get("position_ids") is not None:
                inputs["position_ids"] = torch.zeros_like(inputs["position_ids"])
            return self.inner(input_ids=input_ids, **inputs)

    engine: Any = drive(replace(llama, model=Stubborn(copy.deepcopy(llama.model), {}, set(), set()))).engine
    with pytest.raises(ModelLoadFailed, match="other logits in a batch"):
        engine.warm_up()
    engine = drive(scripted(llama, {}, fatal={24})).engine
    with pytest.raises(ModelLoadFailed, match="the pass broke"):
        engine.warm_up()


def test_memory_is_told_in_bytes(llama: LoadedModel, drive: Make) -> None:
    engine: Any = drive(llama, max_batch_size=8, max_seq_len=512).engine
    # 2 kinds x 2 layers x 8 slots x 2 heads x 512 places x 16 wide x 4 bytes
    assert engine.cache_bytes == 2 * 2 * 8 * 2 * 512 * 16 * 4
    assert engine.weights_bytes == sum(p.numel() for p in llama.model.parameters()) * 4


def test_outputs_of_a_key_end_with_its_finish(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=0)
    driver.add("a", prompt_token_ids=PROMPT, max_tokens=1)
    step = driver.step()
    assert isinstance(step.outputs[-1].event, Finished)
    assert driver.engine.room().rows == 8
    driver.engine.close()
