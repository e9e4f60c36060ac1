"""The checker finds nothing in a sound history, and each kind of fault in one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.checker import INVARIANTS, check, summary
from chaos.history import Glimpse, History, Loss, Order, Probe, Reading, Remains, Reply, Sighting, Stream
from chaos.upkeep import innocents
from streamfleet_common import codec
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import Choice, Delta, End, EndState, Event, Failure, Start, Usage

ONE, TWO, BAD = "00" + "1" * 32, "00" + "2" * 32, "00" + "3" * 32
W1, W2 = "host:11:aa", "host:22:bb"


def frame(epoch: int, seq: int, event: Event, times: tuple[int, ...] = ()) -> Frame:
    return Frame(epoch, seq, codec.encode(event), times)


def start(epoch: int, worker: str = W1) -> Frame:
    return frame(epoch, 0, Start(worker=worker, model="m"), (1000, 1010, 1010, 1))


def delta(epoch: int, seq: int, text: str) -> Frame:
    return frame(epoch, seq, Delta(token_ids=(seq,), texts=(text,)))


def end_event(text: str, *, of: int = 1, worker: str = W1, state: EndState = "done") -> End:
    choice = Choice(text=text, token_ids=(1,), finish_reason="eos")
    error = None if state == "done" else Failure(code="generation_failed", message="m")
    usage = Usage(completion_tokens=int(state == "done"))
    return End(state=state, choices=(choice,), of=of, last_seq=2, worker=worker, error=error, usage=usage)


def end(epoch: int, text: str, *, ended: int = 1500, **fields: Any) -> Frame:
    return frame(epoch, 1, end_event(text, of=epoch - 1, **fields), (1000, 1010, ended, 1))


def record(
    closing: Frame,
    *,
    tenant: str = "a",
    digest: str = "d",
    attempts: int = 1,
    crashes: int = 0,
    solo: int = 0,
) -> Record:
    event = closing.event()
    assert isinstance(event, End)
    return Record(
        state=event.state,
        epoch=closing.epoch,
        tenant=tenant,
        accepted_at_ms=closing.times[0],
        started_at_ms=closing.times[1],
        attempts=attempts,
        crashes=crashes,
        solo_losses=solo,
        deadline_at_ms=0,
        owner="",
        digest=digest,
        end=closing,
    )


def sound() -> History:
    """A streaming request that was run twice, a one-shot of another tenant, and a poison."""
    history = History(lease_ms=2000)
    first = [start(1), delta(1, 1, "x0~1.11"), start(3, W2), delta(3, 1, "x0~3.22"), delta(3, 2, " x1~3.22")]
    one = end(4, "x0~3.22 x1~3.22", worker=W2)
    two = end(2, "y0")
    bad = end(9, "", state="dead", worker="")
    history.orders = {
        ONE: Order(ONE, "a", "x", 2, "d", stream=True, is_signed=True),
        TWO: Order(TWO, "b", "y", 1, "d"),
        BAD: Order(BAD, "a", "z", 3, "d", is_poison=True, fates=frozenset({"dead"})),
    }
    history.replies = [
        *(Reply(at, rid, "d", "accepted", at + 1) for at, rid in enumerate((ONE, TWO, BAD))),
        Reply(3, ONE, "d", "duplicate"),
        Reply(4, ONE, "e", "conflict"),
    ]
    history.readings = [
        Reading(ONE, "a", "events", ["x0~3.22", " x1~3.22"], restarts=1, end=parsed(one)),
        Reading(TWO, "b", "answer", end=parsed(two)),
        Reading(BAD, "a", "answer", error="generation_failed"),
    ]
    history.sightings = [
        *(Sighting("a", ONE, one_frame) for one_frame in (*first, one)),
        Sighting("b", TWO, two),
        Sighting("a", BAD, bad),
    ]
    history.losses = [
        Loss(W1, "poison", held={ONE: 1, BAD: 1}, freed_ms={ONE: 2100.0, BAD: 300.0}),
        *(Loss(f"host:{pid}:cc", "poison", held={BAD: epoch}, freed_ms={BAD: 900.0})
          for pid, epoch in ((33, 3), (44, 5), (55, 7))),
    ]  # fmt: skip
    history.glimpses = [Glimpse(1200, 3, 10, waiting=2, later=1, running={ONE: (3, W2)})]
    history.probes = [Probe("b", ONE, "request_not_found")]
    history.remains = Remains(
        records={
            ONE: record(one, attempts=2, crashes=1),
            TWO: record(two, tenant="b"),
            BAD: record(bad, attempts=4, crashes=4, solo=2),
        },
        logs={ONE: [*first, one]},
        streams={"high": Stream(consumers=[W1])},
        dead=[{"rid": BAD}],
        booked={"a": 2, "b": 1},
        charged={"a": 1, "b": 1},
        lives={f"r:{ONE}": 5, f"ev:{ONE}": 5, "s:high": -1, "sweep": -1, "usage:20260101": 5},
        clients=1,
        clients_before=1,
        stale_consumers_allowed={W1},
    )
    return history


def parsed(closing: Frame) -> End:
    event = closing.event()
    assert isinstance(event, End)
    return event


def set_record(rid: str, **fields: Any) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.remains.records[rid] = replace(history.remains.records[rid], **fields)

    return change


def reopen(history: History) -> None:
    set_record(TWO, state="running", owner=W1, end=None)(history)


def end_otherwise(rid: str, closing: Frame, **fields: Any) -> Callable[[History], None]:
    """The same end everywhere, but another one."""

    def change(history: History) -> None:
        history.remains.records[rid] = record(closing, **fields)
        if rid in history.remains.logs:
            history.remains.logs[rid][-1] = closing
        history.sightings = [
            Sighting(seen.tenant, rid, closing) if seen.rid == rid and seen.frame.is_end else seen
            for seen in history.sightings
        ]
        for reading in history.readings:
            if reading.rid == rid and reading.end is not None:
                reading.end = parsed(closing)

    return change


def order(rid: str, **fields: Any) -> Callable[[History], None]:
    def change(history: History) -> None:
        history.orders[rid] = replace(history.orders[rid], **fields)

    return change


def see(*sightings: Sighting) -> Callable[[History], None]:
    return lambda history: history.sightings.extend(sightings)


def log_of(*frames: Frame) -> Callable[[History], None]:
    return lambda history: history.remains.logs.update({ONE: [*frames, history.remains.logs[ONE][-1]]})


def glimpse(**fields: Any) -> Callable[[History], None]:
    return lambda history: history.glimpses.append(replace(history.glimpses[0], **fields))


def read(rid: str, **fields: Any) -> Callable[[History], None]:
    def change(history: History) -> None:
        (reading,) = (reading for reading in history.readings if reading.rid == rid)
        for name, value in fields.items():
            setattr(reading, name, value)

    return change


def remains(**fields: Any) -> Callable[[History], None]:
    def change(history: History) -> None:
        for name, value in fields.items():
            setattr(history.remains, name, value)

    return change


def lose(*losses: Loss) -> Callable[[History], None]:
    return lambda history: setattr(history, "losses", list(losses))


def both(*changes: Callable[[History], Any]) -> Callable[[History], None]:
    def change(history: History) -> None:
        for one in changes:
            one(history)

    return change


VIOLATIONS: dict[str, tuple[str, Callable[[History], Any]]] = {
    "no record": ("I1", lambda h: h.remains.records.pop(TWO)),
    "never ended": ("I1", reopen),
    "ended too late": ("I1", both(order(TWO, deadline_ms=100), end_otherwise(TWO, end(2, "y0", ended=6200)))),
    "ended otherwise": ("I1", order(TWO, fates=frozenset({"failed"}))),
    "ended twice": ("I1", see(Sighting("b", TWO, end(4, "y0")))),
    "another end published": (
        "I1",
        lambda h: h.sightings.__setitem__(-2, Sighting("b", TWO, end(2, "y0", state="failed"))),
    ),
    "never told": ("I1", read(TWO, end=None)),
    "told another state": ("I1", read(TWO, end=end_event("y0", state="failed"))),
    "told another error": ("I1", read(BAD, error="deadline_exceeded")),
    "told an error of what is done": (
        "I1",
        read(ONE, end=None, error="generation_failed", is_retryable=True),
    ),
    "an end in the midst of a log": ("I2", lambda h: h.remains.logs[ONE].insert(0, h.remains.logs[ONE][-1])),
    "log that stops": ("I2", lambda h: h.remains.logs[ONE].pop()),
    "log that grew": ("I2", lambda h: h.remains.grown_logs.add(ONE)),
    "published after the end": ("I2", see(Sighting("b", TWO, delta(9, 1, "y")))),
    "hole in the log": ("I3", log_of(start(3, W2), delta(3, 2, " x1~3.22"))),
    "log out of order": ("I3", log_of(start(3, W2), start(1))),
    "epoch without a start": ("I3", log_of(delta(3, 1, "x0~3.22"))),
    "published twice": (
        "I3",
        lambda h: h.sightings.insert(2, h.sightings[1]),
    ),
    "text with a hole": ("I4", read(ONE, shown=[" x1~3.22"])),
    "text not taken back": ("I4", read(ONE, shown=["x0~1.11", "x0~3.22", " x1~3.22"])),
    "text of two attempts": (
        "I4",
        read(ONE, shown=["x0~1.11", " x1~3.22"], end=end_event("x0~1.11 x1~3.22")),
    ),
    "two starts of an epoch": ("I5", see(Sighting("a", ONE, start(3, W1)))),
    "a token of another process": ("I5", log_of(start(3, W2), delta(3, 1, "x0~3.11"))),
    "a token of another epoch": ("I5", log_of(start(3, W2), delta(3, 1, "x0~1.22"))),
    "an end by another worker": ("I5", end_otherwise(ONE, end(4, "x0~3.22 x1~3.22", worker=W1))),
    "an end in another epoch": (
        "I5",
        end_otherwise(TWO, frame(5, 1, end_event("y0", of=1), (1000, 1, 2, 1))),
    ),
    "an answer made in another epoch": ("I5", end_otherwise(ONE, end(4, "x0~1.22 x1~3.22", worker=W2))),
    "an entry too many": ("I6", glimpse(waiting=3)),
    "an entry lost": ("I6", glimpse(later=0)),
    "still open": ("I6", remains(open=[TWO])),
    "an entry left": ("I6", remains(streams={"high": Stream(length=1)})),
    "pending left": ("I6", remains(streams={"high": Stream(pending=1)})),
    "backoff left": ("I6", remains(later=1)),
    "running, but not open": ("I6", reopen),
    "tenant still counted": ("I6", remains(tenants={"*": 3})),
    "booked twice": ("I6", remains(booked={"a": 3, "b": 1})),
    "never booked": ("I6", remains(booked={"a": 2})),
    "an answer for nothing": ("I6", remains(charged={"a": 1})),
    "charged twice": ("I6", remains(charged={"a": 2, "b": 1})),
    "charged for another": ("I6", remains(charged={"a": 1, "b": 1, "c": 1})),
    "more than was asked for": (
        "I6",
        both(
            end_otherwise(BAD, end(9, "", state="cancelled", worker=""), attempts=4, crashes=4, solo=2),
            remains(charged={"a": 5, "b": 1}),
        ),
    ),
    "booked for another": ("I6", remains(booked={"a": 2, "b": 1, "c": 1})),
    "too deep": ("I7", glimpse(limit=2)),
    "accepted twice": ("I7", lambda h: h.replies.append(Reply(9, ONE, "d", "accepted"))),
    "a wrong duplicate": ("I7", lambda h: h.replies.append(Reply(9, ONE, "e", "duplicate"))),
    "a wrong conflict": ("I7", lambda h: h.replies.append(Reply(9, ONE, "d", "conflict"))),
    "a crash without a loss": ("I8", set_record(TWO, crashes=1, attempts=0)),
    "a crash by a worker that lived": (
        "I8",
        both(set_record(TWO, crashes=1), glimpse(running={TWO: (1, W2)})),
    ),
    "alone more often than lost": ("I8", set_record(TWO, solo_losses=1)),
    "dead in company": ("I9", set_record(BAD, solo_losses=1)),
    "dead without a letter": ("I9", remains(dead=[])),
    "a letter of the living": ("I9", remains(dead=[{"rid": BAD}, {"rid": ONE}])),
    "an innocent dead": (
        "I9",
        both(order(BAD, is_poison=False), lambda h: setattr(h, "losses", h.losses[:2])),
    ),
    "poison that is done": ("I9", both(order(TWO, is_poison=True))),
    "another prompt's answer": ("I10", end_otherwise(TWO, end(2, "z0"), tenant="b")),
    "another digest": ("I10", set_record(TWO, digest="e")),
    "never recovered": ("I11", lambda h: h.losses[0].freed_ms.clear()),
    "recovered late": ("I11", lambda h: h.losses[0].freed_ms.update({ONE: 5000.0})),
    "a record for ever": ("I12", remains(lives={f"r:{ONE}": -1})),
    "a log for ever": ("I12", remains(lives={f"ev:{ONE}": -1})),
    "a key too many": ("I12", remains(lives={"later": -1})),
    "a consumer too many": ("I12", remains(streams={"high": Stream(consumers=[W1, W2])})),
    "a connection too many": ("I12", remains(clients=2)),
    "published to another": ("I13", see(Sighting("b", ONE, start(9)))),
    "read by another": ("I13", read(TWO, tenant="a")),
    "another's words": ("I13", read(TWO, shown=["x0"])),
    "another's record": ("I13", lambda h: h.probes.append(Probe("b", ONE, "done"))),
}


def test_nothing_is_found_in_a_sound_history() -> None:
    assert check(sound()) == []
    assert summary([]) == "none"


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_found(name: str) -> None:
    invariant, break_it = VIOLATIONS[name]
    history = sound()
    break_it(history)
    found = check(history)
    assert invariant in {violation.invariant for violation in found}, found
    assert invariant in summary(found)


def test_every_invariant_can_be_broken() -> None:
    assert {invariant for invariant, _ in VIOLATIONS.values()} == set(INVARIANTS)


def test_an_innocent_that_random_kills_explain_is_counted_and_not_a_violation() -> None:
    history = sound()
    order(BAD, is_poison=False)(history)
    assert innocents(history) == {BAD: False}
    for loss in history.losses:
        loss.cause = "kill"
    assert innocents(history) == {BAD: True}
    assert check(history) == []


def test_a_caller_may_be_told_of_an_outage_or_of_attempts_that_differ() -> None:
    history = sound()
    read(TWO, end=None, error="broker_unavailable")(history)
    read(ONE, end=None, error="generation_failed", is_retryable=True, how="deltas")(history)
    assert check(history) == []


def test_a_paused_worker_s_work_is_not_timed() -> None:
    history = sound()
    history.losses[0].freed_ms.clear()
    history.losses[0].is_watched = False
    assert check(history) == []


def test_a_history_is_kept_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "history"
    sound().write(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"seed": 0} in lines
    assert sum("readings" in line for line in lines) == 3
