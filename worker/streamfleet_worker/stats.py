"""The last half minute of a worker, as its card tells of it: the difference of two looks at its metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Sample

from streamfleet_common.worker_stats import TOKEN_BOUNDS_S, WAIT_BOUNDS_S, WINDOW_S, WorkerStats

MOST_LOOKS = 32
"""A worker that announces itself more often than usual looks less far back."""
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "batches": "batch_size_count",
    "batch_rows": "batch_size_sum",
}
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", WAIT_BOUNDS_S),
    "e2e": ("e2e_request_latency_seconds", WAIT_BOUNDS_S),
    "itl": ("inter_token_latency_seconds", TOKEN_BOUNDS_S),
}
GAUGES = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
_SUCCESS, _FAILURE, _KV = "request_success_total", "request_failure_total", "kv_cache_usage_ratio"
_NAMES = [
    *COUNTERS.values(),
    *(f"{name}_bucket" for name, _ in HISTOGRAMS.values()),
    *GAUGES.values(),
    *(_SUCCESS, _FAILURE, _KV),
]


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    counts: Mapping[str, int]
    histograms: Mapping[str, tuple[int, ...]]


class Stats:
    """Reads what the metrics have counted anyway, each time a card is made: nothing is added to a step.

    Args:
        registry: of the worker's metrics.
        clock: seconds, monotonic.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        # Of these series alone: others ask Redis for what they show.
        self._registry = registry.restricted_registry([f"streamfleet_{name}" for name in _NAMES])
        self._clock = clock
        self._looks: deque[_Look] = deque(maxlen=MOST_LOOKS)

    def read(self) -> WorkerStats:
        """What happened since the oldest look of the window, and what runs now."""
        samples: dict[str, list[Sample]] = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                samples.setdefault(sample.name.removeprefix("streamfleet_"), []).append(sample)
        look = _look(self._clock(), samples)
        self._looks.append(look)
        while look.at_s - self._looks[0].at_s > WINDOW_S:
            self._looks.popleft()
        before = self._looks[0]
        histograms = {
            name: tuple(max(0, now - then) for now, then in zip(counts, before.histograms[name], strict=True))
            for name, counts in look.histograms.items()
        }
        values: dict[str, Any] = {
            **{name: max(0, count - before.counts[name]) for name, count in look.counts.items()},
            **{name: counts for name, counts in histograms.items() if any(counts)},
            **{name: round(_total(samples.get(series, ()))) for name, series in GAUGES.items()},
        }
        window_s = round(look.at_s - before.at_s, 3)
        return WorkerStats(window_s=window_s, kv_usage=_share(samples.get(_KV, ())), **values)


def _look(at_s: float, samples: Mapping[str, list[Sample]]) -> _Look:
    counts = {name: round(_total(samples.get(series, ()))) for name, series in COUNTERS.items()}
    failures = samples.get(_FAILURE, ())
    counts["ended"] = round(_total(samples.get(_SUCCESS, ())) + _total(failures))
    # Who cancels its request has got what it wanted.
    counts["failed"] = round(_total(one for one in failures if one.labels["error_type"] != "cancelled"))
    return _Look(
        at_s,
        counts,
        {
            name: _counts(samples.get(f"{series}_bucket", ()), bounds)
            for name, (series, bounds) in HISTOGRAMS.items()
        },
    )


def _counts(buckets: Iterable[Sample], bounds: tuple[float, ...]) -> tuple[int, ...]:
    """The values of each bucket; those of Prometheus hold those of all buckets below, too."""
    upto = {float(bucket.labels["le"]): round(bucket.value) for bucket in buckets}
    rising = [upto.get(bound, 0) for bound in (*bounds, float("inf"))]
    return tuple(now - below for now, below in zip(rising, [0, *rising[:-1]], strict=True))


def _total(samples: Iterable[Sample]) -> float:
    return sum(sample.value for sample in samples)


def _share(samples: Iterable[Sample]) -> float | None:
    shares = [sample.value for sample in samples]
    return min(1.0, max(0.0, *shares)) if shares else None
