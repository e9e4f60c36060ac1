"""`streamfleet load` against a worker process: what it prints, what it records, and that it can be drawn."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command import LIMIT_S, running
from eventually import eventually
from streamfleet_producer.cli.app import app
from streamfleet_producer.report.reading import read

PROMPTS = (
    '{"prompt": "ECHO 8", "max_tokens": 16}\n{"custom_id": "b", "request": {"prompt": "SECRET hello"}}\n'
)


@pytest.mark.parametrize(
    ("how", "loop"), [(("--rate", "40"), "open"), (("--concurrency", "2", "--lane", "high"), "closed")]
)
def test_a_load_is_recorded_and_drawn(
    fleet_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...], loop: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(PROMPTS)

    done = CliRunner().invoke(
        app,
        [
            "load",
            "--redis-url",
            fleet_url,
            "--queue",
            "smollm2",
            "--prompts",
            "prompts.jsonl",
            *how,
            "--seconds",
            "0.3",
            "--records",
            "run.jsonl",
        ],
    )

    assert done.exit_code == 0, done.output
    assert "Time to first token" in done.stdout
    text = Path("run.jsonl").read_text()
    assert "SECRET" not in text
    assert fleet_url not in text
    run = read(Path("run.jsonl"))
    assert (run.head.loop, run.head.model["name"]) == (loop, "scripted")
    series = run.series["generate"]
    assert set(series.outcomes) == {"done"}
    # At a rate of 40 for 0.3 s; two callers have asked at least once each.
    assert len(series) == 12 if loop == "open" else len(series) >= 2
    # Of every second prompt 8 tokens, of the others one with all of it.
    assert {*series.completion_tokens} == {8.0, 1.0}
    assert max(series.submitted_ms) < 300
    assert len(series.ttft_ms) == len(series.queue_ms) == len(series)
    assert list(run.max_rows) == [8.0] * len(run.max_rows) != []
    drawn = CliRunner().invoke(app, ["report", "run.jsonl", "--json"])
    assert json.loads(drawn.stdout)[0]["outcomes"] == {"done": len(series)}


def test_what_cannot_be_loaded_leaves_older_records_alone(
    fleet_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(PROMPTS)
    Path("run.jsonl").write_text("older")

    done = CliRunner().invoke(
        app,
        [
            "load",
            "--redis-url",
            fleet_url,
            "--queue",
            "nobody",
            "--prompts",
            "prompts.jsonl",
            "--rate",
            "20",
            "--records",
            "run.jsonl",
        ],
    )

    assert done.exit_code == 5
    assert "no worker serves the queue 'nobody' now" in done.stderr
    assert Path("run.jsonl").read_text() == "older"


@pytest.mark.slow
async def test_a_load_that_is_ended_has_recorded_what_ended_before(fleet_url: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    records = tmp_path / "run.jsonl"
    arguments = ["load", "--redis-url", fleet_url, "--queue", "smollm2", "--seconds", "600"]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--concurrency", "2"]
    with running(*arguments, "--records", str(records)) as load:
        await eventually(lambda: records.exists() and records.stat().st_size > 20_000)
        load.process.send_signal(signal.SIGINT)
        load.wait_for("has what had ended by then")
        assert load.process.wait(LIMIT_S) == 130

    assert len(read(records).series["generate"]) > 50


def test_a_load_without_a_file_prints_json_and_leaves_nothing(
    fleet_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(PROMPTS)

    done = CliRunner().invoke(
        app,
        [
            "load",
            "--redis-url",
            fleet_url,
            "--queue",
            "smollm2",
            "--prompts",
            "prompts.jsonl",
            "--rate",
            "20",
            "--seconds",
            "0.2",
            "--json",
        ],
    )

    (numbers,) = json.loads(done.stdout)
    assert numbers["requests"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
