"""A dashboard's data as a picture, laid out as the dashboard is, for readers without Grafana."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from board_queries import Panel
from picture import FAINT, UNIT_IN, WIDTH_IN, Box, Picture
from prometheus_process import Series
from shown_units import shown

COLUMNS = 24
GAP_IN, TITLE_IN = 0.06, 0.26
LEGEND_LINE_IN = 0.17
COLOURS = (
    "#3274d9",
    "#e0752d",
    "#37872d",
    "#c4162a",
    "#8f3bb8",
    "#b58b00",
    "#0e8a8a",
    "#d85c9c",
    "#705c4f",
    "#7b8794",
)
COLOURS_OF_HEAT = "YlOrRd"
FEW_SERIES, MANY_SERIES = 3, 6
"""A figure has room for so many, and so many have a place in a legend: the highest."""


@dataclass(frozen=True)
class Drawn:
    """A panel, and for each of its queries the series that it gave, with their legends."""

    panel: Panel
    curves: list[list[tuple[str, Series]]]

    def named(self) -> list[tuple[str, Series]]:
        """All series that have a point."""
        return [(name, series) for target in self.curves for name, series in target if series.points]


def draw(
    title: str, drawn: Sequence[Drawn], started: float, ended: float, path: Path, *, note: str = ""
) -> None:
    """Draw a dashboard with all its panels; `note` says what happened."""
    rows = max(one.panel.place["y"] + one.panel.place["h"] for one in drawn)
    picture = Picture(title, rows, started, ended, note)
    for one in drawn:
        place = one.panel.place
        box = Box(
            place["x"] * WIDTH_IN / COLUMNS,
            (rows - place["y"] - place["h"]) * UNIT_IN,
            place["w"] * WIDTH_IN / COLUMNS,
            place["h"] * UNIT_IN,
        ).within(GAP_IN, GAP_IN / 2, GAP_IN, GAP_IN / 2)
        if one.panel.kind == "row":
            picture.text(
                box.within(0.08, 0.03, 0, 0), one.panel.title, size=9.5, weight="bold", ink="#3b4252"
            )
            continue
        picture.card(box)
        head = Box(box.left + 0.1, box.bottom + box.height - TITLE_IN + 0.04, box.width, TITLE_IN)
        picture.text(head, one.panel.title, size=9, weight="bold")
        KINDS[one.panel.kind](picture, box.within(0, 0, 0, TITLE_IN), one)
    picture.save(path)


def _figures(picture: Picture, box: Box, one: Drawn) -> None:
    """The last value of each series, with its name beneath and its course in the ground."""
    named = one.named()[:FEW_SERIES]
    if one.panel.is_name:
        for place, (name, _) in enumerate(named):
            line = Box(box.left, box.bottom + box.height - 0.3 * (place + 1), box.width, 0.3)
            picture.text(line, name, size=8.5, middle=True)
        return
    axes = picture.axes(Box(box.left, box.bottom, box.width, 0.45 * box.height))
    axes.set_axis_off()
    axes.set_xlim(picture.started, picture.ended)
    most = max((value for _, series in named for _, value in series.points), default=0) or 1
    axes.set_ylim(0, 1.05 * most)
    size = (15, 12, 9.5)[max(len(named), 1) - 1]
    for place, (name, series) in enumerate(named):
        times, values = zip(*series.points, strict=True)
        axes.fill_between(times, values, color=COLOURS[place], alpha=0.16, linewidth=0)
        column = Box(box.left + place * box.width / len(named), box.bottom, box.width / len(named), 0)
        picture.text(
            Box(column.left, box.bottom + 0.42 * box.height, column.width, 0),
            shown(values[-1], one.panel.unit),
            size=size,
            weight="bold",
            ink=COLOURS[place],
            middle=True,
        )
        picture.text(Box(column.left, box.bottom + 0.1, column.width, 0), name, size=7.5, middle=True)


def _lines(picture: Picture, box: Box, one: Drawn) -> None:
    """Curves over time; where there are many, those that stay at zero have no legend."""
    named = one.named()
    moving = [name for name, series in named if any(value for _, value in series.points)]
    told = moving if len(named) > 6 and moving else [name for name, _ in named]
    if len(told) > MANY_SERIES:
        highest = {name: max(value for _, value in series.points) for name, series in named}
        told = sorted(sorted(told, key=lambda name: -highest[name])[:MANY_SERIES], key=told.index)
    columns = max(1, min(len(told), int((box.width - 0.3) / (0.066 * max(map(len, told), default=1) + 0.4))))
    lines = math.ceil(len(told) / columns) if told else 0
    axes = picture.axes(box.within(0.68, 0.34 + LEGEND_LINE_IN * lines, 0.14, 0.06))
    _dress(picture, axes)
    below: dict[float, float] = {}
    for name, series in named:
        if one.panel.is_stacked and name not in moving and moving:
            continue  # it would only draw the top of the others again
        times, values = zip(*series.points, strict=True)
        colour = COLOURS[told.index(name) % len(COLOURS)] if name in told else "#b8bec7"
        label = name if name in told else "_"
        # A series that began late, or broke off: no line across what nobody knows.
        if one.panel.is_stacked:
            under = [below.get(at, 0.0) for at in times]
            tops = [low + value for low, value in zip(under, values, strict=True)]
            below.update(zip(times, tops, strict=True))
            axes.fill_between(times, under, tops, color=colour, alpha=0.45, linewidth=0)
            axes.plot(times, tops, color=colour, linewidth=1.1, label=label)
        else:
            axes.plot(*_broken(series), color=colour, linewidth=1.4, label=label)
    axes.set_ylim(bottom=0)
    if axes.get_ylim()[1] <= 0.06 and one.panel.unit in {"short", "none", "ops", "reqps"}:
        axes.set_ylim(0, 1)
    _scale(axes, one.panel.unit)
    if told:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.1 / WIDTH_IN + box.left / WIDTH_IN, (box.bottom + 0.01) / picture.height_in),
            bbox_transform=picture.figure.transFigure,
            ncol=columns,
            frameon=False,
            fontsize=7.5,
            handlelength=1.1,
            handletextpad=0.4,
            columnspacing=1.1,
            labelspacing=0.25,
            borderpad=0.2,
        )


def _broken(series: Series) -> tuple[list[float], list[float]]:
    """Times and values, with a hole where points are missing."""
    times: list[float] = []
    values: list[float] = []
    for at, value in series.points:
        if times and at - times[-1] > 5:
            times.append(math.nan)
            values.append(math.nan)
        times.append(at)
        values.append(value)
    return times, values


def _heat(picture: Picture, box: Box, one: Drawn) -> None:
    """How many values fell between two bounds of a histogram: the more, the darker."""
    buckets = sorted((float(series.labels["le"]), dict(series.points)) for _, series in one.named())
    times = sorted({at for _, points in buckets for at in points})
    below = [0.0] * len(times)
    cells: list[list[float]] = []
    for _, points in buckets:
        upto = [points.get(at, low) for at, low in zip(times, below, strict=True)]
        cells.append([max(high - low, 0.0) for high, low in zip(upto, below, strict=True)])
        below = upto
    filled = [place for place, row in enumerate(cells) if max(row, default=0) > 0.01]
    first, last = (max(min(filled) - 1, 0), min(max(filled) + 1, len(cells) - 1)) if filled else (0, 0)
    kept = cells[first : last + 1]
    axes = picture.axes(box.within(0.68, 0.34, 0.75, 0.06))
    _dress(picture, axes)
    edges = [*times, times[-1] + times[-1] - times[-2]]
    drawn = [[value if value > 0.01 else math.nan for value in row] for row in kept]
    mesh = axes.pcolormesh(edges, range(len(kept) + 1), drawn, cmap=COLOURS_OF_HEAT)
    bounds = [buckets[place][0] for place in range(first, last + 1)]
    step = max(1, math.ceil(len(bounds) / 9))
    axes.set_yticks(range(1, len(bounds) + 1, step))
    axes.set_yticklabels(
        ["more" if math.isinf(bound) else f"≤ {shown(bound, one.panel.unit)}" for bound in bounds[::step]]
    )
    axes.set_ylim(0, len(kept))
    bar = picture.axes(Box(box.left + box.width - 0.62, box.bottom + 0.34, 0.1, box.height - 0.4))
    picture.figure.colorbar(mesh, cax=bar)
    bar.tick_params(labelsize=7, length=2, color=FAINT, labelcolor=FAINT)
    bar.yaxis.set_major_locator(MaxNLocator(4))
    bar.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, "short")))


def _scale(axes: Axes, unit: str) -> None:
    """Ticks where a reader expects them: of bytes at powers of two, of minutes at whole ones."""
    if unit == "bytes":
        most = max(axes.get_ylim()[1], 4)
        axes.yaxis.set_major_locator(MultipleLocator(2 ** math.ceil(math.log2(most / 5))))
    elif unit == "s" and axes.get_ylim()[1] > 120:
        axes.yaxis.set_major_locator(MultipleLocator(60 * math.ceil(axes.get_ylim()[1] / 300)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))


def _dress(picture: Picture, axes: Axes) -> None:
    axes.set_xlim(picture.started, picture.ended)
    begun = picture.started
    span = picture.ended - begun
    step = next((step for step in (10, 15, 30, 60, 120, 300) if span / step <= 8), 600)
    axes.set_xticks([begun + at for at in range(0, int(span) + 1, step)])
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{int(at - begun + 0.5) // 60}:{int(at - begun + 0.5) % 60:02d}")
    )
    axes.grid(visible=True, color="#e3e6eb", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7.5, length=2, color=FAINT, labelcolor=FAINT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3c8d0")


KINDS = {"stat": _figures, "timeseries": _lines, "heatmap": _heat}
