"""The series of the exporter. Labels are names of queues and lanes, and words of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamfleet_common.figures import Figures, QueueFigures
from streamfleet_producer.exporter.reading import Reading

PREFIX = "streamfleet_"
Values = Mapping[tuple[str, ...], float | None]
"""By the values of the labels behind `queue`. One that is unknown is None, and makes no series."""
_SERIES: tuple[tuple[str, str, tuple[str, ...], Callable[[QueueFigures], Values]], ...] = (
    (
        "queue_depth",
        "Open requests: queued, or running on a worker.",
        ("state",),
        lambda one: {("queued",): one.queued, ("running",): one.running},
    ),
    (
        "queue_max_depth",
        "How many open requests the queue takes, as its workers announced last.",
        (),
        lambda one: {(): one.max_depth},
    ),
    (
        "queue_waiting_tokens",
        "Tokens, prompt and answer, that queued requests may take.",
        (),
        lambda one: {(): one.waiting_tokens},
    ),
    (
        "queue_open_tokens",
        "Tokens, prompt and answer, that open requests may take.",
        (),
        lambda one: {(): one.open_tokens},
    ),
    (
        "queue_lane_depth",
        "Queued requests of a lane, those that came back from a worker included.",
        ("lane",),
        lambda one: {(lane,): count for lane, count in one.lanes.items()},
    ),
    (
        "queue_oldest_age_seconds",
        "Since the oldest waiting request of a lane was accepted; 0 where none waits.",
        ("lane",),
        lambda one: {(lane,): age for lane, age in one.oldest_s.items()},
    ),
    (
        "queue_retrying",
        "Requests that wait for the time of their next try.",
        (),
        lambda one: {(): one.retrying},
    ),
    ("queue_dead_letters", "Dead letters that are kept.", (), lambda one: {(): one.dead_letters}),
    ("queue_paused", "1: new requests are refused.", (), lambda one: {(): float(one.is_paused)}),
    (
        "queue_workers",
        "Live workers: ready, or draining.",
        ("state",),
        lambda one: {("ready",): one.ready, ("draining",): one.draining},
    ),
    ("queue_ended_total", "Requests that ended, however.", (), lambda one: {(): one.ended}),
    (
        "queue_last_sweep_age_seconds",
        "Since the queue was swept last.",
        (),
        lambda one: {(): one.last_sweep_s},
    ),
)


class Page(Collector):
    """The series of one reading; unknown ones are left out."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterable[Metric]:
        """All families, each once, those without a sample left out."""
        figures = self._reading.figures
        yield _gauge("broker_up", "1: Redis answers.", float(figures is not None))
        yield _gauge(
            "exporter_scrape_seconds", "How long Redis was read for this page.", self._reading.seconds
        )
        if figures is None:
            return
        yield from _server(figures)
        for name, text, labels, values in _SERIES:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(PREFIX + name, text, labels=("queue", *labels))
            for one in figures.queues:
                for told, value in values(one).items():
                    if value is not None:
                        family.add_metric((one.queue, *told), value)
            if family.samples:
                yield family


def page_of(reading: Reading) -> CollectorRegistry:
    """What an encoder of the client library turns into a page."""
    registry = CollectorRegistry()
    registry.register(Page(reading))
    return registry


def _server(figures: Figures) -> Iterable[Metric]:
    for name, text, value in (
        ("broker_memory_used_bytes", "Memory that Redis uses.", figures.memory_used),
        ("broker_memory_max_bytes", "maxmemory of Redis.", figures.memory_max),
    ):
        if value is not None:
            yield _gauge(name, text, value)
    unread = GaugeMetricFamily(
        f"{PREFIX}exporter_queues_unread", "Queues of which this page tells nothing.", labels=("reason",)
    )
    for reason, count in figures.unread.items():
        unread.add_metric((reason,), count)
    yield unread


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
