"""Every error survives the wire and a copy, and an odd peer cannot make reading one fail."""

from __future__ import annotations

import copy
import inspect
from pathlib import PurePosixPath
from typing import Any

import pytest

from streamfleet_common import codec, errors
from streamfleet_common.connections import Connections
from streamfleet_common.errors import (
    BrokerUnavailable,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    StreamfleetError,
    TooLong,
    from_wire,
)
from streamfleet_common.schemas import End, Failure

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StreamfleetError) and kind.__module__ == errors.__name__
]
NEEDS: dict[type[StreamfleetError], dict[str, Any]] = {
    TooLong: {"prompt_tokens": 90, "max_tokens": 20, "limit": 100},
    GenerationFailed: {"retryable": True},
}
DETAILS: dict[str, Any] = {
    "text": "é",
    "number": -(2**63),
    "share": 0.5,
    "flag": True,
    "nothing": None,
    "known": ["a", "b"],
    "empty": [],
}


def make(kind: type[StreamfleetError]) -> StreamfleetError:
    return kind("what happened", **{**NEEDS.get(kind, {}), **DETAILS})


def over_the_wire(error: StreamfleetError) -> StreamfleetError:
    event = codec.decode_event(codec.encode(End(state="failed", error=Failure.of(error))))
    assert isinstance(event, End)
    assert event.error is not None
    return event.error.error()


def assert_same(got: StreamfleetError, error: StreamfleetError) -> None:
    assert type(got) is type(error)
    assert got.message == error.message
    assert str(got) == str(error)
    assert got.args == error.args
    assert got.details == error.details
    assert got.retryable == error.retryable


@pytest.mark.parametrize("kind", KINDS)
def test_survives_the_wire(kind: type[StreamfleetError]) -> None:
    error = make(kind)
    got = over_the_wire(error)
    assert_same(got, error)
    assert got.known == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: type[StreamfleetError]) -> None:
    error = make(kind)
    assert_same(copy.copy(error), error)
    deep = copy.deepcopy(error)
    assert_same(deep, error)
    deep.details["known"].append("c")
    assert error.known == ["a", "b"]


def test_codes_are_told_apart() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


def test_the_docstring_draws_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = [line.split("── ")[1].split()[0] for line in errors.__doc__.splitlines() if "── " in line]
    assert sorted(drawn) == sorted(kind.__name__ for kind in KINDS if kind is not StreamfleetError)


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        ("TooLong", "InvalidRequest"),
        ("Unsupported", "InvalidRequest"),
        ("Undecodable", "InvalidRequest"),
        ("TokenizerFailed", "ModelLoadFailed"),
    ],
)
def test_the_tree(child: str, parent: str) -> None:
    assert issubclass(getattr(errors, child), getattr(errors, parent))


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_sent_again(kind: type[StreamfleetError]) -> None:
    retryable = {"QueueFull", "DeadlineExceeded", "IncompleteGeneration", "BrokerUnavailable"}
    assert kind.retryable == (kind.__name__ in retryable)


def test_a_failed_generation_says_itself_whether_it_may_be_sent_again() -> None:
    assert GenerationFailed("x", retryable=True).retryable is True
    assert GenerationFailed("x").retryable is False
    assert over_the_wire(GenerationFailed("x", retryable=True)).retryable is True


# --- details as attributes


def test_details_read_like_attributes() -> None:
    error = QueueFull("full", limit=8, retry_after=1.5)
    assert (error.limit, error.retry_after) == (8, 1.5)
    assert not hasattr(error, "known")
    with pytest.raises(AttributeError, match="QueueFull has no detail 'known'"):
        _ = error.known


def test_an_error_without_its_constructor_has_attributes_to_miss() -> None:
    bare = QueueFull.__new__(QueueFull)
    with pytest.raises(AttributeError):
        _ = bare.details  # no endless recursion


def test_a_detail_cannot_hide_what_an_error_is() -> None:
    error = QueueFull("full", code="other", args=["x"])
    assert error.code == "queue_full"
    assert error.args == ("full",)


