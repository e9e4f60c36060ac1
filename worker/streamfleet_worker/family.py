"""A counter or gauge whose values lie with whoever has them, and are read at the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "info"]
_FAMILIES: dict[Kind, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "info": InfoMetricFamily,
}


class Family(Collector):
    """One metric of one worker.

    The client library's own counters take a lock for each increment, and cost ten times a plain addition.

    Args:
        kind: what the values are.
        name: without the prefix, and without the suffix of its kind.
        text: its help.
        shared: labels that all its series have, with their values.
        label: the one by which its series differ; None if there is one series.
        read: the value of each series, by that label's value (of the only one by ""). What is not there is
            absent from the page, too. Of an "info" the values are its labels, by name. From any thread.
        registry: where it is to be found.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        text: str,
        *,
        shared: Mapping[str, str],
        label: str | None,
        read: Callable[[], Mapping[str, Any]],
        registry: CollectorRegistry,
    ) -> None:
        self._kind = kind
        self._name = f"streamfleet_{name}"
        self._text = text
        self._shared = shared
        self._label = label
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels = [*self._shared, *filter(None, [self._label])]
        family = _FAMILIES[self._kind](self._name, self._text, labels=labels)
        values = self._read()
        if self._kind == "info":
            family.add_metric([*self._shared.values()], values)
        else:
            for value, number in values.items():
                family.add_metric([*self._shared.values(), *filter(None, [value])], number)
        yield family

    def describe(self) -> Iterator[Metric]:
        # Without it the registry would read while the worker is being built.
        yield Metric(self._name, self._text, self._kind)
