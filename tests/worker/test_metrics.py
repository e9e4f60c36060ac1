"""/metrics as Prometheus reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hired import Hired
from item_models import Bench, ListRunner
from streamfleet_common.deliveries import Delivery, Entry, NotStarted, Swept
from streamfleet_common.schemas import Choice, End, Failure, Timing, Usage
from streamfleet_worker.engine.base import EngineInfo, Launch, Room, Step
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.series import ENGINE_COUNTERS, ERROR_TYPES, FINISH_REASONS, HISTOGRAMS

Hire = Callable[..., Awaitable[Hired]]
DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
SECTION = DOCS.partition("\n## Workers\n")[2].partition("\n## ")[0]
EMPTY = Room(rows=8, running=0, waiting=0)
INFO = EngineInfo("m", "r1", ("generate",), "a device", "float32", 8, 64, 10)
KINDS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "seconds_since_last_poll": "gauge",
    "publisher_lag_seconds": "gauge",
    "batch_size": "histogram",
    "batch_tokens": "histogram",
    "batch_padding_ratio": "histogram",
    "batch_launch_total": "counter",
    "engine_step_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "prefix_cache_hits_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "padded_tokens_total": "counter",
    "truncated_total": "counter",
    "truncated_tokens_total": "counter",
    "device_seconds": "histogram",
    "tokenize_seconds": "histogram",
    "request_success_total": "counter",
    "request_failure_total": "counter",
    "redeliveries_total": "counter",
    "leases_lost_total": "counter",
    "fenced_writes_total": "counter",
    "dead_letters_total": "counter",
    "swept_total": "counter",
    "broker_reconnects_total": "counter",
    "build_info": "gauge",
    "inter_token_latency_seconds": "histogram",
    "kv_cache_usage_ratio": "gauge",
    "model_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
    **{f"{name}_total": "counter" for name in ENGINE_COUNTERS},
}


@pytest.fixture
def metrics() -> Metrics:
    return made()


def made(memory: dict[str, int] | None = None, counts: dict[str, int] | None = None) -> Metrics:
    """Of a supervisor's second worker; what its engine has is read from the arguments."""
    made = Metrics("q", "1.2.3", "2")
    made.read(
        since_poll_s=lambda: 0.0,
        publisher_lag_s=lambda: 0.0,
        memory=lambda: memory or {},
        counts=lambda: counts or {},
    )
    return made


def report(step: Step, seconds: float = 0.01, room: Room = EMPTY) -> Report:
    return Report(step, seconds, room, ended_at=0.0)


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Every sample by name and labels, through the text that Prometheus reads."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def delivery(attempts: int = 1, waited_ms: int = 250) -> Delivery:
    entry = Entry("0" * 34, "1-0", "normal", b"")
    return Delivery(entry, "w", 1, 10_000 + waited_ms, 10_000, 90_000, attempts, 0)


def test_memory_is_read_at_each_scrape() -> None:
    taken = {"weights": 100, "prefix_cache": 0}
    metrics = made(memory=taken)
    assert scrape(metrics)["streamfleet_model_memory_bytes", "kind=weights,queue=q,worker=2"] == 100
    taken["prefix_cache"] = 7
    assert scrape(metrics)["streamfleet_model_memory_bytes", "kind=prefix_cache,queue=q,worker=2"] == 7


def test_counts_are_read_at_each_scrape_and_all_are_there() -> None:
    counted = {"coalesced_items": 0}
    metrics = made(counts=counted)

    def seen() -> dict[str, float]:
        names = [f"{name}_total" for name in ENGINE_COUNTERS]
        samples = scrape(metrics)
        return {name: samples[f"streamfleet_{name}", "queue=q"] for name in names}

    assert set(seen().values()) == {0}
    counted |= {"coalesced_items": 3, "answer_cache_hits": 2, "not a series": 9}
    assert {name: value for name, value in seen().items() if value} == {
        "coalesced_items_total": 3,
        "answer_cache_hits_total": 2,
    }


