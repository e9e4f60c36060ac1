"""What is promised about each request (I1 to I5 and I10), looked for in a history.

Each function gives what breaks its promise: the request, and why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from chaos.history import History, Order, Reading
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Delta, End, Start

GRACE_MS = 5000
OUTAGE_ERRORS = frozenset({"broker_unavailable"})
"""What a caller may be told although the request went well: Redis could not be asked."""
CODES = {
    "failed": {"generation_failed", "invalid_request"},
    "cancelled": {"cancelled"},
    "expired": {"deadline_exceeded"},
    "dead": {"generation_failed"},
}
"""What a caller is told of an end."""
_SIGNED = re.compile(r" ?(\w+?)(\d+)~(\d+)\.(\d+)")

Broken = Iterator[tuple[str, str]]


def ends_once(history: History) -> Broken:
    """I1: what was accepted ends exactly once, in time; the record, the log and the caller agree on it."""
    for rid in history.accepted():
        yield from _ended(history, rid)
    heard: dict[str, set[bytes]] = defaultdict(set)
    for rid, frame in _frames(history):
        if frame.is_end:
            heard[rid].add(_image(frame))
    for rid, images in heard.items():
        record = history.remains.record(rid)
        if len(images) > 1:
            yield rid, f"{len(images)} different ends"
        elif record is not None and record.end is not None and images != {_image(record.end)}:
            yield rid, "the end that was published is not the record's"
    for reading in history.readings:
        yield from _told(history, reading)


def _ended(history: History, rid: str) -> Broken:
    order, record = history.orders.get(rid), history.remains.record(rid)
    if record is None:
        yield rid, "accepted, but there is no record of it"
    elif record.end is None:
        yield rid, f"accepted, and still {record.state}"
    elif order is not None:
        late_ms = _end(record.end).ended_at_ms - record.accepted_at_ms
        if late_ms > order.deadline_ms + GRACE_MS + history.outage_ms:
            yield rid, f"ended {late_ms} ms after it was accepted, its deadline was {order.deadline_ms} ms"
        if record.state not in order.fates:
            yield rid, f"ended as {record.state}, not as one of {sorted(order.fates)}"


def _told(history: History, reading: Reading) -> Broken:
    rid = reading.rid
    if reading.gave_up or rid not in history.accepted():
        return
    record = history.remains.record(rid)
    if reading.end is None and reading.error is None:
        yield rid, "its caller was never told how it ended"
    elif record is None or record.end is None:
        return  # said above
    elif reading.end is not None:
        kept = _end(record.end)
        told = reading.end
        if (told.state, told.text, told.of) != (kept.state, kept.text, kept.of):
            yield rid, f"its caller was told {told.state} of epoch {told.of}, the record says {kept.state}"
    elif not _may_be_told(history, reading, record.state):
        yield rid, f"its caller was told {reading.error}, the record says {record.state}"


def _may_be_told(history: History, reading: Reading, state: str) -> bool:
    if reading.error in OUTAGE_ERRORS or reading.error in CODES.get(state, set()):
        return True
    # Two attempts that differ cannot make one text, and that is what the caller was told; he then leaves.
    order = history.orders.get(reading.rid)
    is_signed = order is not None and order.is_signed
    return state in {"done", "cancelled"} and is_signed and reading.how == "deltas" and reading.is_retryable


def logs_close_with_the_end(history: History) -> Broken:
    """I2: the end is the last of the log, and nothing comes after it."""
    for rid, log in history.remains.logs.items():
        record = history.remains.record(rid)
        if record is None or record.end is None:
            continue
        if not log or _image(log[-1]) != _image(record.end):
            last = log[-1].id if log else "nothing"
            yield rid, f"the log ends with {last}, the record with {record.end.id}"
        if any(frame.is_end for frame in log[:-1]):
            yield rid, "the log has an end before its last event"
    for rid in history.remains.grown_logs:
        yield rid, "the log has changed after its end"
    ended: dict[str, str] = {}
    for seen in history.sightings:
        if seen.rid in ended:
            yield seen.rid, f"{seen.frame.id} was published after the end {ended[seen.rid]}"
        elif seen.frame.is_end:
            ended[seen.rid] = seen.frame.id


def places_have_no_holes(history: History) -> Broken:
    """I3: places rise, and within an epoch they are 0, 1, 2, … without a hole; the end is alone in its."""
    for rid, log in history.remains.logs.items():
        before = (0, 0)
        for frame in log:
            here = (frame.epoch, frame.seq)
            if here <= before:
                yield rid, f"{frame.id} stands after {before[0]}-{before[1]} in the log"
            elif frame.epoch == before[0] and frame.seq != before[1] + 1:
                yield rid, f"{frame.id} follows {before[0]}-{before[1]}: there is a hole"
            elif frame.epoch > before[0] and frame.seq != int(frame.is_end):
                yield rid, f"epoch {frame.epoch} begins with {frame.id}"
            before = here
    heard: dict[str, tuple[int, int]] = {}
    for seen in history.sightings:
        here = (seen.frame.epoch, seen.frame.seq)
        if here <= heard.get(seen.rid, (0, -1)):
            yield seen.rid, f"{seen.frame.id} was published after {heard[seen.rid]}"
        heard[seen.rid] = here


def texts_are_whole(history: History) -> Broken:
    """I4: the text a caller saw is that of one attempt, and all of it if the request is done."""
    for reading in history.readings:
        end, text = reading.end, "".join(reading.shown)
        if end is None or reading.how == "answer":
            continue
        if end.state == "done" and text != end.text:
            yield reading.rid, f"its caller saw {text!r}, and the answer is {end.text!r}"
        made_in = {int(found[3]) for found in _SIGNED.finditer(text)}
        if len(made_in) > 1:
            yield reading.rid, f"its caller saw a text made in the epochs {sorted(made_in)}"


def one_worker_an_epoch(history: History) -> Broken:
    """I5: in each epoch one worker speaks, and it is the one that ends it."""
    starters: dict[str, dict[int, str]] = defaultdict(dict)
    for rid, frame in _frames(history):
        event = frame.event() if frame.seq == 0 and frame.body else None
        if isinstance(event, Start) and starters[rid].setdefault(frame.epoch, event.worker) != event.worker:
            yield rid, f"epoch {frame.epoch} was begun by two workers"
    for rid, frame in _frames(history):
        event = frame.event() if frame.body and not frame.times else None
        if isinstance(event, Delta):
            starter = starters[rid].get(frame.epoch)
            yield from _signatures(rid, event.text, frame.epoch, starter)
    for rid, record in history.remains.records.items():
        if record.end is None:
            continue
        end = _end(record.end)
        if end.of and record.end.epoch != end.of + 1:
            yield rid, f"an end of epoch {end.of} was written in epoch {record.end.epoch}"
        starter = starters[rid].get(end.of)
        if end.worker and starter and end.worker != starter:
            yield rid, f"epoch {end.of} was begun by {starter} and ended by {end.worker}"
        yield from _signatures(rid, end.text, end.of, end.worker)


def _signatures(rid: str, text: str, epoch: int, worker: str | None) -> Broken:
    for _, _, made_in, pid in _SIGNED.findall(text):
        if int(made_in) != epoch:
            yield rid, f"epoch {epoch} holds a token made in epoch {made_in}"
        if worker and pid != worker.split(":")[1]:
            yield rid, f"epoch {epoch} holds a token made by process {pid}, its worker is {worker}"


def the_right_prompt(history: History) -> Broken:
    """I10: an answer is that of its own prompt."""
    for rid, order in history.orders.items():
        record = history.remains.record(rid)
        if record is None:
            continue
        if order.digest and record.digest != order.digest:
            yield rid, "the record holds another request's digest"
        if record.state == "done" and record.end is not None:
            text = _end(record.end).text
            if _unsigned(text) != expected(order):
                yield rid, f"the answer to {order.count} of {order.word!r} is {text!r}"


def expected(order: Order) -> str:
    """The answer to an order, without signatures."""
    return " ".join(f"{order.word}{i}" for i in range(order.count))


def _unsigned(text: str) -> str:
    return re.sub(r"~\d+\.\d+", "", text)


def _frames(history: History) -> Iterator[tuple[str, Frame]]:
    for rid, log in history.remains.logs.items():
        for frame in log:
            yield rid, frame
    for seen in history.sightings:
        yield seen.rid, seen.frame


def _image(frame: Frame) -> bytes:
    # A large frame is announced without its body.
    return f"{frame.id},{frame.times} ".encode() + frame.body


def _end(frame: Frame) -> End:
    event = frame.event()
    if not isinstance(event, End):
        raise TypeError(f"{frame.id} is no end")
    return event
