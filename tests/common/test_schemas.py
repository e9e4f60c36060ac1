"""What a message may hold: every bound from both sides, and the words in which a fault is told."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from streamfleet_common.cards import Card, Limits
from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import MAX_PROBLEM_CHARS, MAX_PROBLEMS, Message
from streamfleet_common.one_shot import (
    CallRequest,
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    HandlerCard,
    Label,
    Rank,
    RerankRequest,
)
from streamfleet_common.schemas import (
    Batch,
    ChatMessage,
    Choice,
    Delta,
    End,
    Envelope,
    Failure,
    GenerateRequest,
    Guide,
    Parts,
    Prefill,
    Restart,
    Retry,
    Sampling,
    Start,
    Timing,
    Tool,
    ToolCall,
    Usage,
    new_rid,
    new_rids,
)
from streamfleet_common.token_layout import TokenLayout
from streamfleet_common.worker_stats import WorkerStats

RID = "00" + "ab" * 16
REQUEST: dict[str, Any] = {"prompt": "Hi"}
CHOICE: dict[str, Any] = {"text": "a", "token_ids": [1], "finish_reason": "eos"}
LIMITS: dict[str, Any] = {
    "max_batch_size": 1,
    "max_seq_len": 1,
    "max_queue_depth": 1,
    "max_request_bytes": 1,
}
CARD: dict[str, Any] = {"worker": "w", "queue": "q", "model": "m", "limits": LIMITS}


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{**REQUEST, **fields})


def envelope(**fields: Any) -> Envelope:
    return Envelope(**{"request": REQUEST, **fields})


def faults_of(kind: type[Message], values: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        kind(**values)
    problems: list[str] = caught.value.problems
    assert problems, "a refusal must say what is wrong"
    assert all(problem in str(caught.value) for problem in problems)
    return problems


# --- bounds: the last value that is taken, the first that is not

TOP_LOGPROBS: tuple[list[Any], list[Any]] = (
    [[], [[]], [[[0, -0.5], [2**31 - 1, -1.5]]], [((1, -0.5),), ()]],
    [
        [[[-1, -0.5]]],
        [[[2**31, -0.5]]],
        [[[1, math.nan]]],
        [[[1, -math.inf]]],
        [[[1]]],
        [[[1, -0.5, 2]]],
        [1],
    ],
)
BOUNDS: list[tuple[type[Message], dict[str, Any], str, list[Any], list[Any]]] = [
    (GenerateRequest, {}, "prompt", ["a", "a" * 200_000], ["", "  \n", "a" * 200_001]),
    (GenerateRequest, {}, "prompt_token_ids", [[0], [2**31 - 1], [5] * 32_768], [[], [-1], [2**31]]),
    (GenerateRequest, {}, "prompt_token_ids", [], [[5] * 32_769]),
    (
        GenerateRequest,
        {},
        "messages",
        [[{"role": "user", "content": ""}] * 1000],
        [[], [{"role": "user", "content": ""}] * 1001, [{"role": "root", "content": ""}]],
    ),
    (Retry, {}, "attempts", [None, 1, 100], [0, 101, True, 1.0]),
    (Retry, {}, "backoff_ms", [0, 3_600_000], [-1, 3_600_001, 1.0]),
    (GenerateRequest, REQUEST, "max_tokens", [1, 32_768, "fit"], [0, -1, 32_769, 2**70, "", "Fit", "fit "]),
    (GenerateRequest, {**REQUEST, "max_tokens": "fit"}, "min_tokens", [0, 32_768], [-1, 32_769, None]),
    (GenerateRequest, REQUEST, "n", [1, 64], [0, -1, 65, None]),
    (GenerateRequest, REQUEST, "truncate", [None, 1, 32_768], [0, -1, 32_769, "fit"]),
    (GenerateRequest, REQUEST, "truncate_side", ["left", "right"], ["", "Left", "middle", None]),
    (GenerateRequest, {**REQUEST, "logprobs": True}, "top_logprobs", [0, 20], [-1, 21, True, None]),
    (GenerateRequest, REQUEST, "guide", [None, {"regex": "a"}], ["a", [], {"regex": None}]),
    (GenerateRequest, REQUEST, "model", ["", "m" * 200, None], ["m" * 201]),
    (GenerateRequest, REQUEST, "stop", [[], ["x"] * 8, ["x" * 64]], [["x"] * 9, ["x" * 65], [""]]),
    (GenerateRequest, REQUEST, "stop_token_ids", [[1] * 64, [0]], [[1] * 65, [-1], [2**31]]),
    (Sampling, {}, "temperature", [0, 0.0, 100.0, 1], [-0.001, 100.001, math.nan, math.inf, -math.inf]),
    (Sampling, {}, "top_k", [0, 1_000_000], [-1, 1_000_001]),
    (Sampling, {}, "top_p", [0.0, 1.0], [-0.001, 1.001, math.nan]),
    (Sampling, {}, "min_p", [0.0, 1.0], [-0.001, 1.001, math.nan]),
    (Sampling, {}, "typical_p", [1e-9, 0.5, 1.0], [0.0, -0.001, 1.001, math.nan]),
    (Sampling, {}, "repetition_penalty", [1e-9, 1, 10.0], [0.0, -1.0, 10.001, math.nan, math.inf]),
    (Sampling, {}, "presence_penalty", [-10.0, 0.0, 10.0], [-10.001, 10.001, math.nan]),
    (Sampling, {}, "frequency_penalty", [-10.0, 0.0, 10.0], [-10.001, 10.001, math.nan]),
    (
        Sampling,
        {},
        "logit_bias",
        [[], {}, {0: -1000.0}, {2**31 - 1: 1000}, [[5, 0.5]], [(5, 0.5)] * 1000],
        [{-1: 0.0}, {2**31: 0.0}, {"5": 0.0}, [[5, 1000.5]], [[5, math.nan]], [[5]], [[5, 0.5, 1]], "5", 5],
    ),
    (Sampling, {}, "logit_bias", [], [[(5, 0.5)] * 1001, {5: "1"}, {5: None}, None]),
    (Sampling, {}, "bad_words", [[], ["x"] * 8, ["x" * 64]], [["x"] * 9, ["x" * 65], [""], "x", None]),
    (Guide, {}, "regex", ["a", "a" * 4096], ["", "a" * 4097, 7]),
    (Guide, {}, "choice", [["a"], ["a"] * 256, ["a" * 1000]], [[], ["a"] * 257, ["a" * 1001], [""], "a"]),
    (
        Guide,
        {},
        "json_schema",
        [{}, "{}", "true", {"type": "object"}, '"' + "a" * 65_534 + '"'],
        ["", "{", '"' + "a" * 65_535 + '"', {"a": math.nan}, {"a": {1, 2}}, {"a": b"b"}, "[" * 60_000, 7],
    ),
    (Sampling, {}, "seed", [None, 0, 2**63 - 1], [-1, 2**63]),
    (ChatMessage, {"role": "user"}, "content", ["", "a" * 200_000], ["a" * 200_001]),
    (Envelope, {"request": REQUEST}, "rid", [RID, "f" * 34], ["f" * 33, "f" * 35, "F" * 34, "g" * 34, ""]),
    (
        Envelope,
        {"request": REQUEST},
        "tenant",
        ["a", "A.b_c-9", "-", "t" * 64],
        ["", "t" * 65, "a b", "a|b", "a:b", "a\n", "\na", "é", "a{b}", "*"],
    ),
    (Envelope, {"request": REQUEST}, "lane", ["high", "normal", "bulk"], ["", "solo", "High", "normal "]),
    (Envelope, {"request": REQUEST}, "deadline_ms", [1, 86_400_000], [0, -1, 86_400_001]),
    (Envelope, {"request": REQUEST}, "result_ttl_ms", [1000, 604_800_000], [999, 0, 604_800_001]),
    (Envelope, {"request": REQUEST}, "on_restart", ["restart", "fail"], ["", "retry"]),
    (Envelope, {"request": REQUEST}, "idempotency_key", [None, "k", "é" * 256], ["", "k" * 257]),
    (
        Envelope,
        {"request": REQUEST},
        "traceparent",
        [None, "00-" + "a" * 32 + "-" + "b" * 16 + "-01"],
        ["", "00-" + "a" * 32 + "-" + "b" * 16 + "-0", "00-" + "A" * 32 + "-" + "b" * 16 + "-01"],
    ),
    (Restart, {}, "reason", ["", "r" * 1000], ["r" * 1001]),
    (Delta, {"token_ids": [1], "texts": ["a"]}, "index", [0, 7], [-1]),
    (Usage, {}, "prompt_tokens", [0, 10], [-1]),
    (Usage, {}, "completion_tokens", [0, 10], [-1]),
    (Usage, {}, "cached_tokens", [0, 10], [-1]),
    (Usage, {}, "cut_tokens", [0, 10], [-1]),
    (Start, {"worker": "w", "model": "m"}, "exact", ["", "k" * 200], ["k" * 201, None]),
    (Prefill, {"token_ids": [1], "texts": ["a"], "logprobs": [None]}, "top_logprobs", *TOP_LOGPROBS),
    (Delta, {"token_ids": [1], "texts": ["a"]}, "top_logprobs", *TOP_LOGPROBS),
    (Choice, CHOICE, "top_logprobs", *TOP_LOGPROBS),
    (Choice, CHOICE, "seed", [None, 0, 2**63 - 1], [1.0, "1", True]),
    (Timing, {}, "wait_ms", [0.0, 0, 1e9], [-0.1, math.nan, math.inf]),
    (Choice, CHOICE, "last_token_id", [None, 0, 2**31 - 1], [-1, 2**31]),
    (Choice, CHOICE, "finish_reason", ["eos", "stop", "length"], ["", "done"]),
    (Choice, CHOICE, "logprobs", [[], [None, -0.5]], [[math.nan], [math.inf], ["x"]]),
    (Failure, {"message": "m"}, "code", ["", "c" * 64], ["c" * 65]),
    (Failure, {"code": "c"}, "message", ["", "m" * 4000], ["m" * 4001]),
    (End, {}, "state", ["done", "failed", "cancelled", "expired", "dead"], ["queued", "running", ""]),
    (End, {"state": "done"}, "exact", ["", "k" * 200], ["k" * 201, None]),
    (End, {"state": "done"}, "attempt", [0, 3], [-1]),
    (End, {"state": "done"}, "of", [0, 3], [-1]),
    (End, {"state": "done"}, "last_seq", [0, 3], [-1]),
    (Card, CARD, "queue", ["q", "A.b_c-9", "q" * 64], ["", "q" * 65, "a b", "{q}"]),
    (Card, CARD, "worker", ["w" * 200], ["w" * 201]),
    (Card, CARD, "capacity", [0], [-1]),
    (Card, CARD, "state", ["ready", "draining"], ["", "dead"]),
    (Limits, LIMITS, "max_batch_size", [1], [0]),
    (Limits, LIMITS, "max_queue_depth", [1], [0]),
    (Limits, LIMITS, "vocab_size", [0, 1], [-1]),
]


@pytest.mark.parametrize(
    ("kind", "rest", "field", "good", "bad"), BOUNDS, ids=[f"{row[0].__name__}.{row[2]}" for row in BOUNDS]
)
def test_bounds(
    kind: type[Message], rest: dict[str, Any], field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        kind(**{**rest, field: value})
    for value in bad:
        faults = faults_of(kind, {**rest, field: value})
        assert any(field in fault for fault in faults), (value, faults)


@pytest.mark.parametrize("value", [True, False, "7", 7.0, None, [7], b"7"])
def test_integers_are_integers(value: object) -> None:
    assert faults_of(GenerateRequest, {"prompt": "a", "n": value})[0].startswith("n: ")


@pytest.mark.parametrize("value", [0, 32_769, True, "7", "Fit", 7.0, None, [7], b"fit"])
def test_a_length_is_an_integer_or_one_word(value: object) -> None:
    assert faults_of(GenerateRequest, {"prompt": "a", "max_tokens": value}) == [
        'max_tokens: Input should be an integer from 1 to 32768, or "fit"'
    ]


@pytest.mark.parametrize("value", [True, "0.5", None, [0.5], b"0.5"])
def test_numbers_are_numbers(value: object) -> None:
    assert faults_of(Sampling, {"temperature": value})[0].startswith("temperature: ")


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_flags_are_flags(value: object) -> None:
    assert faults_of(Envelope, {"request": REQUEST, "stream": value})[0].startswith("stream: ")
    for name in ("ignore_eos", "logprobs", "prompt_logprobs", "echo", "skip_special_tokens", "include_stop"):
        assert faults_of(GenerateRequest, {**REQUEST, name: value})[0].startswith(f"{name}: ")


@pytest.mark.parametrize("value", [7, b"bytes", ["a"], True, None])
def test_texts_are_texts(value: object) -> None:
    assert faults_of(ChatMessage, {"role": "user", "content": value})[0].startswith("content: ")


@pytest.mark.parametrize("value", ["123", b"123", {1: 2}, 7, [True], [1.0], ["1"], [None]])
def test_token_ids_are_a_sequence_of_integers(value: object) -> None:
    assert faults_of(GenerateRequest, {"prompt_token_ids": value})[0].startswith("prompt_token_ids")


SURROGATE = "a\ud800"
TEXTS: list[tuple[type[Message], dict[str, Any]]] = [
    (GenerateRequest, {"prompt": SURROGATE}),
    (GenerateRequest, {"messages": [{"role": "user", "content": SURROGATE}]}),
    (GenerateRequest, {"prompt": "a", "stop": [SURROGATE]}),
    (GenerateRequest, {"prompt": "a", "model": SURROGATE}),
    (Sampling, {"bad_words": [SURROGATE]}),
    (Guide, {"regex": SURROGATE}),
    (Guide, {"choice": [SURROGATE]}),
    (Guide, {"json_schema": '"\ud800"'}),
    (Envelope, {"request": REQUEST, "tenant": SURROGATE}),
    (Envelope, {"request": REQUEST, "idempotency_key": SURROGATE}),
    (Start, {"worker": SURROGATE, "model": "m"}),
    (Start, {"worker": "w", "model": SURROGATE}),
    (Start, {"worker": "w", "model": "m", "exact": SURROGATE}),
    (Prefill, {"token_ids": [1], "texts": [SURROGATE], "logprobs": [None]}),
    (Delta, {"token_ids": [1], "texts": [SURROGATE]}),
    (Restart, {"reason": SURROGATE}),
    (Choice, {**CHOICE, "text": SURROGATE}),
    (Failure, {"code": SURROGATE, "message": "m"}),
    (Failure, {"code": "c", "message": SURROGATE}),
    (End, {"state": "done", "model": SURROGATE}),
    (End, {"state": "done", "worker": SURROGATE}),
    (Card, {**CARD, "device": SURROGATE}),
    (Card, {**CARD, "precision": SURROGATE}),
    (Card, {**CARD, "tasks": [SURROGATE]}),
]


@pytest.mark.parametrize(("kind", "values"), TEXTS, ids=[f"{k.__name__}-{list(v)[-1]}" for k, v in TEXTS])
def test_no_field_takes_a_lone_surrogate(kind: type[Message], values: dict[str, Any]) -> None:
    assert "lone surrogate" in faults_of(kind, values)[0]


def test_whole_unicode_is_taken() -> None:
    assert request(prompt="\U0001f600 \x00 é").prompt == "\U0001f600 \x00 é"


# --- what is said


def test_every_problem_is_listed() -> None:
    faults = faults_of(
        Envelope,
        {
            "rid": "x",
            "tenant": "a b",
            "lane": "fast",
            "stream": "yes",
            "deadline_ms": 0,
            "colour": "red",
            "request": {"kind": "generate", "max_tokens": 0, "sampling": {"top_p": 2.0, "temprature": 1.0}},
        },
    )
    places = [fault.partition(":")[0] for fault in faults]
    assert places == [
        "rid",
        "tenant",
        "lane",
        "stream",
        "deadline_ms",
        "request.max_tokens",
        "request.sampling.top_p",
        "request.sampling.temprature",
        "colour",
    ]
    assert "unknown field" in faults[-1]
    assert "unknown field" in faults[-2]


@pytest.mark.parametrize("kind", [Sampling, Usage, Timing])
def test_unknown_fields_are_refused(kind: type[Message]) -> None:
    assert faults_of(kind, {"wrong": 1}) == [
        "wrong: unknown field; it would have had no effect. Check its spelling"
    ]


@pytest.mark.parametrize(
    ("misspelt", "at"),
    [
        ({"ignore_eos_token": True}, "ignore_eos_token"),
        ({"top_logprob": 1}, "top_logprob"),
        ({"min_length": 1}, "min_length"),
        ({"best_of": 2}, "best_of"),
        ({"truncation": 1}, "truncation"),
        ({"seed": 1}, "seed"),
        ({"temperature": 1.0}, "temperature"),
        ({"sampling": {"minp": 0.1}}, "sampling.minp"),
        ({"sampling": {"penalty_alpha": 0.1}}, "sampling.penalty_alpha"),
        ({"sampling": {"n": 2}}, "sampling.n"),
        ({"guide": {"json": "{}"}}, "guide.json"),
        ({"guide": {"grammar": "x"}}, "guide.grammar"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused_by_name(misspelt: dict[str, Any], at: str) -> None:
    assert f"{at}: unknown field; it would have had no effect. Check its spelling" in faults_of(
        GenerateRequest, {**REQUEST, **misspelt}
    )


def test_spelt_right_they_are_taken() -> None:
    made = request(
        ignore_eos=True,
        logprobs=True,
        top_logprobs=1,
        min_tokens=1,
        n=2,
        truncate=1,
        sampling={"temperature": 1.0, "seed": 1, "min_p": 0.1},
    )
    assert (made.ignore_eos, made.sampling.min_p, made.n) == (True, 0.1, 2)


@pytest.mark.parametrize("secret", ["s3cret", ["s3cret"], {"s3cret": 1}])
def test_a_refusal_does_not_repeat_the_value(secret: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerateRequest(prompt="a", max_tokens=secret, stop=secret)  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value)
    # The chain would print it.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_flood_of_problems_is_cut() -> None:
    faults = faults_of(GenerateRequest, {"prompt_token_ids": [-1] * 1000})
    assert len(faults) == MAX_PROBLEMS + 1
    assert faults[-1] == "and 900 more"
    # So many are not even made: that takes a second, in which the event loop does nothing else.
    (fault,) = faults_of(GenerateRequest, {"prompt_token_ids": [-1] * 10_001})
    assert fault.startswith("10001 problems, ")


def test_a_long_name_of_an_unknown_field_is_cut() -> None:
    (fault,) = faults_of(Usage, {"x" * 10_000: 1})
    assert len(fault) == MAX_PROBLEM_CHARS + 1


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, "none of them"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt and prompt_token_ids"),
        (
            {"prompt": "a", "prompt_token_ids": [1], "messages": [{"role": "user", "content": "x"}]},
            "prompt and prompt_token_ids and messages",
        ),
        ({"prompt": "", "messages": [{"role": "user", "content": "x"}]}, "prompt and messages"),
    ],
)
def test_exactly_one_prompt(values: dict[str, Any], found: str) -> None:
    assert faults_of(GenerateRequest, values) == [
        f"give exactly one of prompt, prompt_token_ids and messages (found {found})"
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, "none of them"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json_schema": {}, "regex": "a", "choice": ["a"]}, "json_schema and regex and choice"),
    ],
)
def test_exactly_one_form(values: dict[str, Any], found: str) -> None:
    assert faults_of(Guide, values) == [f"give exactly one of json_schema, regex and choice (found {found})"]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens (5) is above max_tokens (4)"),
        ({"min_tokens": 129}, "min_tokens (129) is above max_tokens (128)"),
        ({"top_logprobs": 1}, "top_logprobs needs logprobs: set it to true"),
        ({"top_logprobs": 1, "prompt_logprobs": True}, "top_logprobs needs logprobs: set it to true"),
        (
            {"ignore_eos": True, "guide": {"regex": "a"}},
            "ignore_eos and guide exclude each other: the guide says where the answer ends",
        ),
        (
            {"min_tokens": 2, "guide": {"regex": "a"}},
            "min_tokens and guide exclude each other: the guide says where the answer ends",
        ),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], fault: str) -> None:
    assert faults_of(GenerateRequest, {**REQUEST, **fields}) == [fault]


def test_fields_that_just_agree() -> None:
    assert request(max_tokens=5, min_tokens=5).min_tokens == 5
    assert request(max_tokens="fit", min_tokens=500).max_tokens == "fit"


@pytest.mark.parametrize("secret", [{"a": {"s3cret"}}, '{"s3cret": ', {"a": object()}])
def test_a_schema_that_is_no_json_is_not_repeated(secret: object) -> None:
    (fault,) = faults_of(Guide, {"json_schema": secret})
    assert fault == "json_schema: a JSON document is wanted, or a map that makes one"


# --- shape


MESSAGES: list[Message] = [
    ChatMessage(role="user", content="a"),
    Tool(name="f"),
    ToolCall(name="f"),
    Sampling(),
    Guide(regex="a"),
    Retry(),
    request(),
    envelope(),
    Start(worker="w", model="m"),
    Prefill(token_ids=(1,), texts=("a",), logprobs=(None,)),
    Delta(token_ids=(1,), texts=("a",)),
    Restart(reason="r"),
    Choice(text="a", token_ids=(1,), finish_reason="eos"),
    Usage(),
    Timing(),
    Failure(code="c", message="m"),
    End(state="done"),
    Limits(**LIMITS),
    Card(**CARD),
    DecideRequest(state="s"),
    Question(id="q", type="yes_no", criteria="c"),
    Decision(id="q", option="a", probabilities={"a": 1.0}, scores={"a": -1.0}),
    EmbedRequest(texts=["a"]),
    ClassifyRequest(texts=["a"]),
    RerankRequest(query="q", documents=["a"]),
    CallRequest(handler="h", input=1),
    Embedding(data=bytes(4)),
    Label(label="a", score=0.5),
    Classification(labels=()),
    Rank(index=0, score=0.5),
    Parts(values=()),
    HandlerCard(),
    TokenLayout(),
    Batch(id="w1/1"),
    WorkerStats(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_frozen(message: Message) -> None:
    for name in type(message).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(message, name, getattr(message, name))
    with pytest.raises(ValidationError):
        message.new = 1  # type: ignore[attr-defined]


def test_every_message_was_tried() -> None:
    # Others subclass it, too; these are what crosses the wire.
    ours = {kind for kind in Message.__subclasses__() if kind.__module__.startswith("streamfleet_common.")}
    assert {type(message) for message in MESSAGES} == ours


def test_sequences_become_tuples() -> None:
    made = request(prompt=None, prompt_token_ids=[3, 1, 2], stop=["b", "a"], stop_token_ids=[9])
    assert made.prompt_token_ids == (3, 1, 2)
    assert made.stop == ("b", "a")
    assert made.stop_token_ids == (9,)
    assert Delta(token_ids=[1, 2], texts=["a", "b"]).text == "ab"  # type: ignore[arg-type]


def test_maps_become_what_crosses_the_wire() -> None:
    assert Sampling(logit_bias={7: -1, 3: 0.5}).logit_bias == ((7, -1.0), (3, 0.5))
    assert Sampling(logit_bias=[[7, -1.0]]).logit_bias == ((7, -1.0),)  # type: ignore[list-item]
    assert Guide(json_schema={"type": "object", "é": [1]}).json_schema == '{"type": "object", "\\u00e9": [1]}'
    assert Guide(json_schema='{"type":"object"}').json_schema == '{"type":"object"}'


def test_a_sequence_is_called_a_list() -> None:
    with pytest.raises(InvalidRequest, match="stop: Input should be a valid list"):
        request(stop="END")
    with pytest.raises(InvalidRequest, match="stop: List should have at most 8 items"):
        request(stop=["a"] * 9)


def test_messages_of_a_chat_may_be_objects_or_maps() -> None:
    turn = ChatMessage(role="system", content="Be kind.")
    made = request(prompt=None, messages=[turn, {"role": "user", "content": "Hi"}])
    assert made.messages == (turn, ChatMessage(role="user", content="Hi"))


def test_defaults() -> None:
    made = envelope()
    assert (made.tenant, made.lane, made.stream, made.on_restart) == ("default", "normal", False, "restart")
    assert (made.deadline_ms, made.result_ttl_ms) == (600_000, 600_000)
    asked = made.request
    assert isinstance(asked, GenerateRequest)
    assert asked.sampling == Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=None)
    assert (asked.max_tokens, asked.include_stop, asked.logprobs) == (128, False, False)
    assert asked.sampling == Sampling(
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        bad_words=(),
    )
    assert (asked.min_tokens, asked.n, asked.truncate, asked.guide, asked.top_logprobs) == (
        0,
        1,
        None,
        None,
        0,
    )
    assert (asked.ignore_eos, asked.echo, asked.skip_special_tokens) == (False, False, True)


def test_a_fresh_rid_is_valid_and_unique() -> None:
    rids = {new_rid() for _ in range(1000)}
    assert len(rids) == 1000
    assert all(envelope(rid=rid).rid == rid for rid in rids)
    assert {rid[:2] for rid in rids} == {"00"}
    assert new_rid(255).startswith("ff")
    assert envelope().rid != envelope().rid


@pytest.mark.parametrize(
    ("end", "text", "token_ids", "reason"),
    [
        (End(state="done"), "", (), "stop"),
        (End(state="failed"), "", (), "error"),
        (End(state="dead"), "", (), "error"),
        (End(state="cancelled"), "", (), "cancelled"),
        (End(state="expired"), "", (), "expired"),
        (
            End(
                state="done",
                choices=(
                    Choice(text="ab", token_ids=(1, 2), finish_reason="stop"),
                    Choice(index=1, text="c", token_ids=(3,), finish_reason="length"),
                ),
            ),
            "ab",
            (1, 2),
            "stop",
        ),
        (
            End(
                state="cancelled",
                choices=(Choice(text="a", token_ids=(1,), finish_reason="cancelled"),),
            ),
            "a",
            (1,),
            "cancelled",
        ),
    ],
)
def test_an_end_answers_for_its_first_choice(
    end: End, text: str, token_ids: tuple[int, ...], reason: str
) -> None:
    assert (end.text, end.token_ids, end.finish_reason) == (text, token_ids, reason)


def test_an_envelope_around_another_request_is_one_that_was_made_for_it() -> None:
    template = envelope(rid=RID, lane="high", retry=Retry(attempts=1))
    other = request(prompt="other")
    made = template.around("00" + "1" * 32, other)
    assert made == Envelope(rid="00" + "1" * 32, lane="high", retry=Retry(attempts=1), request=other)
    assert made.model_fields_set == template.model_fields_set
    assert template.request != other
    assert made.model_copy(update={"lane": "bulk"}).lane == "bulk"
    assert made.lane == "high"


def test_ids_that_are_made_together_are_all_different() -> None:
    rids = new_rids(100, shard=7)
    assert len(set(rids)) == 100
    assert all(re.fullmatch("07[0-9a-f]{32}", rid) for rid in rids)
    assert new_rids(0) == []
