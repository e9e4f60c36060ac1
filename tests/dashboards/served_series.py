"""The names of all series that a fleet serves, on whichever page, and those an expression asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric

from streamfleet_common.deliveries import HandedBack
from streamfleet_common.figures import LANES, Figures, QueueFigures
from streamfleet_producer.exporter.metrics import page_of
from streamfleet_producer.exporter.reading import Reading
from streamfleet_producer.gateway.metrics import GatewayMetrics
from streamfleet_worker.child import Child
from streamfleet_worker.host_page import HostPage
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.supervisor import Supervisor

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}
"""What the client library puts behind a family's name."""


def asked_for(expression: str) -> set[str]:
    """The series that an expression takes from Prometheus, but for recorded ones."""
    return set(re.findall(r"(?<![\w:])streamfleet_\w+(?![\w:])", expression))


def recorded_ones(expression: str) -> set[str]:
    """The series of recording rules that an expression takes."""
    return set(re.findall(r"\b\w+:streamfleet_\w+:\w+", expression))


def served() -> set[str]:
    """The names of everything on the four pages."""
    return {
        family.name + suffix
        for families in (_workers(), _hosts(), _exporters(), GatewayMetrics().registry.collect())
        for family in families
        for suffix in SUFFIXES[family.type]
    }


def _workers() -> Iterable[Metric]:
    metrics = Metrics("q", "0")
    metrics.read(since_poll_s=lambda: 0.0, publisher_lag_s=lambda: 0.0, memory=dict, counts=dict)
    return metrics.registry.collect()


def _hosts() -> Iterable[Metric]:
    """What a supervisor adds to its workers' series; this one has no workers."""

    def start(number: int, served: Callable[[], None]) -> Child:
        raise AssertionError(f"a worker was started at post {number}")

    async def hand_back(owner: str, *, crashed: bool) -> HandedBack:
        raise AssertionError(f"{owner} has died")

    async def page() -> list[Metric]:
        supervisor = Supervisor(0, start, hand_back, drain_timeout_s=1, lease_s=1, max_crashes=1)
        return await asyncio.to_thread(list, HostPage(supervisor, "q").collect())

    return asyncio.run(page())


def _exporters() -> Iterable[Metric]:
    """The page of an exporter that can tell everything."""
    queue = QueueFigures(
        queue="q",
        queued=1,
        running=1,
        max_depth=1,
        open_tokens=1,
        waiting_tokens=1,
        lanes=dict.fromkeys(LANES, 1),
        oldest_s=dict.fromkeys(LANES, 1.0),
        retrying=1,
        dead_letters=1,
        is_paused=False,
        ready=1,
        draining=1,
        ended=1,
        last_sweep_s=1.0,
    )
    figures = Figures((queue,), unread={}, refusal=None, memory_used=1, memory_max=1)
    return page_of(Reading(figures, 0.1)).collect()