def test_what_is_reserved_of_the_cache_is_told_by_engines_that_have_one(metrics: Metrics) -> None:
    metrics.built(INFO, EMPTY)
    name, labels = "streamfleet_kv_cache_usage_ratio", "queue=q,worker=2"
    assert (name, labels) not in scrape(metrics)
    metrics.built(INFO, Room(8, 0, 0, cache_used=0.0))
    assert scrape(metrics)[name, labels] == 0
    metrics.stepped(report(Step([]), room=Room(6, 2, 0, cache_used=0.75)))
    assert scrape(metrics)[name, labels] == 0.75
    metrics.idle()
    after = scrape(metrics)
    assert (after[name, labels], after["streamfleet_num_requests_running", labels]) == (0, 0)


def test_gaps_between_tokens_are_counted_by_tokens(metrics: Metrics) -> None:
    metrics.more_tokens(0.02, 3)
    metrics.more_tokens(1.5, 1)
    after = scrape(metrics)
    name = "streamfleet_inter_token_latency_seconds"
    assert after[f"{name}_count", "queue=q"] == 4
    assert after[f"{name}_sum", "queue=q"] == pytest.approx(1.56)
    assert after[f"{name}_bucket", "le=0.025,queue=q"] == 3
    assert after[f"{name}_bucket", "le=1.0,queue=q"] == 3
    assert after[f"{name}_bucket", "le=2.5,queue=q"] == 4


def test_an_engine_of_one_shot_work_counts_what_is_a_series() -> None:
    """What the engine calls otherwise would be 0 for ever."""
    counts = Bench(ListRunner()).engine.counts
    tokens = {"tokenization_cache_queries", "tokenization_cache_hits"}
    assert set(counts) | tokens == set(ENGINE_COUNTERS)


def test_what_a_micro_batch_was(metrics: Metrics) -> None:
    room = Room(rows=8, running=0, waiting=5)
    step = Step([], rows=3, prompt_tokens=20, padded_tokens=24, device_s=0.25)
    metrics.stepped(report(step, 0.3, room))
    metrics.stepped(report(Step([]), 0.1, room))
    after = scrape(metrics)
    assert after["streamfleet_padded_tokens_total", "queue=q"] == 24
    assert after["streamfleet_prompt_tokens_total", "queue=q"] == 20
    for name, count, total in (
        ("batch_size", 1, 3),
        ("device_seconds", 1, 0.25),
        ("engine_step_seconds", 2, 0.4),
    ):
        assert after[f"streamfleet_{name}_count", "queue=q"] == count
        assert after[f"streamfleet_{name}_sum", "queue=q"] == pytest.approx(total)


def test_launches_are_counted_by_reason_and_without_tokens_have_no_shape(metrics: Metrics) -> None:
    launches = [
        Launch(1, "full", 8, 80, 0.25, ()),
        Launch(2, "delay", 2, 20, 0.125, ()),
        Launch(3, "full", 4, 0, 0.0, ()),  # of a handler's inputs
    ]
    metrics.stepped(report(Step([], launches=launches)))
    after = scrape(metrics)
    assert after["streamfleet_batch_launch_total", "queue=q,reason=full"] == 2
    assert after["streamfleet_batch_launch_total", "queue=q,reason=delay"] == 1
    for name, total in (("batch_tokens", 100), ("batch_padding_ratio", 0.375)):
        assert after[f"streamfleet_{name}_count", "queue=q"] == 2
        assert after[f"streamfleet_{name}_sum", "queue=q"] == total


