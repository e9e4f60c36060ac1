"""Files of records: what is read of them, and what is said of bad ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from run_files import HEAD, request, streamed, write
from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.report import reading
from streamfleet_producer.report.reading import read
from streamfleet_producer.report.records import MAX_LINE_BYTES, Head, RequestLine, SampleLine, decode, encode

ROOT = Path(__file__).parents[3]
GOOD = json.dumps(request(0, 10))


@pytest.mark.parametrize(
    "line",
    [
        Head(label="a run", loop="open", warmup_ms=5.0, machine={"cores": "2"}),
        RequestLine(submitted_ms=1.5, ended_ms=9.0, gaps_ms=(1.0, 2.5), batch_size=3, kind="call"),
        RequestLine(submitted_ms=0.0, ended_ms=1.0, outcome="refused", error="queue_full"),
        SampleLine(at_ms=4.0, queued=0, rows=7),
    ],
)
def test_what_is_written_is_read_again(line: Head | RequestLine | SampleLine) -> None:
    data = encode(line)

    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert json.loads(data)["type"] == line.type
    assert decode(data) == line


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", '"type"'),
        ('{"type": "requests"}', '"type"'),
        (json.dumps(HEAD), "second head"),
        (json.dumps(request(2, -1)), "ended_ms is before submitted_ms"),
        (json.dumps(request(-1, 2)), "submitted_ms"),
        (json.dumps(request(0, 2, first_token_ms=3)), "before first_token_ms"),
        (json.dumps(request(5, 2, started_ms=3)), "started_ms is before submitted_ms"),
        (json.dumps(request(0, 2, prompt="secret")), "prompt: unknown field"),
        (json.dumps(request(0, 2, outcome="fine")), "outcome"),
        (json.dumps(request(0, 2, batch_size=0)), "batch_size"),
        (json.dumps(request(0, 2, completion_tokens=1e3)), "completion_tokens"),
        (json.dumps(request(1.7e12, 2)), "submitted_ms"),
        ('{"type": "request", "submitted_ms": NaN, "ended_ms": 1}', "submitted_ms"),
        ('{"type": "request", "submitted_ms": 1e999, "ended_ms": 1}', "submitted_ms"),
        ('{"type": "request", "submitted_ms": 1}', "ended_ms"),
        ('{"type": "sample"}', "at_ms"),
        (json.dumps(request(0, 2, error="x" * MAX_LINE_BYTES)), "over 1,048,576 bytes"),
    ],
)
def test_a_bad_line_is_told_with_its_file_its_number_and_what_to_do(
    tmp_path: Path, line: str, fault: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(HEAD)}\n{GOOD}\n{line}\n{GOOD}\n")

    with pytest.raises(InvalidRequest) as raised:
        read(path)

    message = raised.value.message
    assert message.startswith(f"{path}, line 3: ")
    assert fault in message
    assert "docs/report.md" in message
    assert "secret" not in message
    assert (raised.value.details["file"], raised.value.details["line"]) == (str(path), 3)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("\n", "line 1: it is empty"),
        (f"{GOOD}\n", "line 1: the first line has to be the head"),
        (json.dumps({**HEAD, "version": 2}) + "\n", 'line 1: its "version" is not 1'),
        (json.dumps({**HEAD, "label": ""}) + "\n", "line 1: label"),
        (json.dumps(HEAD) + "\n" + GOOD[:20], "line 2: it was cut off while it was written: remove it"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)

    with pytest.raises(InvalidRequest) as raised:
        read(path)

    assert fault in raised.value.message


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequest, match="cannot be read: Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("bound", "lines", "fault"),
    [
        ("MAX_REQUESTS", streamed(4), "request 4: record a shorter run"),
        ("MAX_SAMPLES", [{"type": "sample", "at_ms": n} for n in range(4)], "sample 4: sample less often"),
        ("MAX_ALL_GAPS", streamed(2), "gap 4: record a shorter run"),
        ("MAX_KINDS", [request(0, 1, kind=str(n)) for n in range(4)], "kind 4: tell at most 3 kinds"),
    ],
)
def test_no_more_is_held_than_the_bounds_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, lines: list[dict[str, Any]], fault: str
) -> None:
    monkeypatch.setattr(reading, bound, 3)

    with pytest.raises(InvalidRequest) as raised:
        read(write(tmp_path / "r.jsonl", lines))

    assert fault in raised.value.message


def test_codes_that_somebody_made_up_take_no_memory(tmp_path: Path) -> None:
    lines = [request(0, 1, outcome="failed", error=f"e{n}") for n in range(100)]

    (series,) = read(write(tmp_path / "r.jsonl", lines)).series.values()

    assert len(series.errors) == 33
    assert series.errors["others"] == 68
    assert series.errors.total() == 100


def test_the_documentation_names_every_field_and_its_example_can_be_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "report.md").read_text("utf-8")
    example = page[page.index('{"type":"head"') :].partition("```")[0]
    (tmp_path / "r.jsonl").write_text(example)

    run = read(tmp_path / "r.jsonl")

    assert (run.requests, len(run.sample_at_ms), run.head.label) == (2, 1, "batches of 16")
    for name, model in (("head", Head), ("request", RequestLine), ("sample", SampleLine)):
        table = page[page.index(f"| `{name}` | |") :].partition("\n\n")[0]
        told = {
            field for row in table.splitlines()[2:] for field in re.findall(r"`([a-z_]+)`", row.split("|")[1])
        }
        assert told == model.model_fields.keys() - {"type"}
