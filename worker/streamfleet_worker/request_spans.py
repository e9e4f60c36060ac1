"""Spans of the requests that a worker has run, made once each of them is over. Needs the extra `otel`.

Nothing is made while a request runs: its flight record and a few times say all. All times are the server's,
so that the spans of several machines are in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from streamfleet_common.trace_context import TraceContext
from streamfleet_common.tracing import SCOPE

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from streamfleet_common.schemas import End
    from streamfleet_worker.publisher import Held

Left = Literal["lost", "handed_back"]
"""How a request is gone before its end: it is not this worker's any more (cancelled, expired or given to
another), or the worker has given it back."""

_OPERATIONS = {"embed": "embeddings", "generate": "text_completion"}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of an attempt. Times are nanoseconds on the server's clock."""

    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, AttributeValue]


class SpanIds(RandomIdGenerator):
    """Random ids, unless the next ones are said. For one thread alone."""

    def __init__(self) -> None:
        self.next_trace: int | None = None
        self.next_span: int | None = None

    def generate_trace_id(self) -> int:
        said, self.next_trace = self.next_trace, None
        return said or super().generate_trace_id()

    def generate_span_id(self) -> int:
        said, self.next_span = self.next_span, None
        return said or super().generate_span_id()


def attempt_id(rid: str, number: int) -> int:
    """The id of an attempt's span.

    It follows from the request, so that the next attempt, at another worker, can name it, though this one may
    end without a word.
    """
    return int.from_bytes(hashlib.blake2b(f"{rid}/{number}".encode(), digest_size=8).digest(), "big") or 1


class RequestSpans:
    """Makes the spans of one worker; to be used on its event loop alone.

    A request that came without a trace gets one of its own, whose id are the last 32 digits of the request's.

    Args:
        provider: what sends them; its id generator is `ids`.
        ids: of the spans.
        queue: whose requests these are.
        worker: who runs them.
    """

    def __init__(self, provider: TracerProvider, ids: SpanIds, queue: str, worker: str) -> None:
        self._tracer = provider.get_tracer(SCOPE)
        self._ids = ids
        self._queue = queue
        self._worker = worker

    def ended(self, held: Held, end: End, at: float) -> None:
        """A request's end is told; `at` is the loop's time, in seconds."""
        try:
            self._ended(held, end, at)
        except Exception as error:  # noqa: BLE001 (no request is worth less than its spans)
            self._fail(held, error)

    def left(self, held: Held, how: Left, at: float) -> None:
        """A request is gone before its end was told."""
        try:
            span = self._attempt(held, self._described(held) | {"streamfleet.outcome": how})
            self._close(span, held, [_queue_wait(held)], at)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(held, error)

    # --- parts

    def _fail(self, held: Held, error: Exception) -> None:
        log.warning("no spans of a request", rid=held.delivery.entry.rid, error=type(error).__name__)

    def _ended(self, held: Held, end: End, at: float) -> None:
        attributes = self._described(held) | _outcome(end)
        span = self._attempt(held, attributes)
        if end.error is not None:
            span.set_attribute("error.type", end.error.code)
            span.set_status(Status(StatusCode.ERROR, end.error.code))  # never its words
        self._close(span, held, _phases(held, end, at), at)

    def _attempt(self, held: Held, attributes: dict[str, AttributeValue]) -> Span:
        rid, number = held.delivery.entry.rid, held.delivery.attempts
        parent = TraceContext.parse(held.traceparent)
        context: Context | None = None
        if parent is not None:
            context = trace.set_span_in_context(_remote(parent))
            trace_id = parent.trace_id
        else:
            context = trace.set_span_in_context(trace.INVALID_SPAN)  # whatever this task was begun under
            self._ids.next_trace = trace_id = int(rid[-32:], 16)
        links = []
        if number > 1:
            before = TraceContext(trace_id, attempt_id(rid, number - 1))
            links.append(Link(_remote(before).get_span_context(), {"streamfleet.link": "attempt before"}))
        self._ids.next_span = attempt_id(rid, number)
        return self._tracer.start_span(
            "request",
            context,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            start_time=_ns(held.delivery.accepted_at_ms),
        )

    def _close(self, span: Span, held: Held, phases: list[_Phase], at: float) -> None:
        if span.is_recording():
            context = trace.set_span_in_context(span)
            for phase in phases:
                part = self._tracer.start_span(
                    phase.name, context, attributes=phase.attributes, start_time=phase.began_ns
                )
                part.end(phase.ended_ns)
        # Redis's clock may be set back between two of its times.
        span.end(max(_ns(held.delivery.accepted_at_ms), _server_ns(held, at)))

    def _described(self, held: Held) -> dict[str, AttributeValue]:
        delivery = held.delivery
        return {
            "streamfleet.rid": delivery.entry.rid,
            "streamfleet.queue": self._queue,
            "streamfleet.worker": self._worker,
            "streamfleet.tenant": held.tenant,
            "streamfleet.kind": held.kind,
            "streamfleet.stream": held.stream,
            "streamfleet.attempt": delivery.attempts,
            "messaging.system": "redis",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": self._queue,
            "messaging.message.id": delivery.entry.rid,
            "gen_ai.operation.name": _OPERATIONS.get(held.kind, held.kind),
            "gen_ai.provider.name": "streamfleet",
        }


