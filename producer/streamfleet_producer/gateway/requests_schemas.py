"""What the routes of requests take and tell."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamfleet_common.message import Name, QueueName
from streamfleet_common.schemas import End, Lane, Request, Retry, State
from streamfleet_producer.gateway.their_names import Rename, head_of
from streamfleet_producer.ticket import Options, Status, Ticket


class SubmitBody(BaseModel):
    """A request to be run, and what is said about it besides."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    request: Request
    """Any of the wire's; without a `kind` it is to generate."""
    queue: QueueName | None = None
    """Where it is to wait; else `model` finds it, or the request's own."""
    model: Annotated[Name, Field(min_length=1)] | None = None
    """A model, a handler or a queue."""
    stream: bool = False
    """Keep a log of its events, for whoever reads them."""
    lane: Lane | None = None
    deadline_s: float | None = None
    """Seconds from now on after which it ends as expired."""
    result_ttl_s: float | None = None
    """Seconds for which its answer stays readable after the end; 600 if not said."""
    on_restart: Literal["restart", "fail"] | None = None
    """What becomes of a text that has begun when its worker is lost."""
    retry: Retry | Literal["never"] | None = None
    """How often it may be tried."""

    def options(self, said: Options) -> Options:
        """What this says, and else what was `said`."""
        names: Any = ("lane", "deadline_s", "result_ttl_s", "on_restart", "retry")
        ours = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**said, **ours}


def request_names(body: SubmitBody) -> Rename:
    """The names of the fields of the request in it."""
    fields = type(body.request).model_fields.keys() - SubmitBody.model_fields.keys()

    def rename(problem: str) -> str:
        return f"request.{problem}" if head_of(problem) in fields else problem

    return rename


class Submitted(BaseModel):
    """The receipt."""

    id: str
    """Of the request, for the other routes."""
    state: State
    duplicate: bool
    """The idempotency key was used before, for the same request: this is that one."""
    position: int
    """So many requests of the queue are accepted and unfinished, this one included; 0 for a duplicate."""

    @classmethod
    def of(cls, queue: str, ticket: Ticket) -> Submitted:
        return cls(
            id=f"{queue}:{ticket.id}",
            state=ticket.state,
            duplicate=ticket.duplicate,
            position=ticket.depth,
        )


class RequestState(BaseModel):
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
    result: End | None
    """Once it has ended: its answer, or its `error`."""

    @classmethod
    def of(cls, status: Status, end: End | None) -> RequestState:
        return cls(
            id=f"{status.queue}:{status.id}",
            queue=status.queue,
            state=status.state,
            attempt=status.attempt,
            worker=status.worker,
            accepted_at_ms=status.accepted_at_ms,
            started_at_ms=status.started_at_ms,
            deadline_at_ms=status.deadline_at_ms,
            ended_at_ms=status.ended_at_ms,
            result=end,
        )


class CancelledState(BaseModel):
    """What became of a request that was to be cancelled."""

    id: str
    state: State
    """cancelled, or how it had ended before."""
