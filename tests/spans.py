"""Spans kept in memory, by the OpenTelemetry of this process and by workers in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamfleet_worker.request_spans import RequestSpans, SpanIds

_memory = InMemorySpanExporter()


@dataclass(frozen=True)
class Kept:
    """A span as a collector would see it. Ids are hex digits, times nanoseconds."""

    name: str
    kind: str
    service: str
    trace_id: str
    id: str
    parent: str | None
    began: int
    ended: int
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str], ...]
    error: str | None
    """The description of an error's status."""
    is_error: bool

    @classmethod
    def of(cls, span: ReadableSpan) -> Kept:
        place, parent = span.context, span.parent
        assert place is not None
        return cls(
            name=span.name,
            kind=span.kind.name,
            service=str(span.resource.attributes["service.name"]),
            trace_id=f"{place.trace_id:032x}",
            id=f"{place.span_id:016x}",
            parent=None if parent is None else f"{parent.span_id:016x}",
            began=span.start_time or 0,
            ended=span.end_time or 0,
            attributes=dict(span.attributes or {}),
            links=tuple(
                (f"{one.context.trace_id:032x}", f"{one.context.span_id:016x}") for one in span.links
            ),
            error=span.status.description,
            is_error=span.status.status_code is trace.StatusCode.ERROR,
        )


def _ids(place: trace.SpanContext) -> tuple[str, str]:
    return f"{place.trace_id:032x}", f"{place.span_id:016x}"


def service_provider() -> TracerProvider:
    """The provider of this process, which can be set only once in its life."""
    current = trace.get_tracer_provider()
    if not isinstance(current, TracerProvider):
        current = _made("service")
        trace.set_tracer_provider(current)
    return current


def worker_spans(worker: str) -> RequestSpans:
    """Those of a worker, which has a provider of its own."""
    ids = SpanIds()
    return RequestSpans(_made("worker", ids), ids, "q", worker)


def kept() -> Iterator[Kept]:
    """All spans since `forget`, in the order of their ends."""
    return map(Kept.of, _memory.get_finished_spans())


def forget() -> None:
    _memory.clear()


def _made(service: str, ids: SpanIds | None = None) -> TracerProvider:
    provider = TracerProvider(resource=Resource({"service.name": service}), id_generator=ids)
    provider.add_span_processor(SimpleSpanProcessor(_memory))
    return provider
