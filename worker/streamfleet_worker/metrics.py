"""What a worker tells Prometheus, and what makes it move. The series themselves are in `series.py`.

Values come by the batch, and are read at the scrape: what they cost is told in `docs/metrics.md`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from streamfleet_common.deliveries import Delivery, NotStarted, Swept
from streamfleet_common.schemas import End
from streamfleet_worker.engine.base import LAUNCH_REASONS, EngineInfo, Room
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.family import Family, Kind
from streamfleet_worker.histogram import Histogram
from streamfleet_worker.series import (
    COUNTERS,
    ENGINE_COUNTERS,
    ERROR_TYPES,
    FINISH_REASONS,
    HISTOGRAMS,
    MILLISECONDS,
    OTHER,
    SWEPT,
)

ALONE = "0"
"""The slot of a worker that no supervisor keeps."""


Noted = tuple[int, int, int, int, float, float, float, str | None, str | None]
"""Of an answer: tokens of its prompt and its own; texts that were cut, and tokens cut from them; ms of
tokenizing, prefill and decoding; why its text ended, or None; the code of its error, or None."""


class Metrics:
    """One worker's metrics in a registry of their own. Events come from one thread, scrapes from any.

    Counters and histograms of several workers are to be summed, so they have no label `worker`. Gauges have.

    Args:
        queue: what the worker serves.
        version: of this package.
        slot: which of its supervisor's workers this is.
    """

    def __init__(self, queue: str, version: str, slot: str = ALONE) -> None:
        self.registry = CollectorRegistry()
        self._queue = {"queue": queue}
        self._gauge_labels = {"queue": queue, "worker": slot}
        self._identity = {"version": version}
        self._room: Room | None = None
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._launches: dict[str, int] = dict.fromkeys(LAUNCH_REASONS, 0)
        self._success = dict.fromkeys((*FINISH_REASONS, OTHER), 0)
        self._failure = dict.fromkeys((*ERROR_TYPES, OTHER), 0)
        self._swept = dict.fromkeys(SWEPT, 0)
        self._histograms = {
            name: Histogram(
                f"streamfleet_{name}",
                text,
                queue,
                buckets,
                self.registry,
                parts=1000 if name in MILLISECONDS else 1,
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._has_succeeded = False
        self.first_success: Callable[[], None] = lambda: None
        """Called once, when a request has been answered."""
        self._register_counters()
        self._register_gauges()

    def _family(
        self,
        kind: Kind,
        name: str,
        text: str,
        read: Callable[[], Mapping[str, object]],
        label: str | None = None,
    ) -> None:
        shared = self._queue if kind == "counter" else self._gauge_labels
        Family(kind, name, text, shared=shared, label=label, read=read, registry=self.registry)

    def _register_counters(self) -> None:
        for name, text in COUNTERS.items():
            self._family("counter", name, text, lambda name=name: {"": self._counts[name]})  # type: ignore[misc]
        for name, text, counts, label in (
            (
                "batch_launch",
                "Batches launched, or newcomers let into the running one, by why that was just then.",
                self._launches,
                "reason",
            ),
            ("request_success", "Requests answered.", self._success, "finished_reason"),
            ("request_failure", "Requests that ended without an answer.", self._failure, "error_type"),
            ("swept", "Requests that this worker's sweeps put back or ended.", self._swept, "outcome"),
        ):
            self._family("counter", name, text, counts.copy, label)

    def _register_gauges(self) -> None:
        began_at = time.time()
        self._family(
            "gauge",
            "process_start_time_seconds",
            "When this worker began, as Unix time.",
            lambda: {"": began_at},
        )
        self._family(
            "gauge",
            "num_requests_running",
            "Rows of the batch: answers that run.",
            lambda: {"": self._room.running if self._room else 0},
        )
        self._family(
            "gauge",
            "num_requests_waiting",
            "Answers pulled, but not yet in the batch.",
            lambda: {"": self._room.waiting if self._room else 0},
        )
        self._family(
            "gauge",
            "kv_cache_usage_ratio",
            "Share of the cache for keys and values that is reserved for what runs.",
            self._cache_used,
        )
        self._family("info", "build", "What this worker is.", lambda: self._identity)

    def _cache_used(self) -> dict[str, float]:
        used = None if self._room is None else self._room.cache_used
        return {} if used is None else {"": used}

    def read(
        self,
        *,
        since_poll_s: Callable[[], float],
        publisher_lag_s: Callable[[], float],
        memory: Callable[[], Mapping[str, int]],
        counts: Callable[[], Mapping[str, int]],
    ) -> None:
        """Show what other parts of the worker know; each is called at every scrape, from any thread."""
        self._family(
            "gauge",
            "seconds_since_last_poll",
            "Age of the last completed look for work.",
            lambda: {"": since_poll_s()},
        )
        self._family(
            "gauge",
            "publisher_lag_seconds",
            "For how long the oldest event has waited that is brought forth and not in Redis yet.",
            lambda: {"": publisher_lag_s()},
        )
        self._family("gauge", "model_memory_bytes", "Memory that the engine takes.", memory, "kind")
        for name, text in ENGINE_COUNTERS.items():
            self._family("counter", name, text, lambda name=name: {"": counts().get(name, 0)})  # type: ignore[misc]

    # --- events

    def built(self, info: EngineInfo, room: Room | None = None) -> None:
        """Tell what the engine serves, once that is known."""
        self._room = room
        self._identity = {
            **self._identity,
            "model": info.model,
            "revision": info.revision,
            "device": info.device,
            "precision": info.precision,
        }

    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Count requests taken from the queue."""
        self._histograms["request_queue_time_seconds"].observe_all(
            [(delivery.now_ms - delivery.accepted_at_ms) / 1000 for delivery in deliveries]
        )
        again = sum([delivery.attempts > 1 for delivery in deliveries])
        self._counts["redeliveries"] += again

    def skipped(self, reason: NotStarted) -> None:
        """Count an entry that was read and not started."""
        if reason == "stray":
            self._counts["dead_letters"] += 1
        elif reason == "expired":
            self._failure["deadline_exceeded"] += 1

    def swept(self, swept: Swept) -> None:
        """Count what a sweep did."""
        for outcome in SWEPT:
            self._swept[outcome] += getattr(swept, outcome)

    def reconnected(self) -> None:
        """Count that Redis is back."""
        self._counts["broker_reconnects"] += 1

    def fenced(self, count: int) -> None:
        """Count writes that were refused."""
        self._counts["fenced_writes"] += count

    def cancelled(self, count: int) -> None:
        """Count requests that somebody cancelled while this worker had them."""
        self._failure["cancelled"] += count

    def leases_lost(self, count: int) -> None:
        """Count requests that were taken away."""
        self._counts["leases_lost"] += count

    def first_tokens(self, waits_s: Sequence[float]) -> None:
        """Count requests that have their first token, so long after they were accepted."""
        self._histograms["time_to_first_token_seconds"].observe_all(waits_s)

    def more_tokens(self, gap_s: float, count: int) -> None:
        """Count tokens that came so long after the ones before them."""
        self._histograms["inter_token_latency_seconds"].observe(gap_s, count)

    def stepped(self, report: Report) -> None:
        """Count one step of the engine."""
        step, counts, histograms = report.step, self._counts, self._histograms
        histograms["engine_step_seconds"].observe(report.seconds)
        self._room = report.room
        if step.rows:
            histograms["batch_size"].observe(step.rows)
        for launch in step.launches:
            self._launches[launch.reason] += 1
            if launch.tokens:  # a handler's inputs have none
                histograms["batch_tokens"].observe(launch.tokens)
                histograms["batch_padding_ratio"].observe(launch.padded_ratio)
        counts["prompt_tokens"] += step.prompt_tokens
        counts["generation_tokens"] += step.generated_tokens
        if step.padded_tokens:
            counts["padded_tokens"] += step.padded_tokens
        if step.device_s:
            histograms["device_seconds"].observe(step.device_s)
        if step.asked_tokens:
            counts["prefix_cache_queries"] += step.asked_tokens
            counts["prefix_cache_hits"] += step.cached_tokens

    def idle(self) -> None:
        """Nothing runs any more, though no step has said so."""
        if (room := self._room) is not None:
            self._room = Room(room.rows, 0, 0, None if room.cache_used is None else 0.0)

    def noted(self, ends: Sequence[End]) -> list[Noted]:
        """What will be counted of these answers, once they are told.

        To be asked while they are new: a call to Redis later they have left the processor's caches, and to
        find their parts again would be most of what all this costs.
        """
        return [
            (
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.truncated,
                usage.cut_tokens,
                timing.tokenize_ms,
                timing.prefill_ms,
                timing.decode_ms,
                end.choices[0].finish_reason if end.choices else None,
                None if end.error is None else end.error.code,
            )
            for end in ends
            for usage in [end.usage]
            for timing in [end.timing]
        ]

    def ended(self, noted: Sequence[Noted], latencies_s: Sequence[float]) -> None:
        """Count requests that this worker has ended, and how long after its acceptance each of them."""
        self._histograms["e2e_request_latency_seconds"].observe_all(latencies_s)
        texts = [one for one in noted if one[7] is not None and one[8] is None]
        if texts:
            self._answered_in_text(texts)
        if len(texts) == len(noted):
            return
        answers = [one for one in noted if one[7] is None and one[8] is None]
        if answers:
            self._answered_in_one_go(answers)
        _add(self._failure, [one[8] for one in noted if one[8] is not None])

    def _answered_in_text(self, noted: Sequence[Noted]) -> None:
        prompts, lengths, truncated, cut, _, prefills_ms, decodes_ms, reasons, _ = zip(*noted, strict=True)
        self._succeeded(reasons)
        histograms = self._histograms
        histograms["request_prompt_tokens"].observe_all(prompts)
        histograms["request_generation_tokens"].observe_all(lengths)
        histograms["request_prefill_time_seconds"].observe_all(prefills_ms)
        histograms["request_decode_time_seconds"].observe_all(decodes_ms)
        if max(lengths) > 1:
            histograms["request_time_per_output_token_seconds"].observe_all(
                [ms / (tokens - 1) for ms, tokens in zip(decodes_ms, lengths, strict=True) if tokens > 1]
            )
        if any(truncated):
            self._truncated(truncated, cut)

    def _answered_in_one_go(self, noted: Sequence[Noted]) -> None:
        prompts, _, truncated, cut, tokenized_ms, prefills_ms, *_ = zip(*noted, strict=True)
        self._succeeded(["stop"] * len(noted))
        histograms = self._histograms
        histograms["request_prompt_tokens"].observe_all(prompts)
        histograms["request_prefill_time_seconds"].observe_all([ms for ms in prefills_ms if ms])
        histograms["tokenize_seconds"].observe_all([ms for ms in tokenized_ms if ms])
        self._truncated(truncated, cut)

    def _succeeded(self, reasons: Sequence[str]) -> None:
        if not self._has_succeeded:
            self._has_succeeded = True
            self.first_success()
        _add(self._success, reasons)

    def _truncated(self, texts: Sequence[int], tokens: Sequence[int]) -> None:
        self._counts["truncated"] += sum(texts)
        self._counts["truncated_tokens"] += sum(cut for cut, some in zip(tokens, texts, strict=True) if some)


def _add(counts: dict[str, int], values: Sequence[str]) -> None:
    for value, count in Counter(values).items():
        counts[value if value in counts else OTHER] += count