def test_what_was_cut_is_counted_by_texts_and_by_tokens(metrics: Metrics) -> None:
    for choices in ((), (Choice(text="x", token_ids=(1,), finish_reason="eos"),)):
        ends = [
            End(state="done", choices=choices, usage=usage)
            for usage in (Usage(prompt_tokens=9, truncated=2, cut_tokens=30), Usage(prompt_tokens=4))
        ]
        metrics.ended(metrics.noted(ends), [0.1, 0.1])
    metrics.ended(metrics.noted([End(state="failed", error=Failure(code="too_long", message=""))]), [0.1])
    after = scrape(metrics)
    assert after["streamfleet_truncated_total", "queue=q"] == 4
    assert after["streamfleet_truncated_tokens_total", "queue=q"] == 60
    assert after["streamfleet_request_prompt_tokens_sum", "queue=q"] == 26
    assert after["streamfleet_request_failure_total", "error_type=too_long,queue=q"] == 1


def test_what_the_prefix_cache_had_is_counted_in_tokens(metrics: Metrics) -> None:
    metrics.stepped(report(Step(outputs=[], asked_tokens=100, cached_tokens=64)))
    metrics.stepped(report(Step(outputs=[], asked_tokens=20)))
    after = scrape(metrics)
    assert after["streamfleet_prefix_cache_queries_total", "queue=q"] == 120
    assert after["streamfleet_prefix_cache_hits_total", "queue=q"] == 64


def test_names_and_kinds(metrics: Metrics) -> None:
    kinds = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        if family.name.endswith("_created"):
            continue  # prometheus-client's own addition
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kinds[name.removeprefix("streamfleet_")] = family.type
        assert family.documentation
    assert kinds == KINDS


def test_the_documentation_names_all_series_of_workers_and_no_others() -> None:
    rows = re.findall(r"^\| (`streamfleet_[^|]*) \|", SECTION, re.MULTILINE)
    told = set(re.findall(r"`streamfleet_(\w+)", " ".join(rows)))
    assert told == {*KINDS, "supervisor_workers", "worker_restarts_total"}
    assert set(re.findall(r"`streamfleet_(\w+)", SECTION)) == told


