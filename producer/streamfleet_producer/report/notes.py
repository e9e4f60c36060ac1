"""What the numbers of a page mean, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from streamfleet_producer.report.comparison import Shown, measured
from streamfleet_producer.report.drawing import element
from streamfleet_producer.report.reading import Run
from streamfleet_producer.report.scale import duration

FEW = 100
"""Of fewer values p99 is the largest but for a part."""


def section(runs: Sequence[Run], shown: Sequence[Shown]) -> Element:
    """The last part of the page."""
    items = [element("li", text) for text in texts(runs, shown)]
    return element("section", element("h2", "How to read this"), element("ul", *items, class_="card notes"))


def texts(runs: Sequence[Run], shown: Sequence[Shown]) -> list[str]:
    """One sentence or two for each thing that a reader should know of these runs."""
    return [
        *(_of_run(run) for run in runs),
        *(note for one in shown for note in _of_series(one)),
        *_general(shown),
    ]


def _of_run(run: Run) -> str:
    told = f"{run.head.label} ({run.path.name}): {run.requests:,} requests count"
    if run.head.warmup_ms:
        told += f", {run.warmup:,} of the first {duration(run.head.warmup_ms)}, the warm-up, are left out"
    else:
        told += ", none is left out as warm-up"
    if run.head.loop == "open":
        late = max((series.sent_late_ms for series in run.series.values()), default=0.0)
        told += (
            ". Open loop: each request was due at a time that no answer could put off, and its latencies "
            f"count from then on; the one that was sent latest was {duration(late)} behind"
        )
    elif run.head.loop == "closed":
        told += (
            ". Closed loop: each caller waited for his answer before he asked again, so what stalls is asked "
            "less, and the tail looks better than it would to callers who come when they like"
        )
    if run.sample_at_ms:
        told += f". Queue and batches were looked at {len(run.sample_at_ms):,} times"
    return f"{told}."


def _of_series(one: Shown) -> list[str]:
    count = one.figures.done
    found = []
    if 0 < count < FEW:
        found.append(
            f"{one.drawn.name}: {count} request{'s' * (count != 1)} ended well, which is few: its p95 and "
            "p99 are made of one or two of them."
        )
    return found


def _general(shown: Sequence[Shown]) -> list[str]:
    if not shown:
        return []
    found = [
        (
            "Latencies are of the requests that ended well. A percentile is found among all their values, "
            "between the two nearest ones in proportion (numpy's default); none is a mean of percentiles, or "
            "made of buckets."
        ),
        (
            "Rates are requests that ended well, and the tokens of their answers, by the time from the first "
            "submission after the warm-up to the last of these ends. Over time, a streamed answer's tokens "
            "are spread evenly from its first one to its end."
        ),
    ]
    measures = measured(shown)
    if "itl" in measures:
        found.append(
            "Inter-token latency is the time between two pieces of an answer as its caller got them; a piece "
            "may hold several tokens."
        )
    if any(one.figures.series.batch_sizes for one in shown):
        found.append("Batch sizes are those that the answers tell, counted once a request.")
    if any(one.reference is not None for one in shown):
        found.append(
            "How many times better or worse a number is, is told by the same one of the first run, for "
            "requests of the same kind; what differs by less than 2 % is called alike. It says nothing about "
            "chance: compare runs that you repeated."
        )
    return found
