"""The events of a stream: one a token, in order, the last with the whole text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.schemas import Choice, Delta, End, FinishReason, Usage
from streamfleet_producer.gateway.tgi_answer import TokenWriter
from streamfleet_producer.gateway.tgi_schemas import TgiGenerateBody
from streamfleet_producer.gateway.tgi_stream import TgiEvents


def events(*, knows_ends: bool = True, full_text: bool = False, **parameters: Any) -> TgiEvents:
    body = TgiGenerateBody.model_validate_json(json.dumps({"inputs": "In", "parameters": parameters}))
    return TgiEvents(body, TokenWriter(), full_text=full_text, knows_ends=knows_ends)


def delta(*texts: str, first: int = 0) -> Delta:
    ids = tuple(range(first, first + len(texts)))
    return Delta(token_ids=ids, texts=texts, logprobs=tuple(-float(i) for i in ids))


def end(text: str, count: int, reason: FinishReason) -> End:
    choice = Choice(text=text, token_ids=tuple(range(count)), finish_reason=reason, seed=9)
    return End(state="done", choices=(choice,), usage=Usage(prompt_tokens=4, completion_tokens=count))


def texts_of(sent: list[dict[str, Any]]) -> list[str]:
    return [event["token"]["text"] for event in sent]


def test_a_token_that_cannot_be_the_last_is_sent_at_once() -> None:
    made = events(details=True)
    assert texts_of(list(made.of(delta("a")))) == ["a"]
    assert texts_of(list(made.of(delta("b", "c", first=1)))) == ["b", "c"]
    # Neither an end token nor half a character shows anything.
    assert texts_of(list(made.of(delta("", first=3)))) == []
    assert texts_of(list(made.of(delta("d", "", first=4)))) == ["", "d"]
    last = made.last(end("abcd", 6, "eos"))
    assert last == {
        "index": 6,
        "token": {"id": 5, "text": "", "logprob": -5.0, "special": True},
        "generated_text": "abcd",
        "details": {"finish_reason": "eos_token", "generated_tokens": 6, "seed": None, "input_length": 4},
    }


def test_the_last_token_that_may_be_is_known_by_its_number() -> None:
    made = events(max_new_tokens=2)
    assert texts_of(list(made.of(delta("a", "b")))) == ["a"]
    last = made.last(end("ab", 2, "length"))
    assert (last["index"], last["token"]["text"], last["token"]["special"]) == (2, "b", False)
    assert (last["generated_text"], last["details"]) == ("ab", None)


@pytest.mark.parametrize(
    ("stop", "knows_ends"), [(["X"], True), ([], False)], ids=["with stops", "an unknown worker"]
)
def test_any_token_waits_for_the_next_where_any_may_be_the_last(stop: list[str], knows_ends: bool) -> None:
    made = events(stop=stop, knows_ends=knows_ends)
    assert texts_of(list(made.of(delta("a")))) == []
    assert texts_of(list(made.of(delta("b", "c", first=1)))) == ["a", "b"]
    last = made.last(end("abc", 3, "stop"))
    assert (last["index"], last["token"]["text"], last["token"]["special"]) == (3, "c", False)


def test_an_end_token_with_text_is_not_special_since_clients_would_leave_that_out() -> None:
    made = events(stop=["END"])
    sent = list(made.of(delta("a", "", "EN")))
    last = made.last(end("aEN", 3, "eos"))
    assert texts_of([*sent, last]) == ["a", "", "EN"]
    assert not last["token"]["special"]


def test_an_unfinished_character_may_be_all_that_the_end_token_shows() -> None:
    made = events()
    assert texts_of(list(made.of(delta("a", "\ufffd")))) == ["a"]
    assert made.last(end("a\ufffd", 2, "eos"))["token"]["text"] == "\ufffd"


def test_a_worker_that_ends_as_none_should_gets_an_event_more() -> None:
    made = events()
    assert texts_of(list(made.of(delta("a", "b")))) == ["a", "b"]
    last = made.last(end("ab", 2, "eos"))
    assert (last["index"], last["token"]["text"], last["token"]["special"]) == (3, "", True)
    assert last["generated_text"] == "ab"


def test_a_text_without_a_token_comes_with_the_next_one() -> None:
    made = events()
    sent = list(made.of(Delta(token_ids=(1,), texts=("a", "EN"), logprobs=(-1.0,))))
    sent += list(made.of(delta("D", "b", first=2)))
    assert texts_of(sent) == ["a", "END", "b"]


def test_the_prompt_stands_before_the_whole_text_alone() -> None:
    made = events(full_text=True, max_new_tokens=1)
    assert list(made.of(delta("a"))) == []
    last = made.last(end("a", 1, "length"))
    assert (last["token"]["text"], last["generated_text"]) == ("a", "Ina")


def test_the_seed_is_told_where_one_was_used() -> None:
    made = events(details=True, do_sample=True, max_new_tokens=1)
    assert list(made.of(delta("a"))) == []
    assert made.last(end("a", 1, "length"))["details"]["seed"] == 9


def test_what_broke_off_is_no_answer() -> None:
    made = events()
    with pytest.raises(IncompleteGeneration):
        made.last(end("", 0, "eos"))
    list(made.of(delta("a")))
    with pytest.raises(IncompleteGeneration):
        made.last(end("a", 1, "error"))