def test_the_documentation_tells_the_buckets() -> None:
    told: set[tuple[float, ...]] = set()
    for row in re.findall(
        r"^\| (?:waits|steps|tokens|rows|padding)[^|]*\| ([^|]*) \|", SECTION, re.MULTILINE
    ):
        bounds: list[float] = []
        for part in row.split("; "):
            numbers, _, unit = part.partition(" ms") if " ms" in part else part.rpartition(" ")
            scale = {"s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01, "": 0.001}.get(unit)
            numbers, scale = (part, 1.0) if scale is None else (numbers, scale)
            bounds += [round(float(number) * scale, 9) for number in numbers.split(", ")]
        told.add(tuple(bounds))
    assert told == {tuple(map(float, buckets)) for _, buckets in HISTOGRAMS.values()}


def test_every_series_is_there_from_the_start_and_at_zero(metrics: Metrics) -> None:
    samples = scrape(metrics)
    for reason in (*FINISH_REASONS, "other"):
        assert samples["streamfleet_request_success_total", f"finished_reason={reason},queue=q"] == 0
    for kind in (*ERROR_TYPES, "other"):
        assert samples["streamfleet_request_failure_total", f"error_type={kind},queue=q"] == 0
    for why in ("full", "delay", "waited", "ratio", "deadline", "drain"):
        assert samples["streamfleet_batch_launch_total", f"queue=q,reason={why}"] == 0
    for outcome in ("expired", "requeued", "failed", "dead", "stray"):
        assert samples["streamfleet_swept_total", f"outcome={outcome},queue=q"] == 0
    for (name, labels), value in samples.items():
        if name == "streamfleet_build_info":
            assert (labels, value) == ("queue=q,version=1.2.3,worker=2", 1)
        elif name == "streamfleet_process_start_time_seconds":
            assert value > 0
        else:
            assert value == 0, name
            assert "queue=q" in labels, name
    # A scrape of many workers adds up what is counted, and tells apart what is measured.
    gauges = {name for name, kind in KINDS.items() if kind == "gauge"}
    for name, labels in samples:
        assert ("worker=2" in labels) == (name.removeprefix("streamfleet_") in gauges), name


@pytest.mark.parametrize("junk", ["of_another_version", "", "other", "cancelled\n", "§" * 1000])
def test_nothing_that_happens_makes_a_new_series(metrics: Metrics, junk: str) -> None:
    before = set(scrape(metrics))
    # As a newer version, or a client that gets what it sends repeated, might bring it about.
    choice = Choice(text="", token_ids=(), finish_reason="error").changed({"finish_reason": junk})
    unknown = Failure(code="x", message="").changed({"code": junk})
    named = {"model": junk, "revision": junk, "worker": junk}
    metrics.ended(metrics.noted([End(state="done", choices=(choice,)).changed(named)]), [0.1])
    metrics.ended(metrics.noted([End(state="failed", error=unknown).changed(named)]), [0.1])
    for reason in get_args(NotStarted):
        metrics.skipped(reason)
    metrics.delivered([delivery(attempts=2)])
    metrics.stepped(report(Step([], rows=3, prompt_tokens=5, generated_tokens=3), room=Room(1, 3, 2)))
    metrics.swept(Swept(expired=2, requeued=3, failed=4, dead=5, stray=6, grace=True, waited_ms=(1, 2, 3)))
    after = scrape(metrics)
    assert set(after) == before
    swept = {"expired": 2, "requeued": 3, "failed": 4, "dead": 5, "stray": 6}
    for outcome, count in swept.items():
        assert after["streamfleet_swept_total", f"outcome={outcome},queue=q"] == count
    assert after["streamfleet_request_success_total", "finished_reason=other,queue=q"] == 1
    assert after["streamfleet_request_failure_total", "error_type=other,queue=q"] == 1
    assert after["streamfleet_request_failure_total", "error_type=deadline_exceeded,queue=q"] == 1
    assert after["streamfleet_dead_letters_total", "queue=q"] == 1
    assert after["streamfleet_redeliveries_total", "queue=q"] == 1
    assert after["streamfleet_num_requests_running", "queue=q,worker=2"] == 3
    assert after["streamfleet_num_requests_waiting", "queue=q,worker=2"] == 2
    assert after["streamfleet_prompt_tokens_total", "queue=q"] == 5
    assert after["streamfleet_batch_size_sum", "queue=q"] == 3


def test_times_of_a_request(metrics: Metrics) -> None:
    end = End(
        state="done",
        choices=(Choice(text="x", token_ids=(1,), finish_reason="stop"),),
        usage=Usage(prompt_tokens=7, completion_tokens=11),
        timing=Timing(wait_ms=1, tokenize_ms=4, prefill_ms=500, decode_ms=2000),
    )
    metrics.delivered([delivery(waited_ms=250)])
    metrics.ended(metrics.noted([end]), [3.25])
    samples = scrape(metrics)
    sums = {
        name: samples[f"streamfleet_{name}_sum", "queue=q"] for name in KINDS if KINDS[name] == "histogram"
    }
    assert sums == {
        "batch_size": 0,
        "batch_tokens": 0,
        "batch_padding_ratio": 0,
        "engine_step_seconds": 0,
        "device_seconds": 0,
        "tokenize_seconds": 0,  # of one-shot work
        "time_to_first_token_seconds": 0,
        "inter_token_latency_seconds": 0,
        "request_queue_time_seconds": 0.25,
        "e2e_request_latency_seconds": 3.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.2,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 11,
    }


def test_build_info_tells_the_model_once_it_is_there(metrics: Metrics) -> None:
    metrics.built(INFO)
    labels = [labels for name, labels in scrape(metrics) if name == "streamfleet_build_info"]
    assert labels == ["device=a device,model=m,precision=float32,queue=q,revision=r1,version=1.2.3,worker=2"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say(metrics: Metrics) -> None:
    metrics.built(INFO, Room(8, 0, 0, cache_used=0.0))
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(metrics.registry),
        capture_output=True,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")
