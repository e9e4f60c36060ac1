"""The span of a submission, in a service that traces with OpenTelemetry. Nothing is imported for it.

Where a span of the service's is active, each submission gets one beneath it, and the worker's spans go
beneath that one. It is the service's own tracer that makes it, and the service's sampler that decides.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from streamfleet_common.errors import Conflict, QueueFull, StreamfleetError
from streamfleet_common.submissions import Submitted
from streamfleet_common.trace_context import TraceContext
from streamfleet_common.tracing import SCOPE

if TYPE_CHECKING:
    from opentelemetry.trace import Span

API = "opentelemetry.trace"
_REFUSED = {"full": QueueFull.code, "conflict": Conflict.code}


class SubmitSpan:
    """A submission that is under way, from the look at the request until Redis has accepted it."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        self._span = span
        place = span.get_span_context()
        self.traceparent = str(TraceContext(place.trace_id, place.span_id, int(place.trace_flags)))

    def name_request(self, rid: str) -> None:
        """Say which request it is about."""
        self._span.set_attribute("streamfleet.rid", rid)
        self._span.set_attribute("messaging.message.id", rid)

    def submitted(self, outcome: Submitted | BaseException) -> None:
        """End with what became of it; of an error its code alone."""
        if isinstance(outcome, Submitted):
            self._span.set_attribute("streamfleet.outcome", outcome.outcome)
            fault = _REFUSED.get(outcome.outcome, "")
        else:
            fault = outcome.code if isinstance(outcome, StreamfleetError) else type(outcome).__name__
        if fault:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 (an extra)

            self._span.set_attribute("error.type", fault)
            self._span.set_status(Status(StatusCode.ERROR, fault))
        self._span.end()


def submit_span(queue: str, kind: str, tenant: str) -> SubmitSpan | None:
    """A span beneath the one that is active here; None if there is none."""
    api = sys.modules.get(API)
    if api is None:
        return None  # or a span of it would be active
    if not api.get_current_span().get_span_context().is_valid:
        return None
    span = api.get_tracer(SCOPE).start_span(
        "submit",
        kind=api.SpanKind.PRODUCER,
        attributes={
            "streamfleet.queue": queue,
            "streamfleet.kind": kind,
            "streamfleet.tenant": tenant,
            "messaging.system": "redis",
            "messaging.operation.type": "send",
            "messaging.operation.name": "submit",
            "messaging.destination.name": queue,
        },
    )
    return SubmitSpan(span)
