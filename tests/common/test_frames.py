"""Frames, made by hand as the scripts make them."""

from __future__ import annotations

import msgpack
import pytest

from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Delta, End, Start

DELTA = msgpack.packb({"v": 1, "type": "delta", "token_ids": [5], "texts": ["a b"]})
START = msgpack.packb({"v": 1, "type": "start", "worker": "w", "model": "m", "queued_at_ms": 1})
END = msgpack.packb({"v": 1, "type": "end", "state": "done", "attempt": 9, "ended_at_ms": 9})


def test_an_event_between() -> None:
    frame = Frame.parse(b"3-17 " + DELTA)
    assert frame == Frame(3, 17, DELTA, ())
    assert frame.id == "3-17"
    assert frame.event() == Delta(token_ids=(5,), texts=("a b",))


def test_a_start_has_the_times_of_its_head() -> None:
    frame = Frame.parse(b"1-0,1754000000001,1754000000002,1754000000002,1 " + START)
    assert frame.id == "1-0"
    assert frame.times == (1754000000001, 1754000000002, 1754000000002, 1)
    assert frame.event() == Start(
        worker="w", model="m", queued_at_ms=1754000000001, started_at_ms=1754000000002
    )


def test_an_end_has_the_times_and_attempts_of_its_head() -> None:
    frame = Frame.parse(b"4-1,1754000000001,1754000000002,1754000000009,3 " + END)
    assert frame.event() == End(
        state="done",
        queued_at_ms=1754000000001,
        started_at_ms=1754000000002,
        ended_at_ms=1754000000009,
        attempt=3,
    )


def test_an_end_of_a_request_that_never_started() -> None:
    event = Frame.parse(b"1-1,1754000000001,0,1754000000009,0 " + END).event()
    assert isinstance(event, End)
    assert (event.started_at_ms, event.attempt) == (0, 0)


def test_a_frame_without_a_body_is_an_announcement() -> None:
    frame = Frame.parse(b"2-5 ")
    assert (frame.id, frame.body) == ("2-5", b"")
    with pytest.raises(Undecodable):
        frame.event()


def test_a_body_may_hold_anything() -> None:
    assert Frame.parse(b"1-1 a b\n|1-2 c").body == b"a b\n|1-2 c"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"1-1",
        b"1 body",
        b"- body",
        b"1- body",
        b"-1 body",
        b"1--1 body",
        b"+1-1 body",
        b"1_0-1 body",
        b"a-1 body",
        b"1-a body",
        b"1-1, body",
        b"1-1,1 body",
        b"1-1,1,2,3 body",
        b"1-1,1,2,3,4,5 body",
        b"1-1,1,2,3,-4 body",
        b"1-1,1,2,3,x body",
        "\u0661-\u0661 body".encode(),
        b"9" * 5000 + b"-1 body",
        b"\xff\xfe\x00",
    ],
)
def test_no_frame(data: bytes) -> None:
    with pytest.raises(Undecodable, match="not a frame"):
        Frame.parse(data)


def test_a_body_that_is_no_event() -> None:
    with pytest.raises(InvalidRequest):
        Frame.parse(b"1-1 " + msgpack.packb({"v": 1, "type": "nonsense"})).event()
    with pytest.raises(Undecodable):
        Frame.parse(b"1-1 \xc1").event()
