"""The series of one or several runs side by side: their names, colours, numbers, and how these compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.report.charts import MOST_SERIES, Drawn
from streamfleet_producer.report.figures import CUTS, MEASURES, Figures, Measure
from streamfleet_producer.report.reading import Run
from streamfleet_producer.report.scale import duration, number, percent

TIMES, NONE = "\u00d7", "\u2013"
ALIKE = 0.02
"""So far from each other two numbers are not called better or worse."""


@dataclass(frozen=True)
class Shown:
    """One series of the page."""

    drawn: Drawn
    run: Run
    figures: Figures
    reference: Figures | None
    """What it is compared with: the same kind of requests in the first run; None in that run itself."""


@dataclass(frozen=True)
class Quantity:
    """A number of a series: how it is found, written and compared."""

    name: str
    of: Callable[[Figures], float | None]
    written: Callable[[float], str]
    is_better_high: bool | None = False
    """None: neither is better."""

    def text(self, figures: Figures) -> str:
        value = self.of(figures)
        return NONE if value is None else self.written(value)

    def ratio(self, shown: Shown) -> tuple[str, str] | None:
        """How many times better or worse than the reference it is, and which; None where nothing compares.

        Where neither is better, how many times the reference it is.
        """
        if shown.reference is None:
            return None
        ours, theirs = self.of(shown.figures), self.of(shown.reference)
        if not ours or not theirs:
            return None
        ratio = ours / theirs
        if self.is_better_high is None:
            return f"{number(ratio)}{TIMES}", ""
        if abs(ratio - 1) < ALIKE:
            return "", "alike"
        word = "better" if (ratio > 1) == self.is_better_high else "worse"
        return f"{number(max(ratio, 1 / ratio))}{TIMES}", word


def _cut(measure: Measure, share: float) -> Callable[[Figures], float | None]:
    def found(figures: Figures) -> float | None:
        latency = figures.latencies.get(measure)
        return None if latency is None else latency.cut(share)

    return found


def _mean(measure: Measure) -> Callable[[Figures], float | None]:
    def found(figures: Figures) -> float | None:
        latency = figures.latencies.get(measure)
        return None if latency is None else latency.mean

    return found


RATES = (
    Quantity("Requests/s", lambda figures: figures.requests_per_s, number, is_better_high=True),
    Quantity("Tokens/s", lambda figures: figures.tokens_per_s, number, is_better_high=True),
)
FAILED = Quantity("Not answered", lambda figures: figures.failed_share, percent)
GLANCE = (
    *RATES,
    Quantity("Time to first token, p95", _cut("ttft", 0.95), duration),
    Quantity("End to end, p95", _cut("e2e", 0.95), duration),
    FAILED,
)
COUNTS = (
    Quantity("Requests", lambda figures: figures.requests, lambda value: f"{value:,.0f}", None),
    Quantity("Answered", lambda figures: figures.done, lambda value: f"{value:,.0f}", None),
    FAILED,
    Quantity("Seconds", lambda figures: figures.seconds, number, None),
    *RATES,
)


def latency_quantities(measure: Measure) -> tuple[Quantity, ...]:
    """The rows of the table for one measure."""
    rows = [Quantity(cut, _cut(measure, share), duration) for cut, share in CUTS]
    return (Quantity("mean", _mean(measure), duration), *rows)


def measured(shown: Sequence[Shown]) -> list[Measure]:
    """The measures that at least one series tells."""
    return [name for name in MEASURES if any(name in one.figures.latencies for one in shown)]


def compared(runs: Sequence[Run]) -> list[Shown]:
    """All series of all runs, in their order; series without a request are none.

    Raises:
        InvalidRequest: they are more than can be told apart.
    """
    labels = _labels(runs)
    found: list[Shown] = []
    first: dict[str, Figures] = {}
    for run, label in zip(runs, labels, strict=True):
        for kind, series in run.series.items():
            figures = Figures.of(series)
            name = label if len(run.series) == 1 else f"{label} · {kind}"
            reference = first.get(kind) if run is not runs[0] else None
            found.append(Shown(Drawn(name, len(found)), run, figures, reference))
            if run is runs[0]:
                first[kind] = figures
    if len(found) > MOST_SERIES:
        raise InvalidRequest(
            f"there are {len(found)} kinds of requests in these runs, and a plot tells {MOST_SERIES} apart: "
            "make several reports"
        )
    return found


def _labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run, no two alike."""
    labels = [run.head.label for run in runs]
    if len(set(labels)) < len(labels):
        labels = [f"{run.head.label} ({run.path.stem})" for run in runs]
    if len(set(labels)) < len(labels):
        labels = [f"{run.head.label} ({place})" for place, run in enumerate(runs, 1)]
    return labels
