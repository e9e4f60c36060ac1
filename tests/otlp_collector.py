"""A collector of OpenTelemetry's protocol over HTTP, which keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from spans import Kept


class Collector:
    """Has all spans in the order in which they came."""

    def __init__(self) -> None:
        self._spans: list[Kept] = []
        self._lock = threading.Lock()
        self.url = ""

    def spans(self) -> list[Kept]:
        with self._lock:
            return list(self._spans)

    def take(self, body: bytes) -> None:
        """Take an export."""
        said = ExportTraceServiceRequest.FromString(body)
        spans = []
        for of_resource in said.resource_spans:
            service = _attributes(of_resource.resource.attributes)["service.name"]
            for scoped in of_resource.scope_spans:
                spans += [_kept(span, service) for span in scoped.spans]
        with self._lock:
            self._spans += spans


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens at its `url`."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (theirs)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def _kept(span: Span, service: str) -> Kept:
    return Kept(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        service=service,
        trace_id=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex() or None,
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        error=span.status.message or None,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(one) for one in value.array_value.values)
    return getattr(value, kind)
