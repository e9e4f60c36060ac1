"""What a client learns about a request besides its answer, and what it may say about one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from streamfleet_common.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    StreamfleetError,
)
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, Lane, Retry, State
from streamfleet_common.submissions import Submitted

DEADLINE_S = 600.0
RESULT_TTL_S = 600.0


class Options(TypedDict, total=False):
    """What may be said about a request besides itself. Times are seconds.

    `lane`: "high", "normal" (the default) or "bulk"; lanes are read by weight.
    `deadline_s`: from acceptance until the request ends as expired; 600 if not given.
    `result_ttl_s`: how long the answer stays readable after the end; 600 if not given.
    `on_restart`: "restart" (the default) runs a request again when its worker is lost; "fail" lets a stream
    that has shown text fail instead, with an error that may be retried. It does so wherever the server gives
    the request to another worker, also one that would go on to the bit: the server cannot tell.
    `retry`: how often a request may be tried, and how long to wait between two tries; a `Retry`, or "never"
    for one try only. If not given, lost workers are made good, and a failure that may be retried is, twice.
    `traceparent`: the caller's trace, as W3C Trace Context writes it.
    """

    lane: Lane
    deadline_s: float
    result_ttl_s: float
    on_restart: Literal["restart", "fail"]
    retry: Retry | Literal["never"]
    traceparent: str | None


@dataclass(frozen=True, slots=True)
class Ticket:
    """The receipt of a submission."""

    id: str
    state: State
    """"queued", or what the existing request had come to."""
    duplicate: bool
    """The idempotency key was used before, for the same request: nothing new was submitted."""
    depth: int
    """Accepted and unfinished requests of the queue, this one included; 0 for a duplicate."""

    @classmethod
    def of(cls, rid: str, submitted: Submitted) -> Ticket:
        return cls(rid, submitted.state, submitted.outcome == "duplicate", submitted.depth)


@dataclass(frozen=True, slots=True)
class Status:
    """Where a request stands. Times are milliseconds on the server's clock; 0 where it has not happened."""

    id: str
    queue: str
    state: State
    attempt: int
    """How many workers started it."""
    worker: str
    """The worker that runs it, or ran it; "" if there is none, or the end does not say."""
    accepted_at_ms: int
    started_at_ms: int
    deadline_at_ms: int
    """0 once it has ended."""
    ended_at_ms: int

    @classmethod
    def of(cls, rid: str, queue: str, record: Record) -> Status:
        times = record.end.times if record.end else ()
        end = record.end.event() if record.end else None
        return cls(
            id=rid,
            queue=queue,
            state=record.state,
            attempt=record.attempts,
            worker=end.worker if isinstance(end, End) else record.owner,
            accepted_at_ms=record.accepted_at_ms,
            started_at_ms=record.started_at_ms,
            deadline_at_ms=record.deadline_at_ms,
            ended_at_ms=times[2] if times else 0,
        )


def failure_of(end: End) -> StreamfleetError | None:
    """The error an end stands for; None if it is an answer."""
    if end.state == "done":
        return None
    if end.error is not None:
        return end.error.error()
    if end.state == "cancelled":
        return Cancelled("the request was cancelled")
    if end.state == "expired":
        return DeadlineExceeded("not answered before its deadline")
    return GenerationFailed(f"the request ended as {end.state}, and its worker gave no reason")
