"""That the benchmarks run, and say what they promise. Never how fast: machines differ, and are shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, HERE / script, *arguments], stdout=subprocess.PIPE, text=True, timeout=50, check=True
    ).stdout


def found(script: str, *arguments: str) -> Any:
    return json.loads(run(script, *arguments, "--json"))


def test_the_fleet_goes_through_a_round() -> None:
    arguments = ("--only", "streamfleet", "--rounds", "1", "--seconds", "0.2", "--trips", "3")

    (round_,) = found("fleet.py", *arguments, "--in-flight", "8", "--quiet", "99")["rounds"]

    row = round_["streamfleet"]
    assert row["others_cores"] >= 0
    assert row["requests"] >= 8
    assert 0 < row["alone"]["p50_ms"] <= row["alone"]["p99_ms"]
    assert 0 < row["crowded"]["p50_ms"] <= row["crowded"]["p99_ms"]
    assert row["cpu_us"].keys() == {"producer", "worker", "redis"}


def test_the_server_s_cost_of_each_step_and_delta_is_measured_with_and_without_aof() -> None:
    parts = found("cost.py", "--part", "steps", "--part", "emit", "--rounds", "1", "--requests", "64")

    for part, steps in (
        ("steps", {"listen", "submit", "take", "finish", "leave", "sum"}),
        ("emit", {"emit"}),
    ):
        without, with_aof = parts[part]
        assert with_aof == f"{without}, AOF"
        for figures in parts[part].values():
            assert steps <= figures["least"].keys()
            assert all(figures["least"][step] > 0 for step in steps)


def test_bytes_and_cost_of_open_requests_are_measured() -> None:
    arguments = ("--rounds", "1", "--requests", "64", "--sizes", "256,512")

    (rows,) = found("cost.py", "--part", "growth", *arguments)["growth"].values()

    assert [row["open"] for row in rows] == [256, 512]
    for row in rows:
        assert row["others_queued"]["nothing_open"]["least"].keys() == row["others_running"]["least"].keys()
        # 200 of them are the request itself or its result; running adds what the group keeps of an entry.
        assert row["finished_bytes"] > 200
        assert 200 < row["queued_bytes"] < row["running_bytes"]


def test_the_cost_of_text_is_measured_for_each_way() -> None:
    rows = found("detokenizer.py", "--tokens", "40", "--rounds", "1")

    assert rows.keys() == {"code", "many bytes", "broken", "broken, twice"}
    for row in rows.values():
        assert row.keys() == {"pieces", "detokenizer", "with 4 stops", "window", "DecodeStream"}
        assert all(cost_us > 0 for cost_us in row.values())


@pytest.mark.slow
def test_a_profile_names_our_functions_and_the_server_s_commands() -> None:
    seen = found("hotspots.py", "--seconds", "2", "--in-flight", "32")

    for side, package in (("producer", "streamfleet_producer"), ("worker", "streamfleet_worker")):
        assert seen[side]["samples"] > 0
        assert sum(seen[side]["function"].values()) == pytest.approx(seen["cpu_us"][side], rel=0.05)
        assert any(name.startswith(package) for name in seen[side]["package"])
    assert "evalsha" in seen["redis"]


def test_the_tables_are_printed() -> None:
    arguments = ("--only", "streamfleet", "--rounds", "1", "--seconds", "0.2", "--trips", "3")

    assert "streamfleet " in run("fleet.py", *arguments, "--in-flight", "8", "--quiet", "99")
    assert "finished" in run(
        "cost.py", "--part", "growth", "--rounds", "1", "--requests", "32", "--sizes", "64"
    )