def _remote(place: TraceContext) -> NonRecordingSpan:
    return NonRecordingSpan(
        SpanContext(place.trace_id, place.span_id, is_remote=True, trace_flags=TraceFlags(place.flags))
    )


def _ns(ms: float) -> int:
    return round(ms * 1_000_000)


def _server_ns(held: Held, at: float) -> int:
    """A time of this event loop, in seconds, on the server's clock."""
    return _ns(held.delivery.now_ms) + round((at - held.held_at) * 1e9)


def _outcome(end: End) -> dict[str, AttributeValue]:
    """What the end says, but nothing of what was asked or answered."""
    said: dict[str, AttributeValue] = {
        "streamfleet.outcome": end.state,
        "gen_ai.request.model": end.model,
        "gen_ai.response.model": end.model,
        "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": end.usage.completion_tokens,
        "streamfleet.cached_tokens": end.usage.cached_tokens,
        "streamfleet.model.revision": end.revision,
    }
    if end.choices:
        said["gen_ai.response.finish_reasons"] = [choice.finish_reason for choice in end.choices]
    return said | _batch(end)


def _batch(end: End) -> dict[str, AttributeValue]:
    if end.batch is None:
        return {}
    return {
        "streamfleet.batch.id": end.batch.id,
        "streamfleet.batch.size": end.batch.size,
        "streamfleet.batch.padded_ratio": end.batch.padded_ratio,
        "streamfleet.batch.reason": end.batch.reason,
    }


def _queue_wait(held: Held) -> _Phase:
    accepted_ns, taken_ns = _ns(held.delivery.accepted_at_ms), _ns(held.delivery.now_ms)
    return _Phase("queue wait", accepted_ns, max(accepted_ns, taken_ns), {})


def _phases(held: Held, end: End, at: float) -> list[_Phase]:
    """The parts of an attempt in their order, each from the end of the one before."""
    phases = [_queue_wait(held)]
    over_ns = _server_ns(held, at)
    computed_ns = _server_ns(held, held.finished_at) if held.finished_at else over_ns
    if held.prepared_at:
        prepared_ns = min(_server_ns(held, held.prepared_at), computed_ns)
        phases.append(_Phase("tokenize", _ns(held.delivery.now_ms), prepared_ns, {}))
        for name, until_ns, attributes in _computed(end, prepared_ns, computed_ns):
            phases.append(_Phase(name, phases[-1].ended_ns, until_ns, attributes))
    phases.append(_Phase("publish", computed_ns, over_ns, {}))
    return phases


def _computed(end: End, since_ns: int, computed_ns: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Of what happened in the engine: name, end and attributes."""
    timing = end.timing
    # Its clock is read at other moments than ours, so that a sum may reach beyond the end.
    at_ns = min(since_ns + _ns(timing.wait_ms), computed_ns)
    yield "wait", at_ns, {}
    if timing.batches:
        about = {"streamfleet.batches": timing.batches, "streamfleet.device_ms": timing.device_ms}
        yield "batch", computed_ns, about | _batch(end)
    if timing.prefill_ms or timing.decode_ms:
        at_ns = min(at_ns + _ns(timing.prefill_ms), computed_ns)
        yield "prefill", at_ns, _batch(end)
    if timing.decode_ms:
        at_ns = min(at_ns + _ns(timing.decode_ms), computed_ns)
        yield "decode", at_ns, {"gen_ai.usage.output_tokens": end.usage.completion_tokens}
