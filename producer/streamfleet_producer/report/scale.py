"""Axes: where their ticks are, and how numbers on them are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_FROM = 25.0
"""A scale whose highest value is so many times its lowest is logarithmic."""
MOST_DECADES = 6


@dataclass(frozen=True)
class Unit:
    """A unit and how many of the data's it has."""

    name: str
    factor: float


MILLISECONDS = (
    Unit("µs", 0.001),
    Unit("ms", 1.0),
    Unit("s", 1000.0),
    Unit("min", 60_000.0),
    Unit("h", 3_600_000.0),
)


@dataclass(frozen=True)
class Scale:
    """Maps values onto 0 to 1."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 to 1; what lies outside is put to the end."""
        value = min(self.high, max(self.low, value))
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @classmethod
    def linear(cls, high: float, most_ticks: int = 5, low: float = 0.0) -> Scale:
        """From 0, or `low`, to at least `high`, with ticks at 1, 2 or 5 times a power of ten."""
        span = high - low
        if not math.isfinite(span) or span <= 0:
            span = 1.0
        power = 10.0 ** math.floor(math.log10(span / most_ticks))
        step = next(n * power for n in (1, 2, 5, 10) if span / (n * power) <= most_ticks)
        first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
        ticks = tuple(number * step for number in range(first, last + 1))
        return cls(ticks[0], ticks[-1], False, ticks)

    @classmethod
    def log(cls, low: float, high: float, most_ticks: int = 6) -> Scale:
        """From a round number below `low` to one above `high`; decades, or 1, 2 and 5 in each if few."""
        low = max(low, high / 10.0**MOST_DECADES)
        marks = [n * 10.0**power for power in range(-9, 14) for n in (1, 2, 5)]
        first = max(mark for mark in marks if mark <= low * 1.0001)
        last = min(mark for mark in marks if mark >= high * 0.9999 and mark > first)
        ticks = [mark for mark in marks if first <= mark <= last]
        if len(ticks) > most_ticks:
            ticks = [tick for tick in ticks if _is_decade(tick)]
        return cls(first, last, True, tuple(ticks))

    @classmethod
    def fitting(cls, values: Iterable[float], most_ticks: int = 5) -> Scale:
        """A scale for latencies: logarithmic where they reach far."""
        found = [value for value in values if value >= 0]
        high = max(found, default=0.0)
        positive = [value for value in found if value > high / 10.0**MOST_DECADES]
        if positive and high / min(positive) >= LOG_FROM:
            return cls.log(min(positive), high, most_ticks + 1)
        return cls.linear(high, most_ticks)


def _is_decade(value: float) -> bool:
    power = math.log10(value)
    return abs(power - round(power)) < 1e-6


def unit_of(scale: Scale, units: tuple[Unit, ...] = MILLISECONDS) -> Unit:
    """The unit in which an axis is written: the largest of which its highest value has at least one."""
    # On a logarithmic one the middle counts, or its small numbers would have many zeros.
    most = math.sqrt(scale.low * scale.high) if scale.is_log else scale.high
    return next((unit for unit in reversed(units) if most >= unit.factor * 0.9999), units[0])


def number(value: float) -> str:
    """With three digits that count, and thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(value: float) -> str:
    """For ticks: 1500 is 1.5k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)}{letter}"
    return number(value)


def duration(ms: float) -> str:
    """Milliseconds for people: 4.2 ms, 1.3 s, 2.5 min."""
    if ms == 0:
        return "0 ms"
    if ms < 0.1:
        return f"{number(ms * 1000)} µs"
    if ms < 999.5:
        return f"{number(ms)} ms"
    if ms < 119_950:
        return f"{number(ms / 1000)} s"
    return f"{number(ms / 60_000)} min"


def percent(share: float) -> str:
    """A share from 0 to 1: 0.4 %; what is not all is never told as 100 %, and what is some never as 0 %."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    return f"{number(share * 100)} %"
