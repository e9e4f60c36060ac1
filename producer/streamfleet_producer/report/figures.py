"""The numbers of a run: percentiles, rates, outcomes, and what happened in each slice of time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamfleet_producer.report.reading import UNKNOWN, Run, Series

SLICES = 60
"""About so many points make a curve over time."""

Measure = Literal["queue", "ttft", "itl", "e2e"]
MEASURES: dict[Measure, tuple[str, str]] = {
    "queue": ("Queue time", "from submission until a worker took it"),
    "ttft": ("Time to first token", "from submission to the first piece of the answer"),
    "itl": ("Inter-token latency", "between two pieces of an answer, as they came"),
    "e2e": ("End to end", "from submission to the end of the answer"),
}
CUTS = (("p50", 0.50), ("p90", 0.90), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share lies, of values in order, between neighbours in proportion.

    That is numpy's default, and `statistics.quantiles(…, method="inclusive")`.

    Raises:
        ValueError: there are no values.
    """
    if not ordered:
        raise ValueError("of no values there is no percentile")
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Latency:
    """One measure of one series."""

    ordered_ms: array[float]
    """At least one."""

    @property
    def mean(self) -> float:
        return math.fsum(self.ordered_ms) / len(self.ordered_ms)

    def cut(self, share: float) -> float:
        return percentile(self.ordered_ms, share)

    @property
    def cuts(self) -> dict[str, float]:
        """By name: p50, p90, p95, p99, max; in milliseconds."""
        return {name: self.cut(share) for name, share in CUTS}


@dataclass(frozen=True)
class Figures:
    """One series."""

    series: Series
    latencies: dict[Measure, Latency]
    """Those that the records tell."""
    began_ms: float
    """Its first submission after the warm-up."""
    ended_ms: float
    """The last end of one that ended well; if none did, the last of all."""

    @classmethod
    def of(cls, series: Series) -> Figures:
        columns: dict[Measure, array[float]] = {
            "queue": series.queue_ms,
            "ttft": series.ttft_ms,
            "itl": series.gaps_ms,
            "e2e": series.e2e_ms,
        }
        good = [at for at, ok in zip(series.ended_ms, series.is_done, strict=True) if ok]
        return cls(
            series,
            {name: Latency(array("d", sorted(column))) for name, column in columns.items() if column},
            min(series.submitted_ms),
            max(good) if good else max(series.ended_ms),
        )

    @property
    def requests(self) -> int:
        return len(self.series)

    @property
    def done(self) -> int:
        return self.series.outcomes["done"]

    @property
    def failed_share(self) -> float:
        return 1 - self.done / self.requests

    @property
    def seconds(self) -> float:
        return (self.ended_ms - self.began_ms) / 1000

    @property
    def requests_per_s(self) -> float | None:
        """Those that ended well; None if all took no time."""
        return self.done / self.seconds if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of answers; None if there were none."""
        tokens = math.fsum(
            count for count, ok in zip(self.series.completion_tokens, self.series.is_done, strict=True) if ok
        )
        return tokens / self.seconds if tokens and self.seconds else None


@dataclass(frozen=True)
class Curve:
    """Values over time; one is None where nobody knows it."""

    at_s: list[float]
    values: list[float | None]

    def __bool__(self) -> bool:
        return any(value is not None for value in self.values)


def slice_ms(span_ms: float) -> float:
    """A round length of slices, of which about `SLICES` make the span."""
    wanted = max(span_ms, 1.0) / SLICES
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= wanted * 0.999)


def rate_curves(figures: Figures) -> tuple[Curve, Curve]:
    """Requests that ended well, and tokens, each second, by slices of time.

    A streamed answer's tokens are spread evenly from its first one to its end; of others all count then.
    """
    span = figures.ended_ms - figures.began_ms
    if not figures.done or span <= 0:
        return Curve([], []), Curve([], [])
    # All of one length, counted from the first submission: one that the end cuts short would tell too much.
    count = math.ceil(span / slice_ms(span) - 1e-9)
    step = span / count
    requests, tokens = [0.0] * count, [0.0] * count
    series = figures.series
    columns = (series.first_ms, series.ended_ms, series.completion_tokens, series.is_done)

    def slice_of(at_ms: float) -> int:
        return min(count - 1, math.floor((at_ms - figures.began_ms) / step))

    for begun, ended, amount, is_done in zip(*columns, strict=True):
        if not is_done:
            continue
        last = slice_of(ended)
        requests[last] += 1
        if begun == UNKNOWN or ended <= begun:
            tokens[last] += amount
            continue
        for place in range(slice_of(begun), last + 1):
            low = figures.began_ms + place * step
            overlap = min(ended, low + step) - max(begun, low)
            tokens[place] += amount * max(0.0, overlap) / (ended - begun)
    at_s = [(figures.began_ms + (place + 0.5) * step) / 1000 for place in range(count)]
    rates = [Curve(at_s, [total * 1000 / step for total in totals]) for totals in (requests, tokens)]
    return rates[0], rates[1] if any(tokens) else Curve([], [])


def sample_curve(run: Run, column: array[float], of: array[float] | None = None) -> Curve:
    """Means of samples by slices of time; with `of` their share of that, from 0 to 1."""
    if not run.sample_at_ms:
        return Curve([], [])
    low, high = min(run.sample_at_ms), max(run.sample_at_ms)
    step = slice_ms(high - low)
    found: dict[int, list[float]] = {}
    for number, at in enumerate(run.sample_at_ms):
        value = column[number]
        if value == UNKNOWN or (of is not None and of[number] <= 0):
            continue
        share = value if of is None else min(1.0, value / of[number])
        found.setdefault(math.floor(at / step), []).append(share)
    places = range(math.floor(low / step), math.floor(high / step) + 1)
    # A slice without a sample is a gap only if whole slices have none: samples may be rarer than slices.
    known = [place for place in places if place in found]
    return Curve(
        [min(high, (place + 0.5) * step) / 1000 for place in known],
        [math.fsum(found[place]) / len(found[place]) for place in known],
    )
