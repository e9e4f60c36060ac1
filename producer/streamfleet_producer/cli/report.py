"""`streamfleet report`: records of a load or of a benchmark as a page to look at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import leaving_quietly, print_json, say
from streamfleet_producer.report.comparison import Shown, compared
from streamfleet_producer.report.page import render
from streamfleet_producer.report.reading import read

MOST_RUNS = 6


def report(
    records: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDS", help="Files that `load --records` or a benchmark wrote."),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="<file>", help="The page; `-` is standard output.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(help="Of the page; else what the runs are called.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """Draw what a load or a benchmark recorded, as a page.

    Several files are compared side by side, with ratios to the first one. The page needs no network and holds
    no script. With --json the numbers are printed and no page is written.
    """
    if len(records) > MOST_RUNS:
        raise InvalidRequest(f"at most {MOST_RUNS} runs are compared at once: name fewer files")
    runs = [read(path) for path in records]
    if json:
        print_json([numbers(one) for one in compared(runs)])
        return
    page = render(runs, title)
    with leaving_quietly():
        if str(output) == "-":
            sys.stdout.write(page)
            return
        try:
            output.write_text(page, "utf-8")
        except OSError as error:
            raise InvalidRequest(f"{output} cannot be written: {error.strerror}") from None
    count = sum(run.requests for run in runs)
    say(f"{output}: {count:,} requests; open it in a browser")


def numbers(one: Shown) -> dict[str, Any]:
    """The numbers of one series, for scripts; times in milliseconds."""
    figures = one.figures
    return {
        "series": one.drawn.name,
        "kind": figures.series.kind,
        "requests": figures.requests,
        "outcomes": dict(figures.series.outcomes),
        "errors": dict(figures.series.errors),
        "seconds": figures.seconds,
        "requests_per_s": figures.requests_per_s,
        "tokens_per_s": figures.tokens_per_s,
        **{
            f"{name}_ms": {"count": len(latency.ordered_ms), "mean": latency.mean, **latency.cuts}
            for name, latency in figures.latencies.items()
        },
    }
