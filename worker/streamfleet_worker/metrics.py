"""What a worker tells Prometheus. Names end as vLLM's do where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamfleet_common.deliveries import Delivery, NotStarted, Swept
from streamfleet_common.depth import Depth
from streamfleet_common.schemas import End
from streamfleet_worker.engine.base import LAUNCH_REASONS, EngineInfo
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.histogram import Histogram

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
ENGINE_COUNTS = {
    "tokenization_cache_queries": "Texts that were looked for in the tokenization cache.",
    "tokenization_cache_hits": "Those of them that were there.",
    "answer_cache_queries": "Items that were looked for in the answer cache.",
    "answer_cache_hits": "Those of them that were there.",
    "coalesced_items": "Items that shared the computation of an equal one.",
}
# From a millisecond to the hours that a bulk queue may hold a request.
_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_STEPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
_SHARES = (0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
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
        # Read too, not counted: a supervisor, which has no metrics, may be who finds that a request kills.
        dead = GaugeMetricFamily(
            "streamfleet_queue_dead_letters",
            "Dead letters that the queue keeps.",
            labels=["queue"],
        )
        dead.add_metric([self._queue], depth.dead)
        yield dead

    def describe(self) -> Iterator[Metric]:
        # Without it the registry would read Redis while the worker is being built.
        return iter(())


class EngineMemory(Collector):
    """Reads what the engine takes of the memory, at scrape time."""

    def __init__(self, queue: str, read: Callable[[], Mapping[str, int]]) -> None:
        self._queue = queue
        self._read = read

    def collect(self) -> Iterator[Metric]:
        taken = GaugeMetricFamily(
            "streamfleet_memory_bytes", "Memory that the engine takes, by use.", labels=["queue", "use"]
        )
        for use, size in self._read().items():
            taken.add_metric([self._queue, use], size)
        yield taken

    def describe(self) -> Iterator[Metric]:
        return iter(())


class EngineCounts(Collector):
    """Reads what the engine's caches have counted, at scrape time."""

    def __init__(self, queue: str, read: Callable[[], Mapping[str, int]]) -> None:
        self._queue = queue
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        for name, text in ENGINE_COUNTS.items():
            family = CounterMetricFamily(f"streamfleet_{name}", text, labels=["queue"])
            family.add_metric([self._queue], counts.get(name, 0))
            yield family

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Metrics:
    """One worker's metrics in a registry of their own; every series exists from the start."""

    def __init__(self, queue: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self._version = version

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"streamfleet_{name}", text, ["queue"], registry=self.registry).labels(queue)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"streamfleet_{name}", text, ["queue"], registry=self.registry).labels(queue)

        def counters(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(f"streamfleet_{name}", text, ["queue", label], registry=self.registry)
            # What another version calls otherwise must not make a new series.
            return {value: family.labels(queue, value) for value in (*values, "other")}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"streamfleet_{name}", text, queue, buckets, self.registry)

        self.running = gauge("num_requests_running", "Rows of the batch: answers that run.")
        self.waiting = gauge("num_requests_waiting", "Answers pulled, but not yet in the batch.")
        self.since_poll = gauge("seconds_since_last_poll", "Age of the last completed look for work.")
        self.batch_size = histogram(
            "batch_size", "Rows that decode in one pass, or items of a micro-batch.", _SIZES
        )
        self.batch_tokens = histogram(
            "batch_tokens",
            "Tokens a batch begins with: of a micro-batch those that fill rows up too, of running rows what "
            "newcomers have to be computed and one for each other row.",
            _LENGTHS,
        )
        self.batch_padding = histogram(
            "batch_padding_ratio", "Share of a batch's tokens that only fills rows up.", _SHARES
        )
        launches = Counter(
            "streamfleet_batch_launch",
            "Batches launched, or newcomers let into the running one, by why that was just then.",
            ["queue", "reason"],
            registry=self.registry,
        )
        self._launches = {reason: launches.labels(queue, reason) for reason in LAUNCH_REASONS}
        self.step = histogram("engine_step_seconds", "Time of one engine step.", _STEPS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.padded_tokens = counter(
            "padded_tokens", "Tokens of micro-batches, those that fill rows up included."
        )
        self.truncated = counter("truncated", "Texts, pairs and states that were cut, as was asked.")
        self.cut_tokens = counter("cut_tokens", "Tokens that were cut from them.")
        self.device = histogram("device_seconds", "Computing time of one micro-batch.", _STEPS)
        self.tokenize = histogram("tokenize_seconds", "Turning a request's texts into tokens.", _STEPS)
        self.queue_time = histogram(
            "request_queue_time_seconds", "From acceptance to a worker, on the server's clock.", _WAITS
        )
        self.ttft = histogram("time_to_first_token_seconds", "From acceptance to the first token.", _WAITS)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From the first forward pass to the first token.", _WAITS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _WAITS
        )
        self.time_per_token = histogram(
            "request_time_per_output_token_seconds", "Decode time a token, after the first.", _STEPS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From acceptance to the end.", _WAITS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens a request.", _LENGTHS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens a request.", _LENGTHS
        )
        self._success = counters("request_success", "Requests answered.", "finished_reason", FINISH_REASONS)
        self._failure = counters(
            "request_failure", "Requests that ended without an answer.", "error_type", ERROR_TYPES
        )
        self.redeliveries = counter("redeliveries", "Requests that another worker had started before.")
        self.fenced = counter("fenced_writes", "Writes refused: no longer ours.")
        self.dead_letters = counter("dead_letters", "Entries that no record knows, put aside.")
        self._swept = counters(
            "swept",
            "Requests that this worker's sweeps put back or ended.",
            "outcome",
            ("expired", "requeued", "failed", "dead", "stray"),
        )
        self.reconnects = counter("broker_reconnects", "How often Redis came back after a failure.")
        self._has_succeeded = False
        self.first_success: Callable[[], None] = lambda: None
        """Called once, when a request has been answered."""
        self._build = Info("streamfleet_build", "What this worker is.", registry=self.registry)
        self._build.info({"version": version})

    def built(self, info: EngineInfo) -> None:
        """Tell what the engine serves, once that is known."""
        self._build.info(
            {
                "version": self._version,
                "model": info.model,
                "revision": info.revision,
                "device": info.device,
                "precision": info.precision,
            }
        )

    def delivered(self, delivery: Delivery) -> None:
        """Count a request taken from the queue."""
        self.queue_time.observe((delivery.now_ms - delivery.accepted_at_ms) / 1000)
        if delivery.attempts > 1:
            self.redeliveries.inc()

    def skipped(self, reason: NotStarted) -> None:
        """Count an entry that was read and not started."""
        if reason == "stray":
            self.dead_letters.inc()
        elif reason == "expired":
            self._failure["deadline_exceeded"].inc()

    def swept(self, swept: Swept) -> None:
        """Count what a sweep did."""
        for outcome in ("expired", "requeued", "failed", "dead", "stray"):
            self._swept[outcome].inc(getattr(swept, outcome))

    def stepped(self, report: Report) -> None:
        """Count one step of the engine."""
        step = report.step
        self.step.observe(report.seconds)
        self.running.set(report.room.running)
        self.waiting.set(report.room.waiting)
        if step.rows:
            self.batch_size.observe(step.rows)
        for launch in step.launches:
            self._launches[launch.reason].inc()
            if launch.tokens:  # a handler's inputs have none
                self.batch_tokens.observe(launch.tokens)
                self.batch_padding.observe(launch.padded_ratio)
        self.prompt_tokens.inc(step.prompt_tokens)
        self.generation_tokens.inc(step.generated_tokens)
        if step.padded_tokens:
            self.padded_tokens.inc(step.padded_tokens)
        if step.device_s:
            self.device.observe(step.device_s)
        if step.asked_tokens:
            self.prefix_queries.inc(step.asked_tokens)
            self.prefix_hits.inc(step.cached_tokens)

    def ended(self, delivery: Delivery, end: End, held_s: float) -> None:
        """Count a request that this worker has ended, `held_s` after it was taken from the queue."""
        self.e2e.observe((delivery.now_ms - delivery.accepted_at_ms) / 1000 + held_s)
        if end.error is not None:
            kind = end.error.code
            self._failure[kind if kind in self._failure else "other"].inc()
            return
        reason = end.finish_reason
        if not self._has_succeeded:
            self._has_succeeded = True
            self.first_success()
        self._success[reason if reason in self._success else "other"].inc()
        tokens = end.usage.completion_tokens
        usage = end.usage
        if usage.truncated:
            self.truncated.inc(usage.truncated)
            self.cut_tokens.inc(usage.cut_tokens)
        if end.timing.tokenize_ms:
            self.tokenize.observe(end.timing.tokenize_ms / 1000)
        self.request_prompt_tokens.observe(end.usage.prompt_tokens)
        if end.timing.prefill_ms or end.choices:
            self.prefill_time.observe(end.timing.prefill_ms / 1000)
        if not end.choices:
            return  # one-shot work generates nothing
        self.request_generation_tokens.observe(tokens)
        self.decode_time.observe(end.timing.decode_ms / 1000)
        if tokens > 1:
            self.time_per_token.observe(end.timing.decode_ms / 1000 / (tokens - 1))
