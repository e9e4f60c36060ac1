"""The page: one file of HTML with everything in it, no script, and nothing that is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from streamfleet_producer.report import charts, notes
from streamfleet_producer.report.comparison import (
    COUNTS,
    GLANCE,
    Quantity,
    Shown,
    compared,
    latency_quantities,
    measured,
)
from streamfleet_producer.report.drawing import element, key
from streamfleet_producer.report.figures import MEASURES, rate_curves, sample_curve
from streamfleet_producer.report.reading import UNKNOWN, Run
from streamfleet_producer.report.records import OUTCOMES
from streamfleet_producer.report.scale import Scale, percent

# Should a text ever become an element: nothing runs, nothing is fetched.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"


def render(runs: Sequence[Run], title: str | None = None) -> str:
    """The page of one run, or of several side by side.

    Raises:
        InvalidRequest: they have more series than can be told apart.
    """
    shown = compared(runs)
    name = title or " and ".join(dict.fromkeys(run.head.label for run in runs))
    body = element("main", _header(runs, name), class_="page")
    if shown:
        body.extend([_glance(shown), _latencies(shown), _course(runs, shown), _table(shown)])
    else:
        body.append(
            element("p", "There is no request in these records after the warm-up.", class_="card empty")
        )
    body.extend([_facts(runs), notes.section(runs, shown)])
    style = files(__package__).joinpath("page.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", name),
        element("style", style),
    )
    page = element("html", head, element("body", body), lang="en")
    return "<!doctype html>\n" + ET.tostring(page, "unicode", method="html") + "\n"


def _header(runs: Sequence[Run], title: str) -> Element:
    requests = sum(run.requests for run in runs)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs side by side"
    began = ", ".join(dict.fromkeys(run.head.began_at for run in runs if run.head.began_at))
    under = f"{requests:,} request{'s' * (requests != 1)} in {count}" + (f" · {began}" if began else "")
    return element("header", element("h1", title), element("p", under, class_="under"))


def _legend(shown: Sequence[Shown]) -> Element | None:
    if len(shown) == 1:
        return None
    items = [element("li", key(one.drawn.colour), element("span", one.drawn.name)) for one in shown]
    return element("ul", *items, class_="legend")


def _section(title: str, *inside: Element | None, class_: str = "") -> Element:
    return element("section", element("h2", title), *inside, class_=class_)


def _ratio(quantity: Quantity, one: Shown) -> Element | None:
    ratio = quantity.ratio(one)
    if ratio is None:
        return None
    times, word = ratio
    return element("span", f"{times} {word}".strip(), class_=f"ratio {word}".strip())


def _glance(shown: Sequence[Shown]) -> Element:
    tiles = []
    for quantity in GLANCE:
        if all(quantity.of(one.figures) is None for one in shown):
            continue
        lines = [
            element(
                "div",
                key(one.drawn.colour) if len(shown) > 1 else None,
                element("strong", quantity.text(one.figures)),
                _ratio(quantity, one),
                class_="figure",
            )
            for one in shown
        ]
        tiles.append(element("div", element("h3", quantity.name), *lines, class_="card tile"))
    return _section("At a glance", _legend(shown), element("div", *tiles, class_="tiles"))


def _latencies(shown: Sequence[Shown]) -> Element:
    cards = []
    for measure in measured(shown):
        title, meaning = MEASURES[measure]
        having = [
            (one.drawn, one.figures.latencies[measure]) for one in shown if measure in one.figures.latencies
        ]
        scale = Scale.fitting(
            [
                value
                for _, latency in having
                for value in (latency.cut(0.01), latency.cut(0.5), latency.cut(1))
            ]
        )
        plots = element(
            "div",
            _figure(charts.cuts(f"cuts-{measure}", title, having, scale), "Percentiles"),
            _figure(
                charts.distribution(f"ecdf-{measure}", title, having, scale), "Share that took no longer"
            ),
            class_="pair",
        )
        cards.append(
            element("div", element("h3", title), element("p", meaning, class_="under"), plots, class_="card")
        )
    if not cards:
        cards = [element("p", "No request ended well, so there are no latencies.", class_="card empty")]
    return _section("Latency", _legend(shown), element("div", *cards, class_="halves"))


def _figure(plot: Element, caption: str) -> Element:
    return element("figure", element("figcaption", caption), plot)


def _card(title: str, under: str, plot: Element) -> Element:
    return element("div", element("h3", title), element("p", under, class_="under"), plot, class_="card")


def _course(runs: Sequence[Run], shown: Sequence[Shown]) -> Element:
    warmup_s = min(run.head.warmup_ms for run in runs) / 1000
    curves = [(one.drawn, *rate_curves(one.figures)) for one in shown]
    cards = []
    for name, title, place in (("requests", "Requests per second", 1), ("tokens", "Tokens per second", 2)):
        lines = [charts.Line(one[0], one[place]) for one in curves if one[place]]  # type: ignore[arg-type]
        if lines:
            plot = charts.over_time(f"rate-{name}", f"{title} over time", lines, warmup_s=warmup_s)
            under = "answered, when they ended" if place == 1 else "of answers, as they came"
            cards.append(_card(title, under, plot))
    cards += _samples(runs, shown, warmup_s)
    sizes = [(one.drawn, one.figures.series.batch_sizes) for one in shown if one.figures.series.batch_sizes]
    if sizes:
        plot = charts.histogram(
            "batch-size", "Requests by the size of their batch", "requests in a batch", sizes
        )
        cards.append(_card("Batch size", "share of requests that ran in a batch of this size", plot))
    ends = [(one.drawn, one.figures.series.outcomes) for one in shown]
    card = _card("Outcomes", "how the requests ended", charts.outcomes("outcomes", ends))
    present = [end for end in OUTCOMES if any(counts[end] for _, counts in ends)]
    items = [element("li", element("span", "", class_=f"swatch o-{end}"), end) for end in present]
    card.append(element("ul", *items, class_="legend"))
    cards.append(card)
    return _section("Over the run", _legend(shown), element("div", *cards, class_="thirds"))


def _samples(runs: Sequence[Run], shown: Sequence[Shown], warmup_s: float) -> list[Element]:
    """How full queue and batches were: of whole runs, drawn in the colour of a run's first series."""
    depth: list[charts.Line] = []
    fill: list[charts.Line] = []
    rows = []
    for run in runs:
        drawn = next((one.drawn for one in shown if one.run is run), None)
        if drawn is None:
            continue
        for column, is_dotted in ((run.queued, False), (run.running, True)):
            if curve := sample_curve(run, column):
                depth.append(charts.Line(drawn, curve, is_dotted))
        if curve := sample_curve(run, run.rows, run.max_rows):
            fill.append(charts.Line(drawn, curve))
            counts: dict[int, int] = {}
            for value in run.rows:
                if value != UNKNOWN:
                    counts[int(value)] = counts.get(int(value), 0) + 1
            rows.append((drawn, counts))
    cards = []
    if depth:
        plot = charts.over_time("queue-depth", "Queue depth over time", depth, warmup_s=warmup_s)
        cards.append(_card("Queue depth", "requests that wait, and dotted those that run", plot))
    if fill:
        plot = charts.over_time("batch-fill", "Batch fill over time", fill, share=True, warmup_s=warmup_s)
        cards.append(_card("Batch fill", "rows in use, of all that the batches have", plot))
    if rows and not any(one.figures.series.batch_sizes for one in shown):
        plot = charts.histogram("rows", "Rows in use", "rows in use", rows)
        cards.append(_card("Rows in use", "share of the samples with so many", plot))
    return cards


