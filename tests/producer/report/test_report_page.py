"""The page: that each plot is there with a mark for all that is known, and nothing else gets in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from page_tree import Node, PageTree
from run_files import request, samples, streamed, write
from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.cli.app import app
from streamfleet_producer.report.page import render
from streamfleet_producer.report.reading import read

PLOTS = {
    *(f"{plot}-{measure}" for plot in ("cuts", "ecdf") for measure in ("queue", "ttft", "itl", "e2e")),
    *("rate-requests", "rate-tokens", "queue-depth", "batch-fill", "batch-size", "outcomes"),
}
EVIL = "\"'></title><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b"


def page(*files: Path, title: str | None = None) -> PageTree:
    return PageTree(render([read(file) for file in files], title))


def marks(plot: Node) -> list[Node]:
    return plot.all(class_="mark")


def rows(tree: PageTree) -> list[list[str]]:
    return [[cell.text for cell in row.children if isinstance(cell, Node)] for row in tree.root.all("tr")]


def test_one_run_has_every_plot_with_as_many_marks_as_it_has_values(tmp_path: Path) -> None:
    tree = page(write(tmp_path / "r.jsonl", streamed(12) + samples()))

    assert {node.attributes["id"] for node in tree.root.all("svg", "plot")} == PLOTS
    for measure in ("queue", "ttft", "itl", "e2e"):
        assert len(marks(tree.by_id(f"cuts-{measure}"))) == 5
        assert len(tree.by_id(f"ecdf-{measure}").all("path", "line")) == 1
    for name in ("rate-requests", "rate-tokens", "batch-fill"):
        assert len(tree.by_id(name).all("path", "line")) == 1
    # What waits, and what runs.
    assert len(tree.by_id("queue-depth").all("path", "line")) == 2
    # Batches of 1, 2 and 3.
    assert len(tree.by_id("batch-size").all("rect", "bar")) == 3
    assert len(tree.by_id("outcomes").all("rect", "bar")) == 1
    # Nobody needs a legend for one series, nor a ratio.
    assert not tree.root.all(class_="ratio")


def test_the_numbers_are_those_found_by_hand(tmp_path: Path) -> None:
    tree = page(write(tmp_path / "r.jsonl", streamed(10) + samples()))

    found = rows(tree)
    assert ["", "mean", "p50", "p90", "p95", "p99", "max"] in found
    for numbers in (
        ["5.5 ms", "5.5 ms", "9.1 ms", "9.55 ms", "9.91 ms", "10 ms"],
        ["550 ms", "550 ms", "910 ms", "955 ms", "991 ms", "1 s"],
    ):
        assert ["a run", *numbers] in found
    assert ["a run", "10", "10", "0 %", "10", "1", "3"] in found
    dots = [node.text for node in tree.by_id("cuts-e2e").all("title")[1:]]
    assert dots[0] == "a run p50: 550 ms"
    assert dots[-1] == "a run max: 1 s"
    # p50 to max, from left to right.
    places = [float(node.attributes["cx"]) for node in marks(tree.by_id("cuts-e2e"))]
    assert places == sorted(places)


def test_two_runs_are_compared_with_ratios_to_the_first(tmp_path: Path) -> None:
    slow = write(tmp_path / "b.jsonl", streamed(10, slower=2.0) + samples(), label="slow")
    tree = page(write(tmp_path / "a.jsonl", streamed(10) + samples(), label="fast"), slow)

    assert len(marks(tree.by_id("cuts-e2e"))) == 10
    assert len(tree.by_id("ecdf-itl").all("path", "line")) == 2
    assert len(tree.by_id("queue-depth").all("path", "line")) == 4
    assert len(tree.by_id("batch-size").all("rect", "bar")) == 6
    (row,) = [row for row in rows(tree) if row[0] == "slow" and row[1] == "1.1 s 2\u00d7 worse"]
    assert row[-1] == "2 s 2\u00d7 worse"
    # 10 requests in 11 s, not in 10.
    assert any(row[0] == "slow" and row[5] == "0.909 1.1\u00d7 worse" for row in rows(tree) if len(row) > 5)
    assert [node.text for node in tree.root.all("h1")] == ["fast and slow"]


def test_kinds_are_series_of_their_own_and_compared_with_their_like(tmp_path: Path) -> None:
    lines = streamed(10, kind="stream") + streamed(10, kind="whole", slower=3.0)
    files = [write(tmp_path / f"{name}.jsonl", lines, label="same") for name in "ab"]

    tree = page(*files)

    assert len(marks(tree.by_id("cuts-ttft"))) == 20
    names = {row[0] for row in rows(tree)}
    assert {f"same ({name}) \u00b7 {kind}" for name in "ab" for kind in ("stream", "whole")} <= names
    assert "better" not in {word for node in tree.root.all(class_="ratio") for word in node.text.split()}
    assert "worse" not in {word for node in tree.root.all(class_="ratio") for word in node.text.split()}


def test_more_series_than_can_be_told_apart_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [request(0, 1, kind=str(n)) for n in range(4)])

    with pytest.raises(InvalidRequest, match="8 kinds of requests in these runs, and a plot tells 6 apart"):
        render([read(file), read(file)])


@pytest.mark.parametrize(
    ("lines", "plots", "says"),
    [
        ([], set(), "There is no request in these records"),
        (samples(), set(), "There is no request in these records"),
        (
            [request(5, 250, completion_tokens=7)],
            {"cuts-e2e", "ecdf-e2e", "rate-requests", "rate-tokens", "outcomes"},
            "1 request ended well, which is few",
        ),
        ([request(0, 0)], {"cuts-e2e", "ecdf-e2e", "outcomes"}, "1 request ended well"),
        (
            [request(n, 3, outcome="failed", error="generation_failed") for n in range(5)],
            {"outcomes"},
            "No request ended well, so there are no latencies",
        ),
    ],
)
def test_few_requests_and_failures_alone_make_a_page_too(
    tmp_path: Path, lines: list[dict[str, Any]], plots: set[str], says: str
) -> None:
    tree = page(write(tmp_path / "r.jsonl", lines))

    assert {node.attributes["id"] for node in tree.root.all("svg", "plot")} == plots
    assert says in tree.root.text


def test_what_failed_is_told_by_outcome_and_by_error(tmp_path: Path) -> None:
    lines = streamed(6) + [request(n, 1, outcome="refused", error="queue_full") for n in range(2)]

    tree = page(write(tmp_path / "r.jsonl", lines))

    assert ["Not answered, and the errors", "refused", "queue_full"] in rows(tree)
    assert ["a run", "2 (25 %)", "2 (25 %)"] in rows(tree)
    bars = tree.by_id("outcomes").all("rect", "bar")
    assert [bar.text for bar in bars] == ["a run: 6 done (75 %)", "a run: 2 refused (25 %)"]
    widths = [float(bar.attributes["width"]) for bar in bars]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)


def test_nothing_that_a_file_or_a_title_says_becomes_an_element(tmp_path: Path) -> None:
    facts = {EVIL: EVIL}
    head = {"label": EVIL[:80], "command": EVIL, "began_at": EVIL[:60], "machine": facts, "settings": facts}
    lines = [*streamed(3, kind=EVIL[:40]), request(0, 1, kind="b"), *samples()]

    tree = page(write(tmp_path / "r.jsonl", lines, **head), title=EVIL)

    assert not tree.root.all("script")
    assert not tree.root.all("img")
    for node in tree.root.walk():
        assert not [name for name in node.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<script>alert(1)</script>" in tree.root.all("h1")[0].text
    assert tree.root.all("title")[0].text.count("\ufffd") == 2


def test_the_page_fetches_nothing_and_can_be_read_aloud(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", streamed(12) + samples())
    text = render([read(file)])
    tree = PageTree(text)

    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    (policy,) = [n for n in tree.root.all("meta") if "http-equiv" in n.attributes]
    assert policy.attributes["content"].startswith("default-src 'none'")
    ids = tree.ids()
    assert len(ids) == len(set(ids))
    for plot in tree.root.all("svg", "plot"):
        assert plot.attributes["role"] == "img"
        for name in plot.attributes["aria-labelledby"].split():
            assert tree.by_id(name).text


def test_the_command_writes_the_page_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.jsonl", streamed(3))

    done = CliRunner().invoke(app, ["report", "r.jsonl", "--title", "Ours & theirs"])
    assert (done.exit_code, done.output) == (0, "report.html: 3 requests; open it in a browser\n")
    assert "<h1>Ours &amp; theirs</h1>" in (tmp_path / "report.html").read_text("utf-8")

    shown = CliRunner().invoke(app, ["report", "r.jsonl", "-o", "-"])
    assert shown.stdout.startswith("<!doctype html>")

    (numbers,) = json.loads(CliRunner().invoke(app, ["report", "r.jsonl", "--json"]).stdout)
    assert (numbers["requests"], numbers["e2e_ms"]["p50"], numbers["itl_ms"]["count"]) == (3, 200, 6)


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.jsonl", [{"type": "request"}])

    bad = CliRunner().invoke(app, ["report", "bad.jsonl"])
    assert bad.exit_code == 2
    assert "error: bad.jsonl, line 2: submitted_ms: Field required" in bad.stderr
    assert not (tmp_path / "report.html").exists()

    many = CliRunner().invoke(app, ["report", *["bad.jsonl"] * 7])
    assert (many.exit_code, "at most 6 runs" in many.stderr) == (2, True)

    write(tmp_path / "r.jsonl", streamed(3))
    nowhere = CliRunner().invoke(app, ["report", "r.jsonl", "-o", "none/page.html"])
    assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (2, True)