# --- messages


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "way_out"),
    [
        (90, 20, "ask for at most 10 tokens, or shorten the prompt to at most 80 tokens"),
        (99, 20, "ask for at most 1 tokens, or shorten the prompt to at most 80 tokens"),
        (100, 20, ": shorten the prompt to at most 80 tokens"),
        (500, 99, ": shorten the prompt to at most 1 tokens"),
        (90, 100, ": ask for at most 10 tokens"),
        (100, 100, ": shorten the prompt, and ask for fewer tokens"),
    ],
)
def test_too_long_says_the_way_out(prompt_tokens: int, max_tokens: int, way_out: str) -> None:
    limit = 100
    error = TooLong(prompt_tokens=prompt_tokens, max_tokens=max_tokens, limit=limit)
    assert str(error).endswith(way_out)
    assert str(limit) in str(error)
    assert error.problems == [str(error)]


def test_an_unavailable_broker_always_has_a_reason() -> None:
    assert BrokerUnavailable("gone").reason == "unreachable"
    assert BrokerUnavailable("full", reason="out_of_memory").reason == "out_of_memory"
    with pytest.raises(BrokerUnavailable) as caught:
        Connections.open("http://nowhere")
    assert caught.value.reason == "bad_url"


def test_an_invalid_request_always_has_problems() -> None:
    assert InvalidRequest("bad").problems == ["bad"]
    assert InvalidRequest("bad", problems=("a", "b")).problems == ["a", "b"]


# --- odd peers


@pytest.mark.parametrize(
    "details",
    [
        {"message": "again"},
        {"self": "x"},
        {"args": 1, "__class__": "x"},
        {"problems": 7},
        {"code": "x"},
        {"limit": ("a",)},
        {},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_details_do_no_harm(kind: type[StreamfleetError], details: dict[str, Any]) -> None:
    error = from_wire(kind.code, "what happened", details)
    assert type(error) is kind
    assert str(error) == error.message == "what happened"
    if isinstance(error, InvalidRequest):
        assert error.problems
    assert_same(copy.copy(error), error)


def test_an_unknown_code_is_a_plain_error() -> None:
    error = from_wire("invented_later", "what happened", {"a": 1})
    assert type(error) is StreamfleetError
    assert (error.message, error.a, error.retryable) == ("what happened", 1, False)


def test_a_subclass_of_somebody_else_does_not_stand_for_its_parent() -> None:
    class OurOwnFull(QueueFull):
        pass

    assert type(from_wire("queue_full", "full", {})) is QueueFull
    del OurOwnFull


# --- what an engine may put into an error


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (2**70, str(2**70)),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (PurePosixPath("/models/a"), "/models/a"),
        ("\ud800x", "?x"),
        (b"bytes", "b'bytes'"),
        ((1, "b"), ["1", "b"]),
        ({"a"}, ["a"]),
        ({"a": 1}, "{'a': 1}"),
        (ValueError("x"), "x"),
    ],
)
def test_any_detail_can_be_sent(value: object, sent: object) -> None:
    assert over_the_wire(ModelNotFound("x", thing=value)).details == {"thing": sent}


def test_any_message_can_be_sent() -> None:
    assert str(over_the_wire(ModelNotFound("no \udcff model"))) == "no ? model"
    assert str(over_the_wire(ModelNotFound("é" * 5000))) == "é" * 4000


# --- whatever a handler raises

LONG_NAME: dict[str, Any] = {"n" * 1000: 1}
MANY_DETAILS: dict[str, Any] = {f"detail_{place}": "😀" * 100_000 for place in range(200)}


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("é" * 10_000_000),
        InvalidRequest("many", problems=["line"] * 200_000),
        InvalidRequest("long", problems=["😀" * 100_000] * 3),
        InvalidRequest("named", **LONG_NAME),
        InvalidRequest("details", **MANY_DETAILS),
    ],
    ids=["words", "lines", "long lines", "name", "details"],
)
def test_an_error_of_any_size_goes_into_a_result(error: StreamfleetError) -> None:
    got = over_the_wire(error)
    assert type(got) is InvalidRequest
    assert got.message == error.message[:4000]
    assert got.problems
    assert all(whole.startswith(line) for line, whole in zip(got.problems, error.problems, strict=False))
