"""/metrics as Prometheus reads it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, ends, submit
from item_models import Bench, ListRunner
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry, NotStarted, Swept
from streamfleet_common.depth import Depth
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.schemas import Choice, End, Failure, Timing, Usage
from streamfleet_worker.engine.base import EngineInfo, Launch, Room, Step
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.metrics import (
    ENGINE_COUNTS,
    ERROR_TYPES,
    FINISH_REASONS,
    EngineCounts,
    EngineMemory,
    Metrics,
    QueueDepth,
)

Hire = Callable[..., Awaitable[Hired]]
DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
INFO = EngineInfo("m", "r1", ("generate",), "a device", "float32", 8, 64, 10)
KINDS = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "seconds_since_last_poll": "gauge",
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
    "cut_tokens_total": "counter",
    "device_seconds": "histogram",
    "tokenize_seconds": "histogram",
    "request_success_total": "counter",
    "request_failure_total": "counter",
    "redeliveries_total": "counter",
    "fenced_writes_total": "counter",
    "dead_letters_total": "counter",
    "swept_total": "counter",
    "broker_reconnects_total": "counter",
    "build_info": "gauge",
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("q", "1.2.3")


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


def test_memory_is_read_at_each_scrape(metrics: Metrics) -> None:
    taken = {"weights": 100, "prefix_cache": 0}
    metrics.registry.register(EngineMemory("q", lambda: taken))
    assert scrape(metrics)["streamfleet_memory_bytes", "queue=q,use=weights"] == 100
    taken["prefix_cache"] = 7
    assert scrape(metrics)["streamfleet_memory_bytes", "queue=q,use=prefix_cache"] == 7


def test_counts_are_read_at_each_scrape_and_all_are_there(metrics: Metrics) -> None:
    counted: dict[str, int] = {}
    metrics.registry.register(EngineCounts("q", lambda: counted))

    def seen() -> dict[str, float]:
        names = [f"{name}_total" for name in ENGINE_COUNTS]
        samples = scrape(metrics)
        return {name: samples[f"streamfleet_{name}", "queue=q"] for name in names}

    assert set(seen().values()) == {0}
    counted |= {"coalesced_items": 3, "answer_cache_hits": 2, "not a series": 9}
    assert {name: value for name, value in seen().items() if value} == {
        "coalesced_items_total": 3,
        "answer_cache_hits_total": 2,
    }
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    kinds = {family.name.removeprefix("streamfleet_"): family.type for family in families}
    assert {kinds[name] for name in ENGINE_COUNTS} == {"counter"}


def test_an_engine_of_one_shot_work_counts_what_is_a_series() -> None:
    """What the engine calls otherwise would be 0 for ever."""
    counts = Bench(ListRunner()).engine.counts
    tokens = {"tokenization_cache_queries", "tokenization_cache_hits"}
    assert set(counts) | tokens == set(ENGINE_COUNTS)


def test_what_a_micro_batch_was(metrics: Metrics) -> None:
    room = Room(rows=8, running=0, waiting=5)
    step = Step([], rows=3, prompt_tokens=20, padded_tokens=24, device_s=0.25)
    metrics.stepped(Report(step, 0.3, room))
    metrics.stepped(Report(Step([]), 0.1, room))
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
    metrics.stepped(Report(Step([], launches=launches), 0.1, Room(rows=8, running=0, waiting=0)))
    after = scrape(metrics)
    assert after["streamfleet_batch_launch_total", "queue=q,reason=full"] == 2
    assert after["streamfleet_batch_launch_total", "queue=q,reason=delay"] == 1
    for name, total in (("batch_tokens", 100), ("batch_padding_ratio", 0.375)):
        assert after[f"streamfleet_{name}_count", "queue=q"] == 2
        assert after[f"streamfleet_{name}_sum", "queue=q"] == total


def test_what_was_cut_is_counted_by_texts_and_by_tokens(metrics: Metrics) -> None:
    for usage in (Usage(prompt_tokens=9, truncated=2, cut_tokens=30), Usage(prompt_tokens=4)):
        metrics.ended(delivery(), End(state="done", usage=usage), 0.1)
    metrics.ended(delivery(), End(state="failed", error=Failure(code="too_long", message="")), 0.1)
    after = scrape(metrics)
    assert after["streamfleet_truncated_total", "queue=q"] == 2
    assert after["streamfleet_cut_tokens_total", "queue=q"] == 30
    assert after["streamfleet_request_prompt_tokens_sum", "queue=q"] == 13
    assert after["streamfleet_request_failure_total", "error_type=too_long,queue=q"] == 1


def test_what_the_prefix_cache_had_is_counted_in_tokens(metrics: Metrics) -> None:
    room = Room(rows=8, running=0, waiting=0)
    metrics.stepped(Report(Step(outputs=[], asked_tokens=100, cached_tokens=64), 0.01, room))
    metrics.stepped(Report(Step(outputs=[], asked_tokens=20), 0.01, room))
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


def test_the_documentation_names_only_what_is_there() -> None:
    named = set(re.findall(r"`streamfleet_(?!gateway_)(\w+)", DOCS.read_text()))
    assert named
    beside = {"memory_bytes", "queue_depth", "queue_max_depth", "queue_dead_letters"}
    assert named <= {*KINDS, *beside, *(f"{name}_total" for name in ENGINE_COUNTS)}


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
            assert (labels, value) == ("version=1.2.3", 1)
        else:
            assert value == 0, name
            assert "queue=q" in labels, name


def test_nothing_that_happens_makes_a_new_series(metrics: Metrics) -> None:
    before = set(scrape(metrics))
    choice = Choice(text="", token_ids=(), finish_reason="error")
    metrics.ended(delivery(), End(state="done", choices=(choice,)), 0.1)
    unknown = Failure(code="of_another_version", message="")
    metrics.ended(delivery(), End(state="failed", error=unknown), 0.1)
    for reason in get_args(NotStarted):
        metrics.skipped(reason)
    metrics.delivered(delivery(attempts=2))
    metrics.stepped(Report(Step([], rows=3, prompt_tokens=5, generated_tokens=3), 0.01, Room(1, 3, 2)))
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
    assert after["streamfleet_num_requests_running", "queue=q"] == 3
    assert after["streamfleet_num_requests_waiting", "queue=q"] == 2
    assert after["streamfleet_prompt_tokens_total", "queue=q"] == 5
    assert after["streamfleet_batch_size_sum", "queue=q"] == 3


def test_times_of_a_request(metrics: Metrics) -> None:
    end = End(
        state="done",
        choices=(Choice(text="x", token_ids=(1,), finish_reason="stop"),),
        usage=Usage(prompt_tokens=7, completion_tokens=11),
        timing=Timing(wait_ms=1, tokenize_ms=4, prefill_ms=500, decode_ms=2000),
    )
    metrics.delivered(delivery(waited_ms=250))
    metrics.ended(delivery(waited_ms=250), end, held_s=3.0)
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
        "tokenize_seconds": 0.004,
        "time_to_first_token_seconds": 0,
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
    assert labels == ["device=a device,model=m,precision=float32,revision=r1,version=1.2.3"]


def test_depth_is_read_at_the_scrape_and_absent_when_unknown(metrics: Metrics) -> None:
    depths: list[Depth | None] = [Depth(3, 2, 100, 4), None, Depth(0, 0, 100, 0)]
    metrics.registry.register(QueueDepth("q", lambda: depths.pop(0)))
    assert len(depths) == 3, "registering reads nothing"

    def seen() -> dict[str, float]:
        return {
            f"{name} {labels}": value
            for (name, labels), value in scrape(metrics).items()
            if name.startswith("streamfleet_queue_")
        }

    assert seen() == {
        "streamfleet_queue_depth queue=q,state=queued": 3,
        "streamfleet_queue_depth queue=q,state=running": 2,
        "streamfleet_queue_max_depth queue=q": 100,
        "streamfleet_queue_dead_letters queue=q": 4,
    }
    assert seen() == {}
    assert seen()["streamfleet_queue_depth queue=q,state=queued"] == 0


async def test_depth_on_a_real_server(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=2))
    rids = await submit(broker, ["ECHO 2"] * 6)
    await eventually(lambda: len(hired.engine.added) == 2, "a full batch")
    assert await asyncio.to_thread(hired.worker.depth) == Depth(4, 2, 1000, 0)
    hired.engine.is_open = True
    await ends(broker, rids)
    assert await asyncio.to_thread(hired.worker.depth) == Depth(0, 0, 1000, 0)


async def test_depth_of_a_server_that_is_gone_is_unknown(hire: Hire) -> None:
    with EmbeddedBroker() as server:
        hired = await hire(url=server.url)
        assert await asyncio.to_thread(hired.worker.depth) is not None
        server.kill()
        assert await asyncio.to_thread(hired.worker.depth) is None
        server.restart()
        await hired.dismiss()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say(metrics: Metrics) -> None:
    metrics.built(INFO)
    metrics.registry.register(QueueDepth("q", lambda: Depth(3, 2, 100, 0)))
    check = subprocess.run(
        ["promtool", "check", "metrics"],
        input=generate_latest(metrics.registry),
        capture_output=True,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")
