"""What a worker tells Prometheus. Names end as vLLM's do where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamfleet_common.broker import Depth
from streamfleet_common.schemas import End
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine_thread import Report

FINISH_REASONS = ("eos", "stop", "length")
ERROR_TYPES = (
    "cancelled",
    "deadline_exceeded",
    "generation_failed",
    "invalid_request",
    "model_not_found",
    "too_long",
    "undecodable",
    "unsupported",
)
# From a millisecond to the hours that a bulk queue may hold a request.
_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_STEPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class QueueDepth(Collector):
    """Reads the queue's depth at scrape time; what cannot be read is absent, never 0."""

    def __init__(self, queue: str, read: Callable[[], Depth | None]) -> None:
        self._queue = queue
        self._read = read

    def collect(self) -> Iterator[Metric]:
        depth = self._read()
        if depth is None:
            return
        by_state = GaugeMetricFamily(
            "streamfleet_queue_depth",
            "Accepted and unfinished requests of the queue.",
            labels=["queue", "state"],
        )
        by_state.add_metric([self._queue, "queued"], depth.queued)
        by_state.add_metric([self._queue, "running"], depth.running)
        yield by_state
        limit = GaugeMetricFamily(
            "streamfleet_queue_max_depth",
            "Accepted and unfinished requests at which the queue refuses more.",
            labels=["queue"],
        )
        limit.add_metric([self._queue], depth.limit)
        yield limit

    def describe(self) -> Iterator[Metric]:
        # Without it the registry would read Redis while the worker is being built.
        return iter(())


class Metrics:
    """One worker's metrics in a registry of their own; every series exists from the start."""

    def __init__(self, queue: str, info: EngineInfo, version: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = [queue]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"streamfleet_{name}", text, ["queue"], registry=self.registry).labels(queue)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"streamfleet_{name}", text, ["queue", *more], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"streamfleet_{name}", text, ["queue"], buckets=buckets, registry=self.registry
            ).labels(queue)

        self.running = gauge("num_requests_running", "Requests in the batch.")
        self.waiting = gauge("num_requests_waiting", "Requests pulled, but not yet in the batch.")
        self.since_poll = gauge("seconds_since_last_poll", "Age of the last completed look for work.")
        self.batch_size = histogram("batch_size", "Requests in one forward pass.", _SIZES)
        self.step = histogram("engine_step_seconds", "Time of one engine step.", _STEPS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.").labels(queue)
        self.generation_tokens = counter("generation_tokens", "Tokens generated.").labels(queue)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From acceptance to a worker, on the server's clock.", _WAITS
        )
        self.ttft = histogram("time_to_first_token_seconds", "From acceptance to the first token.", _WAITS)
        self.e2e = histogram("e2e_request_latency_seconds", "From acceptance to the end.", _WAITS)
        self._success = counter("request_success", "Requests answered.", "finished_reason")
        self._failure = counter("request_failure", "Requests that ended without an answer.", "error_type")
        self.fenced = counter("fenced_writes", "Writes refused: no longer ours.").labels(queue)
        for reason in FINISH_REASONS:
            self._success.labels(queue, reason)
        for kind in (*ERROR_TYPES, "other"):
            self._failure.labels(queue, kind)
        Info("streamfleet_build", "What this worker is.", registry=self.registry).info(
            {
                "version": version,
                "model": info.model,
                "revision": info.revision,
                "device": info.device,
                "precision": info.precision,
            }
        )

    def stepped(self, report: Report) -> None:
        """Count one step of the engine."""
        step = report.step
        self.step.observe(report.seconds)
        self.running.set(report.room.running)
        self.waiting.set(report.room.waiting)
        if step.rows:
            self.batch_size.observe(step.rows)
        self.prompt_tokens.inc(step.prompt_tokens)
        self.generation_tokens.inc(step.generated_tokens)

    def ended(self, end: End) -> None:
        """Count the end of one request."""
        if end.error is None:
            reason = end.finish_reason
            self._success.labels(*self._labels, reason if reason in FINISH_REASONS else "other").inc()
        else:
            # A code of another version must not make a new series.
            kind = end.error.code if end.error.code in ERROR_TYPES else "other"
            self._failure.labels(*self._labels, kind).inc()
