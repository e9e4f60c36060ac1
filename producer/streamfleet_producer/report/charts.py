"""The plots of a report: inline SVG, drawn here.

Libraries for it either need a script in the page, or bring numpy, or know neither a page's dark side nor how
to be read aloud; five kinds of plots are less than any of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from streamfleet_producer.report.drawing import CHAR_PX, DASHES, MARKERS, Plot, element, marker, path
from streamfleet_producer.report.figures import CUTS, Curve, Latency
from streamfleet_producer.report.records import OUTCOMES, Outcome
from streamfleet_producer.report.scale import Scale, duration, number, percent, short, unit_of

MOST_SERIES = len(MARKERS)
SMALL_WIDTH = 268.0
WIDE = (340.0, 196.0)
MOST_BARS = 16
TO = "\u2013"
_POINTS = 200
"""Of more values a distribution is drawn through so many, and through the ends of its tail."""


@dataclass(frozen=True)
class Drawn:
    """A series as plots show it: its name, and its number among the colours."""

    name: str
    colour: int


def _latency_axis(plot: Plot, scale: Scale) -> None:
    unit = unit_of(scale)
    ticks = [(scale.place(tick), short(tick / unit.factor)) for tick in scale.ticks]
    plot.x_axis(ticks, f"{unit.name}, logarithmic" if scale.is_log else unit.name)


def small_height(series: int) -> float:
    """Of the plots of a latency, which stand side by side: a mark of each series fits in five rows."""
    return max(190.0, len(CUTS) * (13.0 * series + 8) + 42)


def cuts(name: str, title: str, shown: Sequence[tuple[Drawn, Latency]], scale: Scale) -> Element:
    """Percentiles: a row for each, a mark for each series."""
    height = small_height(len(shown))
    row = (height - 42) / len(CUTS)
    told = "; ".join(
        f"{drawn.name}: " + ", ".join(f"{cut} {duration(ms)}" for cut, ms in latency.cuts.items())
        for drawn, latency in shown
    )
    plot = Plot(name, f"{title}: percentiles", told, (SMALL_WIDTH, height), left=40)
    _latency_axis(plot, scale)
    for number_, (cut, share) in enumerate(CUTS):
        top = plot.y1 + number_ * row
        middle = top + row / 2
        plot.add(element("text", cut, x=plot.x0 - 6, y=middle + 4, text_anchor="end", class_="tick"))
        for place, (drawn, latency) in enumerate(shown):
            ms = latency.cut(share)
            x, y = plot.x(scale.place(ms)), middle + 13 * (place - (len(shown) - 1) / 2)
            text = duration(ms)
            fits = x + 9 + len(text) * CHAR_PX <= plot.width
            plot.add(
                element("line", x1=plot.x0, x2=plot.x1, y1=y, y2=y, class_="row"),
                marker((x, y), drawn.colour, title=f"{drawn.name} {cut}: {text}"),
                element(
                    "text",
                    text,
                    x=x + 9 if fits else x - 9,
                    y=y + 4,
                    text_anchor="start" if fits else "end",
                    class_="value",
                ),
            )
    return plot.svg


def distribution(name: str, title: str, shown: Sequence[tuple[Drawn, Latency]], scale: Scale) -> Element:
    """The share of requests that took no longer than this."""
    height = min(240.0, small_height(len(shown)))
    told = "; ".join(
        f"{drawn.name}: half within {duration(latency.cut(0.5))}, 95 of 100 within "
        f"{duration(latency.cut(0.95))}, of {len(latency.ordered_ms):,}"
        for drawn, latency in shown
    )
    plot = Plot(name, f"{title}: cumulative distribution", told, (SMALL_WIDTH, height), left=40)
    _latency_axis(plot, scale)
    plot.y_axis([(share / 100, f"{share}%") for share in (0, 25, 50, 75, 100)])
    for drawn, latency in shown:
        points = [(plot.x(scale.place(ms)), plot.y(share)) for ms, share in _steps(latency)]
        line = element(
            "path", d=path(points), class_=f"line t{drawn.colour}", stroke_dasharray=DASHES[drawn.colour]
        )
        plot.add(line)
    return plot.svg


def _steps(latency: Latency) -> list[tuple[float, float]]:
    values = latency.ordered_ms
    if len(values) > _POINTS:
        shares = [place / _POINTS for place in range(_POINTS)]
        shares += [1 - 0.1**power for power in range(3, 7) if 0.1**power * len(values) >= 1] + [1.0]
        return [(latency.cut(share), share) for share in sorted(shares)]
    points = [(values[0], 0.0)]
    for place, value in enumerate(values):
        points += [(value, place / len(values)), (value, (place + 1) / len(values))]
    return points


@dataclass(frozen=True)
class Line:
    """A curve of a plot over time; one of a pair is dotted."""

    drawn: Drawn
    curve: Curve
    is_dotted: bool = False


def over_time(
    name: str, title: str, lines: Sequence[Line], *, share: bool = False, warmup_s: float = 0.0
) -> Element:
    """Curves over the seconds of a run; `share` has them from 0 to 100 %."""
    values = [value for line in lines for value in line.curve.values if value is not None]
    most, until = max(values), max(at for line in lines for at in line.curve.at_s)
    told = f"between {short(min(values) * (100 if share else 1))} and {short(most * (100 if share else 1))}"
    scale = Scale(0.0, 1.0, False, (0, 0.25, 0.5, 0.75, 1.0)) if share else Scale.linear(most, 4)
    texts = [f"{tick * 100:.0f}%" if share else short(tick) for tick in scale.ticks]
    plot = Plot(name, title, told, WIDE, left=12 + CHAR_PX * max(map(len, texts)))
    time = Scale.linear(until, 6)
    # The last tick may lie far behind the end.
    time = Scale(0.0, until or 1.0, False, tuple(tick for tick in time.ticks if tick <= until * 1.001))
    unit, factor = ("min", 60.0) if until >= 600 else ("s", 1.0)
    if unit == "min":
        time = Scale(
            0.0, until, False, tuple(t * 60 for t in Scale.linear(until / 60, 6).ticks if t * 60 <= until)
        )
    if 0 < warmup_s < until:
        right = plot.x(time.place(warmup_s))
        plot.add(
            element(
                "rect", x=plot.x0, y=plot.y1, width=right - plot.x0, height=plot.y0 - plot.y1, class_="warm"
            )
        )
    plot.x_axis([(time.place(tick), short(tick / factor)) for tick in time.ticks], f"{unit} from the start")
    plot.y_axis([(scale.place(tick), text) for tick, text in zip(scale.ticks, texts, strict=True)])
    for line in lines:
        points = [
            (plot.x(time.place(at)), plot.y(scale.place(value)))
            for at, value in zip(line.curve.at_s, line.curve.values, strict=True)
            if value is not None
        ]
        colour = line.drawn.colour
        if len(points) == 1:
            plot.add(marker(points[0], colour))
            continue
        if len({one.drawn.colour for one in lines}) == 1 and not line.is_dotted:
            floor = [(points[-1][0], plot.y0), (points[0][0], plot.y0)]
            plot.add(element("path", d=path([*points, *floor]) + "Z", class_=f"area s{colour}"))
        dash = "2 3" if line.is_dotted else DASHES[colour]
        plot.add(element("path", d=path(points), class_=f"line t{colour}", stroke_dasharray=dash))
    return plot.svg


def histogram(name: str, title: str, axis: str, shown: Sequence[tuple[Drawn, Mapping[int, int]]]) -> Element:
    """Shares by whole numbers: a group of bars for each, or for a few of them together."""
    least = min(min(counts) for _, counts in shown)
    most = max(max(counts) for _, counts in shown)
    width = max(1, math.ceil((most - least + 1) / MOST_BARS))
    groups = (most - least) // width + 1
    shares: list[list[float]] = []
    for _, counts in shown:
        grouped: Counter[int] = Counter()
        for value, count in counts.items():
            grouped[(value - least) // width] += count
        total = grouped.total()
        shares.append([grouped[group] / total for group in range(groups)])
    highest = max(map(max, shares))
    scale = Scale.linear(highest * 100, 4)
    told = "; ".join(
        f"{drawn.name}: mean {number(sum(v * c for v, c in counts.items()) / sum(counts.values()))}"
        for drawn, counts in shown
    )
    plot = Plot(name, title, told, WIDE, left=42)
    names = [
        f"{least + group * width}"
        if width == 1
        else f"{least + group * width}{TO}{least + (group + 1) * width - 1}"
        for group in range(groups)
    ]
    plot.x_axis([], axis)
    plot.y_axis([(scale.place(tick), f"{short(tick)}%") for tick in scale.ticks])
    room = (plot.x1 - plot.x0) / groups
    bar = min(28.0, room * 0.8 / len(shown))
    free_from = -1e9
    for group in range(groups):
        middle = plot.x0 + room * (group + 0.5)
        half = len(names[group]) * CHAR_PX / 2
        if middle - half >= free_from:
            plot.add(
                element("text", names[group], x=middle, y=plot.y0 + 14, text_anchor="middle", class_="tick")
            )
            free_from = middle + half + CHAR_PX / 2
        for place, (drawn, _) in enumerate(shown):
            share = shares[place][group]
            if not share:
                continue
            left = middle + bar * (place - len(shown) / 2)
            top = plot.y(scale.place(share * 100))
            plot.add(
                element(
                    "rect",
                    element("title", f"{drawn.name}, {names[group]}: {percent(share)}"),
                    x=left + 0.5,
                    y=top,
                    width=max(1.0, bar - 1),
                    height=plot.y0 - top,
                    class_=f"bar s{drawn.colour}",
                )
            )
    return plot.svg


def outcomes(name: str, shown: Sequence[tuple[Drawn, Mapping[Outcome, int]]]) -> Element:
    """How the requests ended: a bar for each series, all of its requests long."""
    told = "; ".join(
        f"{drawn.name}: " + ", ".join(f"{counts.get(one, 0):,} {one}" for one in OUTCOMES if counts.get(one))
        for drawn, counts in shown
    )
    row = 40
    plot = Plot(
        name,
        "How the requests ended",
        told,
        (WIDE[0], row * len(shown) + 4),
        left=2,
        right=2,
        bottom=0,
        top=2,
    )
    for place, (drawn, counts) in enumerate(shown):
        top, left, total = plot.y1 + place * row, plot.x0, sum(counts.values())
        plot.add(
            marker((left + 6, top + 9), drawn.colour),
            element("text", _cut(drawn.name, 34), x=left + 16, y=top + 13, class_="value"),
            element("text", f"{total:,}", x=plot.x1, y=top + 13, text_anchor="end", class_="tick"),
        )
        for one in OUTCOMES:
            count = counts.get(one, 0)
            if not count:
                continue
            # Wide enough to be seen, however few they are.
            width = max(2.0, (plot.x1 - plot.x0) * count / total)
            at = min(left, plot.x1 - width)
            plot.add(
                element(
                    "rect",
                    element("title", f"{drawn.name}: {count:,} {one} ({percent(count / total)})"),
                    x=at,
                    y=top + 19,
                    width=width,
                    height=12,
                    class_=f"bar o-{one}",
                )
            )
            left = at + width
    return plot.svg


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
