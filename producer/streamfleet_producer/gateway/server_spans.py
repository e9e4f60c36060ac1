"""Spans of HTTP requests. Needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streamfleet_common.trace_context import TraceContext
from streamfleet_common.tracing import SCOPE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

    from streamfleet_producer.gateway.passage import Passage

_CARRIED = {b"traceparent", b"tracestate"}
_PROPAGATOR = TraceContextTextMapPropagator()


class ServerSpans:
    """Begins the span of each request, beneath the one that its header names, if it names one."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer(SCOPE)

    def begin(self, method: str, route: str, headers: Iterable[tuple[bytes, bytes]]) -> ServerSpan:
        """The span of a request, active in this task from now on: what is submitted goes beneath it."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CARRIED}
        # Not beneath what this task may have been begun under.
        parent = _PROPAGATOR.extract(carrier, context=context.Context())
        return ServerSpan(self._tracer, method, route, parent)


class ServerSpan:
    """The span of one HTTP request."""

    def __init__(self, tracer: Tracer, method: str, route: str, parent: context.Context) -> None:
        self._span = tracer.start_span(
            f"{method} {route}",
            parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        self._token = context.attach(trace.set_span_in_context(self._span, parent))
        place = self._span.get_span_context()
        self.trace_id = f"{place.trace_id:032x}"
        said = TraceContext(place.trace_id, place.span_id, int(place.trace_flags))
        self.response_header = (b"traceresponse", str(said).encode())
        """What tells the caller where to look, as the draft of Trace Context's second level has it."""

    def end(self, passage: Passage) -> None:
        """End it, with what became of the request. In the task that began it."""
        attributes: dict[str, AttributeValue] = {"http.response.status_code": passage.status}
        if passage.tenant:
            attributes["streamfleet.tenant"] = passage.tenant
        if passage.requests:
            attributes["streamfleet.queue"], attributes["streamfleet.rid"] = passage.requests[0]
            attributes["streamfleet.requests"] = len(passage.requests)
        if passage.error:
            attributes["error.type"] = passage.error
            # What is the caller's fault is none of ours, says OpenTelemetry.
            if passage.status >= 500 or passage.status < 400:
                self._span.set_status(Status(StatusCode.ERROR, passage.error))
        self._span.set_attributes(attributes)
        self._span.end()
        context.detach(self._token)
