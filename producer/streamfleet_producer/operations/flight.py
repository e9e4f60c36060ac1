"""All that is known of one request, gathered from Redis."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamfleet_common.backlog import MOST_SEEN, Backlog
from streamfleet_common.backlog import Line as WaitingLine
from streamfleet_common.batch_notes import BatchNote
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, RequestNotFound
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, Start
from streamfleet_producer.intake import checked
from streamfleet_producer.operations.operator_broker import OperatorBroker

NOTED_LATE_MS = 10_000
"""A batch is noted a moment after its launch, and by then a fast request has ended."""
_LANE_LETTERS = {"h": "high", "n": "normal", "b": "bulk", "s": "solo"}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a request stands in its lane."""

    lane: str
    """Or "solo": it runs alone, since workers were lost under it."""
    place: int
    """1 is taken next."""
    waiting: int
    """How many wait in the lane, this one included."""
    is_cut: bool = False
    """There may be more: only the first `MOST_SEEN` of a stream are looked at."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One request. Times are milliseconds on the server's clock."""

    id: str
    queue: str
    record: Record
    now_ms: int
    end: End | None = None
    starts: tuple[Start, ...] | None = ()
    """Of its attempts, as far as its log has them; None where this user may not read that."""
    note: BatchNote | None = None
    """Of its batch: who else was in it."""
    line: Line | None = None
    """None unless it waits in one."""
    is_far: bool = False
    """It waits behind the first `MOST_SEEN` of its stream."""
    others: tuple[tuple[str, int], ...] = ()
    """What waits in the other lanes."""
    next_try_at_ms: int | None = None
    is_paused: bool = False
    ready: tuple[str, ...] = ()
    """Workers that take work now."""
    draining: tuple[str, ...] = ()
    ended_a_second: float = 0.0

    @property
    def neighbours(self) -> tuple[str, ...]:
        """The other requests of its batch, as far as they were noted."""
        return () if self.note is None else tuple(rid for rid in self.note.rids if rid != self.id)

    @property
    def neighbour_count(self) -> int:
        """How many they were in all."""
        return 0 if self.note is None else max(0, self.note.requests - 1)


async def gather(broker: OperatorBroker, rid: str) -> Flight:
    """Ask Redis all there is to know.

    Raises:
        RequestNotFound: there is no such request, or its result has expired.
        Undecodable: its record is none.
        BrokerUnavailable: Redis cannot be reached, or refuses this user.
    """
    record = await broker.record_of_any(checked(rid))
    if record is None:
        raise RequestNotFound(
            f"queue {broker.keys.queue!r} knows no request {rid}: it was never accepted there, or its result "
            "has expired (`--queue` names another queue)"
        )
    control = await broker.control()
    ready = tuple(worker for worker in control.workers if worker not in control.drains)
    flight = Flight(
        rid,
        broker.keys.queue,
        record,
        control.now_ms,
        is_paused=control.is_paused,
        ready=ready,
        draining=tuple(worker for worker in control.workers if worker in control.drains),
    )
    if record.end is not None:
        return await _ended(broker, flight, record.end)
    return await _open(broker, flight)


async def _ended(broker: OperatorBroker, flight: Flight, frame: Frame) -> Flight:
    try:
        event = frame.event()
    except InvalidRequest:  # of a far version
        return flight
    end = event if isinstance(event, End) else None
    note = None
    if end is not None and end.batch is not None:
        try:
            note = await broker.batch_note(
                end.batch.id,
                since_ms=end.started_at_ms,
                until_ms=end.ended_at_ms + NOTED_LATE_MS,
            )
        except BrokerUnavailable as error:
            if error.details.get("reason") != "forbidden":
                raise
    starts = await _starts(broker, flight) if flight.record.attempts > 1 else ()
    return replace(flight, end=end, note=note, starts=starts)


async def _open(broker: OperatorBroker, flight: Flight) -> Flight:
    record = flight.record
    flight = replace(flight, ended_a_second=await broker.ended_a_second())
    if record.is_stream and record.attempts:
        flight = replace(flight, starts=await _starts(broker, flight))
    if record.state != "queued":
        return flight
    if not record.place:
        return replace(flight, next_try_at_ms=await broker.next_try_at_ms(flight.id))
    return _in_line(flight, await broker.backlog())


async def _starts(broker: OperatorBroker, flight: Flight) -> tuple[Start, ...] | None:
    found = await broker.starts(flight.id, flight.record.epoch)
    return None if found is None else tuple(found)


def _in_line(flight: Flight, backlog: Backlog) -> Flight:
    """With where it stands, and what waits in the other lanes; with no line if a worker has just taken it."""
    waiting: dict[str, int] = {}
    cut: set[str] = set()
    for line in backlog.lines:
        lane = _lane_of(line)
        waiting[lane] = waiting.get(lane, 0) + len(line.rids)
        if len(line.rids) >= MOST_SEEN:
            cut.add(lane)
    letter = flight.record.place[:1]
    own = next(
        (_lane_of(line) for line in backlog.lines if flight.id in line.rids), _LANE_LETTERS[letter.lower()]
    )
    others = tuple((lane, count) for lane, count in waiting.items() if lane != own)
    place = backlog.positions().get(flight.id)
    if place is None:
        # Its own stream may hold more than was looked at.
        return replace(flight, is_far=own in cut, others=others)
    return replace(flight, line=Line(own, place, waiting[own], own in cut), others=others)


def _lane_of(line: WaitingLine) -> str:
    return _LANE_LETTERS[line.letter.lower()]
