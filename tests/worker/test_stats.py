"""What a worker's card says of its last half minute."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from broker_parts import card
from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, ends, eventually_so, submit
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.worker_stats import TOKEN_BOUNDS_S, WAIT_BOUNDS_S, WorkerStats
from streamfleet_worker.histogram import Histogram
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.stats import HISTOGRAMS, MOST_LOOKS, Stats

Hire = Callable[..., Awaitable[Hired]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_counts_are_those_since_the_oldest_look_of_the_window() -> None:
    clock, registry = Clock(), CollectorRegistry()
    ttft = Histogram("streamfleet_time_to_first_token_seconds", "", "q", WAIT_BOUNDS_S, registry)
    gaps = Histogram("streamfleet_inter_token_latency_seconds", "", "q", TOKEN_BOUNDS_S, registry)
    sizes = Histogram("streamfleet_batch_size", "", "q", (1, 2, 4), registry)
    tokens = Counter("streamfleet_generation_tokens", "", ["queue"], registry=registry).labels("q")
    success = Counter("streamfleet_request_success", "", ["finished_reason"], registry=registry)
    failure = Counter("streamfleet_request_failure", "", ["error_type"], registry=registry)
    running = Gauge("streamfleet_num_requests_running", "", registry=registry)
    stats = Stats(registry, clock)
    tokens.inc(1000)
    ttft.observe(5.0)
    assert stats.read() == WorkerStats()  # nothing to compare with, so nothing has happened
    clock.now_s += 10
    tokens.inc(7)
    ttft.observe(0.2)
    ttft.observe(9000.0)
    gaps.observe(0.004)
    sizes.observe(4)
    sizes.observe(2)
    success.labels("eos").inc(3)
    failure.labels("too_long").inc(2)
    failure.labels("cancelled").inc(1)
    running.set(4)
    found = stats.read()
    waits = [0] * 19
    waits[7] = waits[18] = 1  # up to 0.25 s, and above two hours
    steps = [0] * 16
    steps[5] = 1  # up to 5 ms
    assert found == WorkerStats(
        window_s=10.0,
        generated_tokens=7,
        ended=6,
        failed=2,
        batches=2,
        batch_rows=6,
        running=4,
        ttft=tuple(waits),
        itl=tuple(steps),
    )
    clock.now_s += 19
    assert stats.read() == found.changed({"window_s": 29.0})
    clock.now_s += 10  # 39 s after the first look, 29 after the second
    assert stats.read() == WorkerStats(window_s=29.0, running=4)


def test_looks_are_bounded() -> None:
    clock = Clock()
    stats = Stats(CollectorRegistry(), clock)
    for _ in range(1000):
        clock.now_s += 0.01
        stats.read()
    clock.now_s += 0.01
    assert stats.read().window_s == round(0.01 * (MOST_LOOKS - 1), 3)


def test_the_metrics_of_a_worker_have_all_that_is_read() -> None:
    metrics = Metrics("q", "0")
    stats = Stats(metrics.registry, Clock())
    stats.read()
    metrics.first_tokens([0.0006, 0.3, 100.0])
    metrics.more_tokens(0.03, 5)
    found = stats.read()
    assert [at for at, count in enumerate(found.ttft) if count] == [0, 8, 15]  # up to 1 ms, 0.5 s, 300 s
    assert [(at, count) for at, count in enumerate(found.itl) if count] == [(8, 5)]  # up to 50 ms
    pages = {sample.name: sample for family in metrics.registry.collect() for sample in family.samples}
    for name, bounds in HISTOGRAMS.values():
        (family,) = [one for one in metrics.registry.collect() if one.name == f"streamfleet_{name}"]
        told = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert told == [*bounds, float("inf")], name
    for name in ("prompt_tokens_total", "generation_tokens_total", "batch_size_count", "batch_size_sum"):
        assert f"streamfleet_{name}" in pages
    for name in ("num_requests_running", "num_requests_waiting"):
        assert f"streamfleet_{name}" in pages


def test_a_card_grows_by_a_bounded_amount() -> None:
    busy = WorkerStats(
        window_s=30.123,
        ended=100_000,
        failed=1000,
        prompt_tokens=10_000_000,
        generated_tokens=10_000_000,
        batches=300_000,
        batch_rows=10_000_000,
        running=512,
        waiting=512,
        kv_usage=0.987,
        ttft=(60_000,) * 19,
        e2e=(60_000,) * 19,
        itl=(100_000,) * 16,
    )
    grown = len(codec.encode(card(stats=busy))) - len(codec.encode(card()))
    assert grown <= 400
    usual = busy.changed({"ttft": (200,) * 19, "e2e": (200,) * 19, "itl": (2000,) * 16})
    assert len(codec.encode(card(stats=usual))) - len(codec.encode(card())) <= 330


async def test_a_card_tells_what_its_worker_has_done_and_runs(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=2), drain_timeout_s=3600.0, version="1.2")
    (young,) = await broker.cards()
    assert young.stats is not None
    assert (young.stats.ended, young.stats.ttft) == (0, ())
    await ends(broker, await submit(broker, ["ECHO 30", "ECHO 20"]))
    hired.engine.is_open = False
    await submit(broker, ["ECHO 40"])
    await eventually(lambda: len(hired.engine.added) == 3, "their turn")
    hired.worker.stop()  # whoever drains says so at once, on a card as of then
    await eventually_so(lambda: _is_draining(broker), "a card that says so")
    (card,) = await broker.cards()
    assert card.stats is not None
    assert (card.stats.ended, card.stats.failed, card.stats.generated_tokens) == (2, 0, 50)
    assert (sum(card.stats.ttft), sum(card.stats.e2e), sum(card.stats.itl)) == (2, 2, 48)
    # Two rows for 20 passes, one for 10 more; fewer where the second came later.
    assert card.stats.batch_rows == 50
    assert 30 <= card.stats.batches <= 50


async def _is_draining(broker: Broker) -> bool:
    return [card.state for card in await broker.cards()] == ["draining"]
