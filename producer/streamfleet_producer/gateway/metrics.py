"""What a gateway counts. No tenant, no prompt and no id is ever a label."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class GatewayMetrics:
    """Counters of HTTP requests by route and status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open_requests = 0
        self._requests = Counter(
            "streamfleet_gateway_requests_total",
            "HTTP requests answered, by route and status.",
            ("route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "streamfleet_gateway_request_seconds",
            "From the first byte of a request to the last one of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        Gauge(
            "streamfleet_gateway_open_requests",
            "HTTP requests under way, but for probes, scrapes and pages.",
            registry=self.registry,
        ).set_function(lambda: self.open_requests)
        self._gone = Counter(
            "streamfleet_gateway_disconnects_total",
            "Clients that left before their answer was complete.",
            registry=self.registry,
        )

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def gone(self) -> None:
        self._gone.inc()