def _table(shown: Sequence[Shown]) -> Element:
    tables = [_matrix("", [("", COUNTS, shown)])]
    groups = [
        (
            MEASURES[measure][0],
            latency_quantities(measure),
            [one for one in shown if measure in one.figures.latencies],
        )
        for measure in measured(shown)
    ]
    if groups:
        tables.append(_matrix("latencies", groups))
    failures = _failures(shown)
    return _section("The numbers", *(_scrolled(one) for one in (*tables, *failures)), class_="numbers")


def _scrolled(table: Element) -> Element:
    # One can reach it by keys, and so scroll it.
    return element("div", table, class_="card scroll", tabindex="0", role="group", aria_label="A table")


def _matrix(name: str, groups: Sequence[tuple[str, Sequence[Quantity], Sequence[Shown]]]) -> Element:
    """A line for each series, in groups that have the same columns."""
    columns = groups[0][1]
    heads = [element("th", quantity.name, scope="col") for quantity in columns]
    bodies = []
    for title, quantities, shown in groups:
        rows = []
        if title:
            span = str(len(columns) + 1)
            rows.append(element("tr", element("th", title, colspan=span, scope="rowgroup", class_="group")))
        for one in shown:
            cells = [
                element("td", quantity.text(one.figures), _ratio(quantity, one)) for quantity in quantities
            ]
            rows.append(element("tr", _name(one), *cells))
        bodies.append(element("tbody", *rows))
    return element("table", element("thead", element("tr", element("td", ""), *heads)), *bodies, class_=name)


def _name(one: Shown) -> Element:
    return element("th", key(one.drawn.colour), element("span", one.drawn.name), scope="row", class_="series")


def _failures(shown: Sequence[Shown]) -> list[Element]:
    """A table of what was not answered, and why; none if all was."""
    ends = [
        end for end in OUTCOMES if end != "done" and any(one.figures.series.outcomes[end] for one in shown)
    ]
    codes = sorted({code for one in shown for code in one.figures.series.errors})
    if not ends:
        return []

    def cell(count: int, one: Shown) -> Element:
        return element("td", f"{count:,} ({percent(count / one.figures.requests)})" if count else "0")

    heads = [element("th", name, scope="col") for name in (*ends, *codes)]
    rows = []
    for one in shown:
        series = one.figures.series
        counts = [*(series.outcomes[end] for end in ends), *(series.errors[code] for code in codes)]
        rows.append(element("tr", _name(one), *(cell(count, one) for count in counts)))
    head = element("thead", element("tr", element("td", "Not answered, and the errors"), *heads))
    return [element("table", head, element("tbody", *rows))]


def _facts(runs: Sequence[Run]) -> Element:
    cards = []
    for run in runs:
        head = run.head
        inside = [element("h3", head.label)]
        if head.command:
            inside.append(element("pre", element("code", head.command)))
        for name in ("model", "settings", "machine", "versions"):
            facts: dict[str, str] = getattr(head, name)
            if not facts:
                continue
            rows = [
                element("tr", element("th", fact, scope="row"), element("td", value))
                for fact, value in facts.items()
            ]
            inside += [element("h4", name.capitalize()), element("table", *rows, class_="facts")]
        cards.append(element("div", *inside, class_="card"))
    return _section("What was run", element("div", *cards, class_="halves"))
