import subprocess
import sys
from collections.abc import Mapping

import pytest

from streamfleet_common.errors import DeadlineExceeded, ModelNotFound, TooLong, Unsupported
from streamfleet_common.schemas import ChatMessage, GenerateRequest, Guide, Prefill
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Room, Step, Tokens
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


def test_log_probabilities_have_the_shape_of_a_model_s(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    fields = {"prompt_logprobs": True, "logprobs": True, "top_logprobs": 2}
    add(engine, "a", "ECHO 1", fields=fields)
    prefill, tokens, end = (output.event for output in engine.step().outputs)
    assert isinstance(prefill, Prefill)
    assert prefill.logprobs == (None, -0.25)
    assert prefill.top_logprobs == ((), ((1, -0.25), (2, -1.25)))
    assert isinstance(tokens, Tokens)
    assert tokens.logprobs == [-0.125]
    assert tokens.top_logprobs == [((0, -0.125), (1, -1.125))]
    assert isinstance(end, Finished)
    assert end.prefill == prefill
    (choice,) = end.choices
    assert (choice.logprobs, choice.top_logprobs) == ((-0.125,), tuple(tokens.top_logprobs))


def test_nobody_gets_log_probabilities_unasked(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 1")
    tokens, end = (output.event for output in engine.step().outputs)
    assert isinstance(tokens, Tokens)
    assert isinstance(end, Finished)
    assert (tokens.logprobs, tokens.top_logprobs) == ([], [])
    assert (end.prefill, end.choices[0].logprobs, end.choices[0].top_logprobs) == (None, (), ())


# --- several choices


def test_each_choice_is_a_row_with_a_text_of_its_own(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=8, clock=clock)
    add(engine, "a", "ECHO 2", fields={"n": 3, "sampling": {"seed": 40}})
    step = engine.step()
    assert step.rows == 3
    assert [(o.event.index, o.event.texts) for o in step.outputs if isinstance(o.event, Tokens)] == [
        (0, ["tok0#0"]),
        (1, ["tok0#1"]),
        (2, ["tok0#2"]),
    ]
    assert (engine.room().running, engine.room().rows) == (3, 5)
    end = finished(engine.step())["a"]
    assert [(choice.index, choice.text, choice.seed) for choice in end.choices] == [
        (0, "tok0#0 tok1#0", 40),
        (1, "tok0#1 tok1#1", 41),
        (2, "tok0#2 tok1#2", 42),
    ]
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 6)
    assert engine.due_in() is None


def test_choices_that_find_no_row_wait_in_the_engine(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=2, clock=clock)
    add(engine, "a", "ECHO 2", fields={"n": 5, "prompt_logprobs": True})
    add(engine, "b", "ECHO 1")
    rows, prefills = [], 0
    ends: list[str] = []
    while engine.due_in() is not None:
        step = engine.step()
        rows.append(step.rows)
        ends += finished(step)
        prefills += sum(isinstance(output.event, Prefill) for output in step.outputs)
    # The request's choices first, as it came first; the other joins the last of them.
    assert rows == [2, 2, 2, 2, 2, 1]
    assert ends == ["b", "a"]
    assert prefills == 1, "the prompt is read once"


def test_a_stop_string_may_end_one_choice_alone(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 2", fields={"n": 2, "stop": ["0#1"]})
    ends: dict[str, Finished] = {}
    while engine.due_in() is not None:
        ends |= finished(engine.step())
    assert [(choice.text, choice.finish_reason) for choice in ends["a"].choices] == [
        ("tok0#0 tok1#0", "eos"),
        ("tok", "stop"),
    ]


def test_a_fault_or_a_deadline_ends_all_choices_at_once(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=3, clock=clock)
    add(engine, "a", "ECHO 3 RAISE@1", fields={"n": 2})
    add(engine, "b", "ECHO 3", fields={"n": 2}, deadline=100.5)
    assert finished(engine.step()) == {}
    ends = finished(engine.step())
    assert [choice.finish_reason for choice in ends["a"].choices] == ["error", "error"]
    clock.now = 100.5
    ends = finished(engine.step())
    assert [(choice.text, choice.finish_reason) for choice in ends["b"].choices] == [
        ("tok0#0 tok1#0", "expired"),
        ("", "expired"),
    ]
    assert engine.room() == Room(rows=3, running=0, waiting=0)


def test_a_cancelled_request_takes_all_its_rows_along(clock: Clock) -> None:
    engine = ScriptedEngine(max_batch_size=2, clock=clock)
    key = add(engine, "a", "ECHO 3", fields={"n": 5})
    engine.step()
    engine.cancel([key])
    assert engine.room() == Room(rows=2, running=0, waiting=0)
    assert engine.step().outputs == []


# --- the request


def test_as_long_as_it_fits() -> None:
    engine = ScriptedEngine(max_seq_len=10)
    script = engine.prepare(GenerateRequest(prompt="ECHO 100", max_tokens="fit"))
    assert (len(script.answers[0].texts), script.answers[0].reason) == (8, "length")
    with pytest.raises(TooLong):
        engine.prepare(GenerateRequest(prompt="a " * 10, max_tokens="fit"))


@pytest.mark.parametrize(("side", "kept"), [("left", ("d", "e")), ("right", ("a", "b"))])
def test_a_prompt_is_cut_where_it_may_be(clock: Clock, side: str, kept: tuple[str, ...]) -> None:
    engine = ScriptedEngine(max_seq_len=3, clock=clock)
    fields = {"truncate": 2, "truncate_side": side, "max_tokens": 1, "prompt_logprobs": True}
    add(engine, "a", "a b c d e", fields=fields)
    end = finished(engine.step())["a"]
    assert end.prefill is not None
    assert end.prefill.texts == kept
    assert (end.usage.prompt_tokens, end.usage.cut_tokens, end.usage.truncated) == (2, 3, 1)


def test_echo_begins_each_answer_with_the_prompt(clock: Clock) -> None:
    engine = ScriptedEngine(clock=clock)
    add(engine, "a", "ECHO 1", fields={"echo": True, "n": 2})
    step = engine.step()
    assert texts(step, "a") == ["ECHO 1tok0#0", "ECHO 1tok0#1"]
    assert [choice.text for choice in finished(step)["a"].choices] == texts(step, "a")


def test_it_is_exact_if_told_so() -> None:
    assert ScriptedEngine().info.exact == ""
    assert ScriptedEngine(exact="a kind").info.exact == "a kind"


def test_what_it_refuses() -> None:
    engine = ScriptedEngine(max_seq_len=10)
    with pytest.raises(ModelNotFound):
        engine.prepare(GenerateRequest(prompt="a", model="other", max_tokens=1))
    with pytest.raises(TooLong) as caught:
        engine.prepare(GenerateRequest(prompt="a b", max_tokens=9))
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (2, 9, 10)
    with pytest.raises(Unsupported) as refused:
        engine.prepare(GenerateRequest(prompt="a", max_tokens=1, guide=Guide(regex="a+")))
    assert refused.value.feature == "guide"


def test_of_a_chat_the_last_message_counts() -> None:
    messages = (ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="ECHO 2"))
    script = ScriptedEngine().prepare(GenerateRequest(messages=messages, max_tokens=5))
    assert script.answers[0].texts == ("tok0", " tok1")


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, streamfleet_worker.engine.scripted; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'redis')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=90).returncode == 0
