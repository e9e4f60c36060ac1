import subprocess
import sys
from collections.abc import Mapping

import pytest

from streamfleet_common.errors import DeadlineExceeded, ModelNotFound, TooLong
from streamfleet_common.schemas import ChatMessage, GenerateRequest, Prefill
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Step, Tokens
from streamfleet_worker.engine.scripted import ScriptedEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def add(
    engine: Engine,
    name: str,
    prompt: str,
    *,
    at: float = 100.0,
    deadline: float = 1e9,
    fields: Mapping[str, object] | None = None,
) -> Key:
    request = GenerateRequest.model_validate({"prompt": prompt, **(fields or {})})
    key = (name, 1)
    engine.add({key: Arrival(engine.prepare(request), accepted_at=at, deadline_at=deadline)})
    return key


def finished(step: Step) -> dict[str, Finished]:
    return {o.key[0]: o.event for o in step.outputs if isinstance(o.event, Finished)}


def texts(step: Step, name: str) -> list[str]:
    found: list[str] = []
    for output in step.outputs:
        if output.key[0] == name and isinstance(output.event, Tokens):
            found += output.event.texts
    return found


def test_any_prompt_comes_back_in_one_step_for_the_whole_batch(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=2, clock=clock)
    for name in "abc":
        add(engine, name, f"say {name}")
    step = engine.step()
    assert {name: end.choices[0].text for name, end in finished(step).items()} == {
        "a": "say a",
        "b": "say b",
    }
    assert step.rows == 2
    assert engine.room().waiting == 1
    assert list(finished(engine.step())) == ["c"]
    assert engine.due_in() is None


def test_echo_gives_one_token_a_step(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 3")
    assert [texts(engine.step(), "a") for _ in range(2)] == [["tok0"], [" tok1"]]
    end = finished(engine.step())["a"]
    assert end.choices[0].text == "tok0 tok1 tok2"
    assert end.choices[0].token_ids == (0, 1, 2)
    assert end.choices[0].finish_reason == "eos"
    assert end.usage.completion_tokens == 3
    assert engine.room().running == 0


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"max_tokens": 2}, "tok0 tok1", "length"),
        ({"stop": ["ok1"]}, "tok0 t", "stop"),
        ({"stop": ["ok1"], "include_stop": True}, "tok0 tok1", "stop"),
        ({"stop": ["0 t"]}, "tok", "stop"),
    ],
)
def test_length_and_stop(clock: Clock, fields: dict[str, object], text: str, reason: str) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 4", fields=fields)
    streamed: list[str] = []
    step = engine.step()
    streamed += texts(step, "a")
    while engine.due_in() is not None:
        step = engine.step()
        streamed += texts(step, "a")
    choice = finished(step)["a"].choices[0]
    assert (choice.text, choice.finish_reason) == (text, reason)
    assert "".join(streamed) == text


def test_a_lone_request_waits_for_company_and_no_longer(clock: Clock) -> None:
    engine = ScriptedEngine(max_delay_s=0.5, clock=clock)
    add(engine, "a", "hello", at=99.8)
    assert engine.due_in() == pytest.approx(0.3)
    assert engine.step().outputs == []
    clock.now = 100.3
    assert engine.due_in() == 0.0
    assert "a" in finished(engine.step())


def test_cancelled_keys_bring_forth_nothing_more(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=1, clock=clock)
    a, b = add(engine, "a", "ECHO 5"), add(engine, "b", "ECHO 5")
    engine.step()
    engine.cancel([a, b, ("unknown", 1)])
    assert engine.step().outputs == []
    assert engine.room().rows == 1


def test_deadlines_end_waiting_and_running_requests(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=1, clock=clock)
    add(engine, "a", "ECHO 5", deadline=100.5)
    add(engine, "b", "ECHO 5", deadline=100.5)
    engine.step()
    clock.now = 100.5
    ends = finished(engine.step())
    assert {name: end.state for name, end in ends.items()} == {"a": "expired", "b": "expired"}
    assert (ends["a"].choices[0].text, ends["b"].choices[0].text) == ("tok0", "")
    assert all(isinstance(end.error, DeadlineExceeded) for end in ends.values())
    assert engine.due_in() is None


def test_prompt_logprobs_come_before_the_tokens(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 1", fields={"prompt_logprobs": True, "logprobs": True})
    prefill, tokens, end = (output.event for output in engine.step().outputs)
    assert isinstance(prefill, Prefill)
    assert prefill.logprobs == (None, 0.0)
    assert isinstance(tokens, Tokens)
    assert tokens.logprobs == [0.0]
    assert isinstance(end, Finished)
    assert end.prefill == prefill


def test_what_it_refuses() -> None:
    engine = ScriptedEngine(max_seq_len=10)
    with pytest.raises(ModelNotFound):
        engine.prepare(GenerateRequest(prompt="a", model="other", max_tokens=1))
    with pytest.raises(TooLong) as caught:
        engine.prepare(GenerateRequest(prompt="a b", max_tokens=9))
    assert (caught.value.prompt_tokens, caught.value.limit) == (2, 10)
    messages = (ChatMessage(role="user", content="ECHO 2"),)
    assert engine.prepare(GenerateRequest(messages=messages, max_tokens=5)).texts == (
        "tok0",
        " tok1",
    )


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, streamfleet_worker.engine.scripted; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'redis')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
