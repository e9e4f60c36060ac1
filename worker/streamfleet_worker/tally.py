"""What one worker process has counted, as it tells its supervisor; and the sum over all workers of a host.

A tally is plain data, so that it can cross a socket: the health of the process, and its metrics by family,
each with its samples. It needs neither the client library of Prometheus nor an event loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

SUMMED = ("counter", "histogram")
"""Kinds of metrics that are added up, over workers and over a worker's lives. Others are one worker's."""

Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]
"""The name of a sample, and its labels."""


class Metric(Protocol):
    """One family of metrics, as the client library has it."""

    name: str
    type: str
    documentation: str
    samples: list[Any]


@dataclass(slots=True)
class Family:
    """One metric and its samples."""

    name: str
    kind: str
    text: str
    samples: dict[Series, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a worker process tells of itself."""

    unhealthy: str | None
    """Why it should be started again, or None."""
    unready: str | None
    """Why it takes no work, or None."""
    families: list[Family]

    @classmethod
    def of(cls, unhealthy: str | None, unready: str | None, metrics: Iterable[Metric]) -> Tally:
        """Of this process, as of now."""
        families = [
            Family(
                metric.name,
                metric.type,
                metric.documentation,
                {(sample.name, tuple(sample.labels.items())): sample.value for sample in metric.samples},
            )
            for metric in metrics
        ]
        return cls(unhealthy, unready, families)

    def packed(self) -> bytes:
        """As it crosses the socket."""
        families = [
            (
                family.name,
                family.kind,
                family.text,
                [(*series, value) for series, value in family.samples.items()],
            )
            for family in self.families
        ]
        packed: bytes = msgpack.packb((self.unhealthy, self.unready, families))
        return packed

    @classmethod
    def read(cls, packed: bytes) -> Tally:
        """From what `packed` gave."""
        unhealthy, unready, families = msgpack.unpackb(packed, use_list=False)
        return cls(
            unhealthy,
            unready,
            [
                Family(name, kind, text, {(sample, labels): value for sample, labels, value in samples})
                for name, kind, text, samples in families
            ],
        )


class Totals:
    """What all processes have counted together, those that have ended included: their sum never falls.

    A process is known by anything that is its own.
    """

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        """With what has been counted by those that have ended."""
        self._running: dict[Hashable, Mapping[str, Mapping[Series, float]]] = {}

    def take(self, process: Hashable, tally: Tally) -> None:
        """Note what a process has counted since it began."""
        counted: dict[str, Mapping[Series, float]] = {}
        for family in tally.families:
            if family.kind in SUMMED:
                self._families.setdefault(family.name, Family(family.name, family.kind, family.text))
                counted[family.name] = family.samples
        self._running[process] = counted

    def end(self, process: Hashable) -> None:
        """Keep what a process has counted, which counts no more."""
        for name, samples in self._running.pop(process, {}).items():
            _add(self._families[name].samples, samples)

    def families(self) -> Iterator[Family]:
        """The sums."""
        for name, ended in self._families.items():
            total = dict(ended.samples)
            for counted in self._running.values():
                _add(total, counted.get(name, {}))
            yield Family(name, ended.kind, ended.text, total)


def _add(total: dict[Series, float], more: Mapping[Series, float]) -> None:
    for series, value in more.items():
        total[series] = total.get(series, 0) + value
