"""That the benchmarks run, and say what they promise. Never how fast: machines differ, and are shared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamfleet_producer.report.figures import Figures
from streamfleet_producer.report.reading import read
from tiny_model import tiny_model

HERE = Path(__file__).parent
FEW = ("--requests", "4", "--scale", "0.1", "--rounds", "1")
WHOLE = ("--precision", "float32", "--alone-share", "1")
"""Answers that are alike to the last token, all of them compared."""


def run(script: str, *arguments: str, limit_s: float = 150) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", timeout=limit_s, check=True)
    return done.stdout


def found(script: str, *arguments: str, limit_s: float = 150) -> Any:
    return json.loads(run(script, *arguments, "--json", limit_s=limit_s))


@pytest.mark.slow
def test_the_fleet_goes_through_a_round() -> None:
    arguments = ("--only", "streamfleet", "--rounds", "1", "--seconds", "0.2", "--trips", "3")

    (round_,) = found("fleet.py", *arguments, "--in-flight", "8", "--quiet", "99")["rounds"]

    row = round_["streamfleet"]
    assert row["others_cores"] >= 0
    assert row["requests"] >= 8
    assert 0 < row["alone"]["p50_ms"] <= row["alone"]["p99_ms"]
    assert 0 < row["crowded"]["p50_ms"] <= row["crowded"]["p99_ms"]
    assert row["cpu_us"].keys() == {"producer", "worker", "redis"}


@pytest.mark.slow
def test_the_fleet_s_requests_are_recorded_for_a_report(tmp_path: Path) -> None:
    arguments = (
        "--only",
        "streamfleet",
        "--rounds",
        "1",
        "--seconds",
        "0.2",
        "--trips",
        "3",
        "--quiet",
        "99",
    )

    (round_,) = found("fleet.py", *arguments, "--in-flight", "8", "--records", str(tmp_path))["rounds"]

    (file,) = tmp_path.iterdir()
    recorded = read(file)
    assert recorded.head.label == "streamfleet"
    assert {kind: len(series) for kind, series in recorded.series.items()} == {
        "alone": 3,
        "crowded": round_["streamfleet"]["requests"],
    }
    alone = Figures.of(recorded.series["alone"]).latencies["e2e"].cuts
    assert alone["p50"] == pytest.approx(round_["streamfleet"]["alone"]["p50_ms"], abs=0.01)


@pytest.mark.slow
def test_a_worker_that_counts_is_measured_beside_itself_without() -> None:
    figures = found("metrics_cost.py", "--rounds", "2", "--seconds", "0.2", "--scrape-s", "0.2")

    for ratio in ("worker_cpu", "all_cpu", "requests_per_s"):
        assert 0 < figures[ratio]["p25"] <= figures[ratio]["median"] <= figures[ratio]["p75"]
    assert figures["calls_us"] > 0 < figures["scrape_ms"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_bytes_and_cost_of_open_requests_are_measured() -> None:
    arguments = ("--rounds", "1", "--requests", "64", "--sizes", "256,512")

    (rows,) = found("cost.py", "--part", "growth", *arguments)["growth"].values()

    assert [row["open"] for row in rows] == [256, 512]
    for row in rows:
        assert row["others_queued"]["nothing_open"]["least"].keys() == row["others_running"]["least"].keys()
        # 200 of them are the request itself or its result; running adds what the group keeps of an entry.
        assert row["finished_bytes"] > 200
        assert 200 < row["queued_bytes"] < row["running_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quiet_tenant_is_measured_beside_a_flood() -> None:
    alone, flooded, beside = found("fairness.py", "--seconds", "4", limit_s=100)["runs"]

    assert [run["flooded"] for run in (alone, flooded, beside)] == [False, True, True]
    # Behind what waits there were some 64 requests, of 55 ms, for 16 rows: 220 ms at least.
    assert flooded["p50_ms"] > alone["p50_ms"] + 200 > beside["p50_ms"]
    assert alone["open"] == 0 < beside["open"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_tables_are_printed() -> None:
    arguments = ("--only", "streamfleet", "--rounds", "1", "--seconds", "0.2", "--trips", "3")

    assert "streamfleet " in run("fleet.py", *arguments, "--in-flight", "8", "--quiet", "99")
    assert "finished" in run(
        "cost.py", "--part", "growth", "--rounds", "1", "--requests", "32", "--sizes", "64"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk: apt-get install wrk")
def test_requests_to_the_gateway_are_measured_and_recorded(tmp_path: Path) -> None:
    arguments = ("--rounds", "1", "--seconds", "1", "--trips", "3", "--in-flight", "4")

    rows = found("gateway.py", *arguments, "--records", str(tmp_path))["medians"]

    assert len(rows) == 6
    assert all(row["requests_per_s"] > 0 for row in rows.values())
    names = {
        f"{one}-{how}" for one in ("client", "completions", "chat-completions") for how in ("stream", "whole")
    }
    assert {file.stem for file in tmp_path.iterdir()} == names
    for file in tmp_path.iterdir():
        series = read(file).series
        assert len(series["alone"]) == 3
        assert series["crowded"].outcomes.keys() == {"done"}


@pytest.fixture(scope="module")
def model() -> str:
    return str(tiny_model())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_and_generate_answer_alike_in_turns(model: str, tmp_path: Path) -> None:
    sides = ("--only", "alone", "ours")
    records = ("--records", str(tmp_path))
    found_ = found("generation.py", "--model", model, *FEW, *WHOLE, *sides, *records, limit_s=280)

    ours = found_["sides"]["ours"]
    assert (ours["same"], ours["compared"]) == (4, 4)
    assert found_["sides"]["alone"]["ratio"]["cpu"]["median"] > 0
    (round_,) = found_["rounds"]["ours"]
    assert round_["tokens"] == sum(map(len, round_["answers"])) > 0
    # `generate` tells nothing of single requests.
    assert [file.name for file in tmp_path.iterdir()] == ["ours.jsonl"]
    series = read(tmp_path / "ours.jsonl").series["generate"]
    assert sorted(series.completion_tokens) == sorted(map(len, round_["answers"]))
    assert len(series.ttft_ms) == len(series.queue_ms) == 4
    assert max(series.ended_ms) <= round_["seconds"] * 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_of_generation_gives_the_answers_of_generate(model: str) -> None:
    sides = ("static", "transformers", "exact", "fleet")
    arguments = (*FEW, *WHOLE, "--only", "alone", *sides)
    found_ = found("generation.py", "--model", model, *arguments, limit_s=290)["sides"]

    assert [(found_[side]["same"], found_[side]["compared"]) for side in sides] == [(4, 4)] * 4
    assert found_["fleet"]["cpu_s"].keys() == {"client", "worker", "redis"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_forward_alone_is_measured_at_a_full_batch(model: str) -> None:
    arguments = (*FEW, "--batch", "3", "--only", "forward")
    found_ = found("generation.py", "--model", model, *arguments, limit_s=280)

    (round_,) = found_["rounds"]["forward"]
    assert round_["tokens"] == 3 * 64
    assert round_["seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_overhead_of_a_step_is_measured_with_and_without_a_worker(model: str) -> None:
    arguments = ("--rows", "4", "--tokens", "100", "--batches", "2", "--top", "99")
    found_ = found("overhead.py", "--model", model, *arguments, limit_s=280)

    engine, worker = found_["engine"], found_["worker"]
    # The first token of an answer comes with its prompt.
    assert engine["full_steps"] == worker["full_steps"] == 2 * 99
    assert engine["cpu_p50_ms"] > 0
    assert sum(engine["profile"].values()) == pytest.approx(engine["cpu_ms"])
    assert worker["event_loop_cpu_ms"] > 0


@pytest.mark.slow
def test_without_a_gpu_its_benchmark_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "there is no GPU" in run("gpu.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_of_a_gpu_proves_the_same_on_a_cpu(model: str) -> None:
    arguments = ("--device", "cpu", "--batch", "2", *FEW)
    found_ = found("gpu.py", "--model", model, *arguments, limit_s=280)

    right = found_["right"]
    assert right["exact"].startswith("cpu-float32-1t-")
    counts = [finding for name, finding in right.items() if name != "exact"]
    assert counts == [[4, 4]] * 5
    assert found_["fast"]["ours"]["by_static"] > 0


@pytest.mark.slow
def test_a_worker_that_tells_of_its_batches_is_measured_beside_itself_without() -> None:
    figures = found("flight_cost.py", "--rounds", "2", "--seconds", "0.2")

    for ratio in ("worker_cpu", "all_cpu", "requests_per_s"):
        assert 0 < figures[ratio]["p25"] <= figures[ratio]["median"] <= figures[ratio]["p75"]
