"""Questions and their answers on the wire."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfleet_common import codec
from streamfleet_common.chat import ChatMessage
from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import Message
from streamfleet_common.schemas import End, Envelope, GenerateRequest
from streamfleet_common.submissions import Submission

RID = "00" + "ab" * 16
QUESTION: dict[str, Any] = {"id": "q", "criteria": "Is it so?", "options": ["yes", "no"]}
REQUEST: dict[str, Any] = {"state": "s", "questions": [QUESTION]}
SURROGATE = "a\ud800"


def faults_of(kind: type[Message], values: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        kind(**values)
    faults: list[str] = caught.value.problems
    assert faults
    return faults


# --- what is taken


@pytest.mark.parametrize(
    ("kind", "rest", "field", "good", "bad"),
    [
        (DecideRequest, {}, "state", ["s", "s" * 200_000], ["", " \n", "s" * 200_001, 7, SURROGATE]),
        (
            DecideRequest,
            {},
            "state_json",
            ["{}", '"a"', "7", {"a": [1, None]}, {}, [], [1.5], 7, 0.5, True, "[" + "1," * 90_000 + "1]"],
            [
                "",
                "a",
                "{",
                "NaN",
                "[-Infinity]",
                {"a": math.nan},
                {"a": b"b"},
                b"{}",
                {"a": "s" * 200_000},
                "[" * 60_000,
                {"a": SURROGATE},
            ],
        ),
        (
            DecideRequest,
            {},
            "messages",
            [[{"role": "user", "content": ""}], [{"role": "tool", "content": "c"}] * 1000],
            [[], [{"role": "user", "content": "c"}] * 1001, [{"role": "root", "content": "c"}], "m"],
        ),
        (DecideRequest, REQUEST, "truncate", [False, True], [None, 1, "fit"]),
        (DecideRequest, REQUEST, "model", [None, "m" * 200], ["m" * 201]),
        (
            DecideRequest,
            {"state": "s"},
            "questions",
            [[], [{**QUESTION, "id": str(i)} for i in range(256)]],
            [[{**QUESTION, "id": str(i)} for i in range(257)], [QUESTION, QUESTION], QUESTION, None],
        ),
        (
            DecideRequest,
            {"state": "s"},
            "questions",
            [[{**QUESTION, "id": str(i), "options": [str(n) for n in range(256)]} for i in range(4)]],
            [
                [QUESTION]
                + [{**QUESTION, "id": str(i), "options": [str(n) for n in range(256)]} for i in range(4)]
            ],
        ),
        (
            DecideRequest,
            REQUEST,
            "temperatures",
            [[], {}, {2: 0.5, 256: 1000}, [[1, 2.5]], ((2, 1e-9),)],
            [
                {0: 1.0},
                {257: 1.0},
                {2: 0.0},
                {2: -1.0},
                {2: 1000.5},
                {2: math.inf},
                {"2": 1.0},
                [[2, 1.0], [2, 1.0]],
                [2, 1.0],
                None,
            ],
        ),
        (Question, QUESTION, "id", ["q", "q" * 200], ["", "q" * 201, 7, SURROGATE]),
        (Question, QUESTION, "type", ["choice", "yes_no"], ["", "multi", None]),
        (Question, QUESTION, "criteria", ["c", "c" * 20_000], ["", " \n", "c" * 20_001, SURROGATE]),
        (
            Question,
            QUESTION,
            "options",
            [["a"], ["a", " a"], ["a" * 1000], [str(n) for n in range(256)]],
            [[], [""], [" "], ["a", "b", "a"], ["a" * 1001], [str(n) for n in range(257)], "ab", [SURROGATE]],
        ),
        (
            Question,
            {"id": "q", "criteria": "c", "type": "yes_no"},
            "options",
            [[], ["a", "b"]],
            [["a"], ["a", "b", "c"]],
        ),
        (
            Decision,
            {"id": "q", "option": "a", "scores": {"a": -1.0}},
            "probabilities",
            [{"a": 0.0}, {"a": 1.0}],
            [{"a": -0.1}, {"a": 1.1}, {"a": math.nan}, {1: 0.5}, [["a", 0.5]]],
        ),
        (
            Decision,
            {"id": "q", "option": "a", "probabilities": {"a": 1.0}},
            "scores",
            [{"a": -1e308}],
            [{"a": -math.inf}, {"a": None}],
        ),
    ],
)
def test_bounds(
    kind: type[Message], rest: dict[str, Any], field: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        kind(**{**rest, field: value})
    for value in bad:
        assert any(field in fault for fault in faults_of(kind, {**rest, field: value})), value


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "none of them"),
        ({"state": "s", "state_json": "{}"}, "state and state_json"),
        ({"state_json": "{}", "messages": [{"role": "user", "content": "c"}]}, "state_json and messages"),
    ],
)
def test_there_is_exactly_one_state(fields: dict[str, Any], found: str) -> None:
    (fault,) = faults_of(DecideRequest, fields)
    assert fault == f"give exactly one of state, state_json and messages (found {found})"


def test_a_choice_needs_options_and_yes_no_has_its_own() -> None:
    (fault,) = faults_of(Question, {"id": "q", "criteria": "c"})
    assert fault == "options is empty: there is nothing to choose from"
    assert Question(id="q", criteria="c", type="yes_no").choices == ("yes", "no")
    assert Question(id="q", criteria="c", type="yes_no", options=["ja", "nein"]).choices == ("ja", "nein")


def test_faults_name_their_places_but_not_the_texts() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(
            msgpack.packb(
                {
                    "v": 1,
                    "rid": RID,
                    "request": {
                        "kind": "decide",
                        "state": 5,
                        "questions": [{**QUESTION, "options": ["SECRET", "SECRET"]}, {"id": "r", "wrong": 1}],
                    },
                }
            )
        )
    assert [fault.partition(":")[0] for fault in caught.value.problems] == [
        "request.state",
        "request.questions.0",
        "request.questions.1.criteria",
        "request.questions.1.wrong",
    ]
    assert "SECRET" not in str(caught.value)


def test_a_json_value_becomes_the_text_that_stands_for_it() -> None:
    value = {"name": "Zoë", "tags": ["a", None], "n": 1.5}
    made = DecideRequest(state_json=value)
    assert json.loads(str(made.state_json)) == value
    assert "Zoë" in made.text
    assert DecideRequest(state_json=' {"as": "it is"} ').text == ' {"as": "it is"} '


def test_a_chat_is_told_turn_by_turn() -> None:
    turns = [ChatMessage(role="user", content="Hi\nthere"), ChatMessage(role="assistant", content="Hello")]
    assert DecideRequest(messages=turns).text == "user: Hi\nthere\nassistant: Hello"


def test_temperatures_go_by_the_number_of_options() -> None:
    made = DecideRequest(**{**REQUEST, "temperatures": {2: 0.5, 3: 2.0}})
    assert [made.temperature(count) for count in (1, 2, 3)] == [1.0, 0.5, 2.0]


# --- on the wire


def test_a_decide_request_by_hand() -> None:
    by_hand = {
        "v": 1,
        "rid": RID,
        "request": {
            "kind": "decide",
            "state": "s",
            "questions": [{"id": "q", "criteria": "Is it so?", "options": ["yes", "no"]}],
            "temperatures": [[2, 1.5]],
        },
    }
    expected = Envelope(rid=RID, request=DecideRequest(**{**REQUEST, "temperatures": {2: 1.5}}))
    assert codec.decode_envelope(msgpack.packb(by_hand)) == expected
    assert msgpack.unpackb(codec.encode(expected)) == by_hand


def test_a_request_without_a_kind_generates() -> None:
    payload = msgpack.packb({"v": 1, "rid": RID, "request": {"prompt": "Hi"}})
    assert codec.decode_envelope(payload).request == GenerateRequest(prompt="Hi")


@pytest.mark.parametrize(
    "request_",
    [None, [], "decide", {"kind": "delete"}, {"kind": None}, {"kind": ["decide"]}, {"kind": b"decide"}],
)
def test_an_unknown_kind_is_told(request_: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(msgpack.packb({"v": 1, "rid": RID, "request": request_}))
    assert caught.value.problems == [
        "request: a map is wanted whose kind is one of generate, decide, embed, classify, rerank and call"
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
STATES = st.one_of(
    st.fixed_dictionaries({"state": TEXTS}),
    st.fixed_dictionaries({"state_json": st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2)}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1)}
    ),
)
QUESTIONS = st.fixed_dictionaries(
    {"id": TEXTS, "criteria": TEXTS, "options": st.lists(TEXTS, min_size=2, max_size=2, unique=True)},
    optional={"type": st.sampled_from(["choice", "yes_no"])},
)
REQUESTS = st.builds(
    lambda state, others: DecideRequest(**state, **others),
    STATES,
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.none() | TEXTS,
            "questions": st.lists(QUESTIONS, max_size=3, unique_by=lambda question: question["id"]),
            "temperatures": st.dictionaries(st.integers(1, 256), st.floats(0.1, 10), max_size=3),
            "truncate": st.booleans(),
        },
    ),
)


@settings(max_examples=200, deadline=None)
@given(REQUESTS)
def test_any_request_comes_back_with_its_defaults_left_out(request_: DecideRequest) -> None:
    envelope = Envelope(rid=RID, request=request_)
    packed = codec.encode(envelope)
    assert codec.decode_envelope(packed) == envelope
    fields = request_.model_dump(exclude_defaults=True)
    assert packed == msgpack.packb({"v": 1, "rid": RID, "request": {**fields, "kind": "decide"}})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, st.dictionaries(TEXTS, st.floats(-1e9, 0), min_size=1, max_size=4)), max_size=3)
)
def test_answers_keep_their_order_and_their_bits(given_: list[tuple[str, dict[str, float]]]) -> None:
    answers = tuple(
        Decision(
            id=name,
            option=next(iter(scores)),
            probabilities={option: 1 / len(scores) for option in scores},
            scores=scores,
        )
        for name, scores in given_
    )
    end = codec.decode_event(codec.encode(End(state="done", answers=answers)))
    assert isinstance(end, End)
    assert end.answers == answers
    for answer, (_, scores) in zip(end.answers, given_, strict=True):
        assert list(answer.scores) == list(scores)
        assert list(answer.probabilities) == list(scores)


def test_equal_requests_have_equal_digests() -> None:
    def digest(**fields: Any) -> str:
        return codec.encode_envelope(Envelope(request=DecideRequest(**{**REQUEST, **fields})))[1]

    assert digest() == digest(truncate=False, temperatures={})
    assert digest() == digest(questions=[Question(**QUESTION)])
    assert digest(temperatures={2: 2.0}) == digest(temperatures=[[2, 2.0]])
    assert len({digest(), digest(truncate=True), digest(state="t"), digest(questions=[])}) == 4


def test_tokens_are_estimated_from_all_texts_that_are_read() -> None:
    request = DecideRequest(
        state="s" * 100,
        questions=[
            Question(id="a" * 50, criteria="c" * 30, options=["o" * 11, "p" * 6]),
            Question(id="b", criteria="c" * 20, type="yes_no"),
        ],
    )
    # 100 + 30 + 11 + 6 + 20 + 3 ("yes") + 2 ("no") characters, four to a token.
    assert Submission.of(Envelope(request=request)).tokens == 43
