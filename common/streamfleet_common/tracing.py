"""Spans for OpenTelemetry: whether a process sends any, and where to. Needs the extra `otel` to do so.

The variables are OpenTelemetry's own. `OTEL_EXPORTER_OTLP_ENDPOINT`, or the one of traces alone, switches
them on; the sampler, the bounds of the queue, headers and certificates are what the SDK reads itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SPOKEN = "http/protobuf"
FLUSH_S = 3.0
"""How long a process that ends waits for its last spans to be taken."""
SCOPE = "streamfleet"


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether these variables ask for spans."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp":
        return False
    return any(environment.get(name) for name in ENDPOINTS)


def provider(
    service: str, version: str, ids: IdGenerator | None = None, **about: str
) -> TracerProvider | None:
    """What makes spans and sends them, on a thread of its own; None if nobody asks for any.

    What cannot be sent is said in the log, and never a reason not to serve: the variables are often a whole
    cluster's.

    Args:
        service: what this process is called, unless `OTEL_SERVICE_NAME` says.
        version: of this package.
        ids: makes the ids of spans.
        about: further attributes of the process.
    """
    if not wanted(os.environ):
        return None
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), SPOKEN)
    if protocol != SPOKEN:
        _warn("no traces: of OTLP only http/protobuf is spoken", protocol=protocol)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError:
        warn_missing()
        return None
    said = {"service.version": version, **about}
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    if not named:
        said["service.name"] = service
    try:
        # Not ended by `atexit`, which would wait for a collector that is away.
        made = TracerProvider(resource=Resource.create(said), id_generator=ids, shutdown_on_exit=False)
        made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # noqa: BLE001 (whatever is wrong with a variable, there are requests to serve)
        _warn("no traces: OpenTelemetry cannot be set up", error=f"{type(error).__name__}: {error}")
        return None
    return made


def warn_missing() -> None:
    """Say that the packages are not there."""
    _warn("no traces: they need the extra `otel`, pip install 'streamfleet[otel]'")


def close(made: TracerProvider | None, limit_s: float = FLUSH_S) -> None:
    """Send what is left, for `limit_s` seconds at most. Blocks."""
    if made is None:
        return
    # On a thread, since the SDK's own limit is half a minute.
    closing = threading.Thread(target=made.shutdown, name="last-spans", daemon=True)
    closing.start()
    closing.join(limit_s)


def _warn(event: str, **details: str) -> None:
    import structlog  # noqa: PLC0415 (an extra)

    structlog.get_logger().warning(event, **details)
