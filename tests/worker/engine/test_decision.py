"""Answers to questions: right likelihoods, the state computed once, and the same bits in any company."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine_driver import Driver
from random_decisions import RandomDecisions
from random_requests import RandomRequests
from reference_model import reference
from scripted_runner import ScriptedRunner, poisoned
from streamfleet_common.decisions import DecideRequest, Decision
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.prefix_cache import BLOCK
from tiny_model import Kind, tiny_model

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]

STATE = "\n".join(f"The value of text {number} is a string, not a list." for number in range(12))
QUESTIONS: list[dict[str, Any]] = [
    {"id": "same", "criteria": "Is it the same?", "type": "yes_no"},
    {"id": "kind", "criteria": "What is it?", "options": ["a string", "a list of strings", "None", "a"]},
    {"id": "one", "criteria": "Which one?", "options": ["text", "value"]},
]


def ask(driver: Driver, name: str, **fields: Any) -> None:
    driver.add_prepared(name, driver.engine.prepare(DecideRequest(**fields)))


def answers(driver: Driver, name: str) -> tuple[Decision, ...]:
    end = driver.heard[name].finished
    assert end.state == "done", end.error
    return end.answers


def idle(driver: Driver) -> bool:
    """Whether nothing is left in the engine, pinned blocks and rows of the cache among it."""
    engine: Any = driver.engine
    assert engine.due_in() is None
    assert not engine._answers
    assert len(engine._prefix._idle) == len(engine._prefix)
    return not any(arena.slots for arena in engine._cache.arenas)


class Peer:
    """The same by transformers: one prompt at a time, in pieces that its own tokenizer makes."""

    def __init__(self, kind: Kind) -> None:
        self._encode = partial(
            AutoTokenizer.from_pretrained(tiny_model(kind)).encode, add_special_tokens=False
        )
        self._model = reference(kind)

    def tokens(self, text: str) -> list[int]:
        return list(self._encode(text))

    def before(self, state: str, criteria: str) -> list[int]:
        return [
            *self.tokens("<|im_start|>user\n"),
            *self.tokens(state),
            *self.tokens(f"\n\n{criteria}"),
            *self.tokens("<|im_end|>\n<|im_start|>assistant\n"),
        ]

    def score(self, state: str, criteria: str, option: str) -> float:
        before, ids = self.before(state, criteria), self.tokens(option)
        logprobs = torch.log_softmax(self._model.logits(before + ids), dim=-1)
        return sum(float(logprobs[len(before) + place - 1, ids[place]]) for place in range(len(ids)))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_scores_are_the_log_likelihoods_that_transformers_gives(drive: Make, load: Load, kind: Kind) -> None:
    driver = drive(load(kind))
    ask(driver, "a", state=STATE, questions=QUESTIONS)
    driver.run()
    peer = Peer(kind)
    found = answers(driver, "a")
    assert [answer.id for answer in found] == ["same", "kind", "one"]
    for answer, question in zip(found, QUESTIONS, strict=True):
        options = question.get("options", ["yes", "no"])
        expected = {option: peer.score(STATE, question["criteria"], option) for option in options}
        assert list(answer.scores) == options
        assert answer.scores == pytest.approx(expected, rel=0, abs=2e-4)
        assert answer.option == max(expected, key=expected.__getitem__)
    assert idle(driver)


def test_probabilities_are_a_softmax_with_the_temperature_of_the_number_of_options(
    drive: Make, llama: LoadedModel
) -> None:
    driver = drive(llama)
    ask(driver, "a", state=STATE, questions=QUESTIONS, temperatures={2: 4.0})
    driver.run()
    for answer in answers(driver, "a"):
        temperature = 4.0 if len(answer.scores) == 2 else 1.0
        weights = {option: math.exp(score / temperature) for option, score in answer.scores.items()}
        total = sum(weights.values())
        expected = {option: weight / total for option, weight in weights.items()}
        assert answer.probabilities == pytest.approx(expected, rel=1e-9)
        assert sum(answer.probabilities.values()) == pytest.approx(1.0, abs=1e-12)
        assert answer.option == max(answer.probabilities, key=answer.probabilities.__getitem__)


def test_of_options_that_are_equally_likely_the_first_is_chosen(drive: Make, llama: LoadedModel) -> None:
    peer = Peer("llama")
    (yes,) = peer.tokens("is")
    # Behind "assistant\n" nothing is said but "is"; all else is equally unlikely.
    (*_, last) = peer.before("s", "c")
    driver = drive(llama, runner=partial(ScriptedRunner, follows={last: yes}))
    ask(driver, "a", state="s", questions=[{"id": "q", "criteria": "c", "options": ["if", "None", "def"]}])
    ask(driver, "b", state="s", questions=[{"id": "q", "criteria": "c", "options": ["if", "is"]}])
    driver.run()
    (first,), (second,) = answers(driver, "a"), answers(driver, "b")
    assert (first.option, second.option) == ("if", "is")
    assert set(first.probabilities.values()) == {1 / 3}
    # Nine is what the runner gives that token, zero the 1023 others.
    assert second.scores == pytest.approx(
        {"if": -math.log(math.exp(9) + 1023), "is": 9 - math.log(math.exp(9) + 1023)}, abs=1e-5
    )


# --- what is computed


def many(count: int) -> list[dict[str, Any]]:
    """Questions that begin with different words, of two options of one token each."""
    words = ["Is", "Or", "If", "What", "Which", "Who", "How", "When", "Why", "Has"]
    return [
        {"id": str(number), "criteria": f"{words[number]} it so?", "options": ["if", "no"]}
        for number in range(count)
    ]


def test_the_state_is_computed_once_and_questions_share_passes(drive: Make, llama: LoadedModel) -> None:
    peer = Peer("llama")
    state = len(peer.before(STATE, "")) - len(peer.before("", ""))
    driver = drive(llama, max_batch_size=8)
    ask(driver, "a", state=STATE, questions=many(10))
    steps = []
    while driver.engine.due_in() is not None:
        driver.clock.now += 1
        steps.append(driver.step())
    prompts = [len(peer.before(STATE, question["criteria"])) for question in many(10)]
    begun = len(peer.tokens("<|im_start|>user\n")) + state
    assert begun > 5 * BLOCK
    blocks = begun // BLOCK * BLOCK
    # The first in full, of all others what does not fill a block of the state. Of their options nothing: the
    # question's last token tells the likelihoods of both.
    expected = prompts[0] + sum(prompt - blocks for prompt in prompts[1:])
    assert sum(step.prompt_tokens for step in steps) == expected
    # One question alone, then eight in the rows that there are, then one.
    assert [step.prompt_tokens for step in steps if step.prompt_tokens] == [
        prompts[0],
        sum(prompt - blocks for prompt in prompts[1:9]),
        prompts[9] - blocks,
    ]
    assert len(answers(driver, "a")) == 10


def test_what_options_have_in_common_is_computed_once_for_all_that_differ_in_their_last_token(
    drive: Make, llama: LoadedModel
) -> None:
    peer = Peer("llama")
    options = ["a string", "a list", "text", "value", "a string value"]
    groups = {tuple(peer.tokens(option)[:-1]) for option in options}
    assert len(groups) < len(options)
    driver = drive(llama, prefix_cache_bytes=0)
    ask(driver, "a", state="s", questions=[{"id": "q", "criteria": "c", "options": options}])
    assert driver.engine.room().waiting == len(groups)
    driver.clock.now += 1
    step = driver.step()
    assert step.prompt_tokens == sum(len(peer.before("s", "c")) + len(shared) for shared in groups)
    assert driver.engine.due_in() is None


def test_without_a_prefix_cache_it_is_computed_again_but_right(drive: Make, llama: LoadedModel) -> None:
    kept, not_kept = drive(llama), drive(llama, prefix_cache_bytes=0)
    tokens = []
    for driver in (kept, not_kept):
        driver.engine.warm_up()  # type: ignore[attr-defined]
        ask(driver, "a", state=STATE, questions=QUESTIONS)
        count = 0
        while driver.engine.due_in() is not None:
            driver.clock.now += 1
            count += driver.step().prompt_tokens
        tokens.append(count)
    assert tokens[0] < tokens[1] / 2
    assert answers(kept, "a") == answers(not_kept, "a")
    assert not_kept.heard["a"].finished.usage.cached_tokens == 0


def test_usage_counts_the_state_once_and_what_was_there_before(drive: Make, llama: LoadedModel) -> None:
    peer = Peer("llama")
    driver = drive(llama)
    for name in ("a", "b"):
        ask(driver, name, state=STATE, questions=QUESTIONS)
        driver.run()
    state = len(peer.tokens("<|im_start|>user\n")) + len(peer.tokens(STATE))
    heads = [len(peer.before(STATE, question["criteria"])) - state for question in QUESTIONS]
    options = [option for question in QUESTIONS for option in question.get("options", ["yes", "no"])]
    first, second = (driver.heard[name].finished.usage for name in ("a", "b"))
    assert first.prompt_tokens == state + sum(heads) + sum(len(peer.tokens(option)) for option in options)
    assert (first.completion_tokens, first.cached_tokens, first.cut_tokens) == (0, 0, 0)
    # All whole blocks before the place that the first option is scored from.
    blocks = [(state + head - 1) // BLOCK * BLOCK for head in heads]
    cached = min(state, *blocks) + sum(max(0, tokens - state) for tokens in blocks)
    assert second == first.model_copy(update={"cached_tokens": cached})
    assert cached > state // BLOCK * BLOCK - 1


def test_no_questions_are_answered_without_the_model(drive: Make, llama: LoadedModel) -> None:
    class NoRunner(ScriptedRunner):
        def run(self, batch: Any) -> torch.Tensor:
            raise AssertionError("the model was asked")

    driver = drive(llama, runner=NoRunner)
    ask(driver, "a", state=STATE)
    ask(driver, "b", state=STATE)
    assert driver.engine.due_in() == 0
    assert driver.engine.room().rows == 8
    driver.engine.cancel([("b", 1)])
    step = driver.step()
    assert (step.prompt_tokens, step.rows) == (0, 0)
    assert answers(driver, "a") == ()
    assert driver.heard["a"].finished.usage.prompt_tokens == 0
    assert driver.heard["b"].end is None
    assert driver.engine.due_in() is None


# --- company


@pytest.mark.parametrize(
    ("kind", "precision"), [("llama", "float32"), ("llama", "bfloat16"), ("gpt2", "float32")]
)
def test_answers_have_the_same_bits_alone_and_in_any_company(
    drive: Make, load: Load, kind: Kind, precision: str
) -> None:
    requests = {str(number): request for number, request in enumerate(RandomDecisions(5)(16))}
    others = RandomRequests(6)(10)
    assert sum(not request.questions for request in requests.values()) < 6
    loaded = load(kind, precision)
    company = drive(loaded, max_batch_size=5, prefill_chunk=64, max_prefill_tokens=96, max_seq_len=256)
    company.engine.warm_up()  # type: ignore[attr-defined]
    assert company.engine.info.exact
    source, todo = random.Random(7), [*requests, *(f"g{number}" for number in range(len(others)))]
    source.shuffle(todo)
    while todo or company.engine.due_in() is not None:
        for name in [todo.pop() for _ in range(min(len(todo), source.choice([0, 0, 1, 2])))]:
            if name in requests:
                company.add_prepared(name, company.engine.prepare(requests[name]))
            else:
                company.add(name, **others[int(name[1:])])
        company.clock.now += 0.01
        company.step()
    assert idle(company)
    # One after the other; nothing is kept of those before.
    alone = drive(loaded, max_batch_size=3, prefix_cache_bytes=0, max_seq_len=256)
    alone.engine.warm_up()  # type: ignore[attr-defined]
    for name, request in requests.items():
        alone.add_prepared(name, alone.engine.prepare(request))
        alone.run()
        assert answers(company, name) == answers(alone, name)


def test_a_large_request_waits_in_its_own_line(drive: Make, llama: LoadedModel) -> None:
    driver = drive(llama, max_batch_size=4)
    questions = [{"id": str(n), "criteria": f"{n}?", "options": ["if not", "is", "or"]} for n in range(40)]
    ask(driver, "a", state="s", questions=questions)
    assert driver.engine.room().waiting == 8
    driver.add("b", prompt="def", max_tokens=4)
    steps = 0
    while driver.heard["b"].end is None:
        driver.clock.now += 1
        driver.step()
        steps += 1
        assert driver.engine.room().waiting + driver.engine.room().running <= 9
    # The eight that were there before it take rows two times, and its tokens four steps.
    assert steps <= 8
    assert driver.heard["a"].end is None
    driver.run()
    assert [answer.id for answer in answers(driver, "a")] == [str(n) for n in range(40)]


# --- ends


def test_a_question_that_breaks_the_pass_fails_its_request_alone(drive: Make, llama: LoadedModel) -> None:
    (word,) = Peer("llama").tokens("None")
    driver = drive(llama, runner=partial(ScriptedRunner, fatal=[word]))
    good = [question for question in QUESTIONS if question["id"] != "kind"]
    ask(driver, "good", state=STATE, questions=good)
    ask(driver, "bad", state=STATE, questions=[*good, {"id": "x", "criteria": "None?", "type": "yes_no"}])
    driver.run()
    end = driver.heard["bad"].finished
    assert end.state == "failed"
    assert "the pass broke" in str(end.error)
    assert end.answers == ()
    assert len(answers(driver, "good")) == 2
    assert idle(driver)


def test_a_question_whose_numbers_are_no_numbers_fails_its_request_alone(
    drive: Make, llama: LoadedModel
) -> None:
    (word,) = Peer("llama").tokens("None")
    driver = drive(poisoned(llama, word))
    ask(driver, "good", state=STATE, questions=[QUESTIONS[0]])
    ask(
        driver, "bad", state=STATE, questions=[QUESTIONS[0], {**QUESTIONS[0], "id": "x", "criteria": "None?"}]
    )
    driver.run()
    assert driver.heard["bad"].finished.state == "failed"
    assert "no usable numbers" in str(driver.heard["bad"].finished.error)
    (answer,) = answers(driver, "good")
    expected = {option: Peer("llama").score(STATE, "Is it the same?", option) for option in ("yes", "no")}
    assert answer.scores == pytest.approx(expected, abs=2e-4)
    assert idle(driver)


def test_cancelled_and_late_requests_leave_nothing_behind(drive: Make, llama: LoadedModel) -> None:
    driver = drive(llama, max_batch_size=4, prefill_chunk=64, max_prefill_tokens=64)
    prepared = driver.engine.prepare(DecideRequest(state=STATE, questions=many(10)))  # type: ignore[arg-type]
    driver.add_prepared("gone", prepared)
    driver.add_prepared("late", prepared, deadline=driver.clock.now + 5)
    driver.clock.now += 1
    for _ in range(3):
        driver.step()
    driver.engine.cancel([("gone", 1)])
    driver.clock.now += 10
    driver.run()
    assert driver.heard["gone"].end is None
    end = driver.heard["late"].finished
    assert (end.state, end.answers, end.choices) == ("expired", (), ())
    assert idle(driver)
