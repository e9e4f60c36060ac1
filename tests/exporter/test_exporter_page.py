"""The exporter's page says what Redis, asked directly, and the broker say."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.openmetrics import parser as openmetrics

from broker_parts import card, retry, submission
from exporter_page import Exporter, samples_of, series
from hired import eventually_so
from streamfleet_common import figures_reader
from streamfleet_common.broker import Broker
from streamfleet_common.connections import COMMAND_TIMEOUT_S, Connections
from streamfleet_common.deliveries import Delivery, Finish
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.keys import Stream
from streamfleet_common.schemas import End, Lane, Start
from streamfleet_producer.exporter.metrics import page_of
from streamfleet_producer.exporter.reading import Reading

T = "{q:q:0}"
START = Start(worker="w1", model="m")
PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
SUB_LANES = 3
SECTION = PAGE.partition("\n## The exporter\n")[2].partition("\n## ")[0]


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[Broker]:
    connections = Connections.open(redis_url)
    yield Broker(connections, "q")
    await connections.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
async def exporter(redis_url: str) -> AsyncIterator[Exporter]:
    async with Exporter(redis_url) as exporter:
        yield exporter


async def take(broker: Broker, count: int, owner: str = "w8", *, back: bool = False) -> list[Delivery]:
    """Let a worker begin so many newcomers, lane by lane; or such as came `back` to the high one."""
    streams: list[Stream] = ["high:again"] if back else ["high", "normal", "bulk"]
    taken = await broker.take(owner, START, streams=streams, count=count)
    begun = [delivery for _, delivery in taken.started if isinstance(delivery, Delivery)]
    assert len(begun) == count
    return begun


async def busy_queue(broker: Broker) -> None:
    """Requests in every place there is: 41 are open, of which 3 run; 2 have ended."""
    for card_ in (card(max_queue_depth=100), card("w2", 100, state="draining"), card("w3", 100)):
        await broker.announce(card_, sub_lanes=SUB_LANES, life_ms=300_000, lease_ms=300_000)
    await broker.create_groups()
    # Two end, one is to be tried later.
    await broker.submit([submission(), submission(), submission()])
    first, second, third = await take(broker, 3)
    ends = [
        Finish(first, End(state="done")),
        Finish(second, End(state="failed")),
        retry(third, after_ms=900_000),
    ]
    assert await broker.finish(ends) == [True, True, True]
    # Two will be suspects, three come back from a drain, three run.
    await broker.submit([submission(lane="high"), submission(lane="high", tenant="b")])
    await take(broker, 2, "w9")
    await broker.submit([submission(lane="bulk", tenant="c") for _ in range(3)])
    await take(broker, 3)
    await broker.hand_back("w8", crashed=False)
    await broker.submit([submission(lane="high", max_tokens=1000) for _ in range(3)])
    await take(broker, 3)
    await broker.hand_back("w9", crashed=True)
    await take(broker, 2, "w9", back=True)
    await broker.hand_back("w9", crashed=True)
    lanes: list[Lane] = ["high", "normal", "normal", "bulk"]
    await broker.submit([submission(tenant=f"t{number}", lane=lane) for number in range(8) for lane in lanes])


async def test_it_agrees_with_the_broker_and_with_redis(broker: Broker, raw: Any, exporter: Exporter) -> None:
    await busy_queue(broker)
    raw.xadd(f"{T}:dead", {"rid": "0" * 34, "why": "none"})
    await broker.sweep()
    assert (await exporter.samples())[series("queue_paused", queue="q")] == 0
    raw.hset(f"{T}:control", "paused", "1")

    seen = await exporter.samples()

    depth = await broker.depth()
    assert (depth.queued, depth.running, depth.limit, depth.dead) == (38, 3, 100, 1)
    assert seen[series("queue_depth", queue="q", state="queued")] == depth.queued
    assert seen[series("queue_depth", queue="q", state="running")] == depth.running
    assert seen[series("queue_max_depth", queue="q")] == depth.limit
    assert seen[series("queue_dead_letters", queue="q")] == depth.dead
    assert seen[series("queue_retrying", queue="q")] == raw.zcard(f"{T}:later") == 1
    assert seen[series("queue_paused", queue="q")] == 1
    assert seen[series("queue_ended_total", queue="q")] == 2
    assert seen[series("queue_workers", queue="q", state="ready")] == 2
    assert seen[series("queue_workers", queue="q", state="draining")] == 1
    assert raw.xlen(f"{T}:s:solo") == 2, "no suspects, so not all was tried"
    lanes = {
        lane: seen[series("queue_lane_depth", queue="q", lane=lane)]
        for lane in ("high", "normal", "bulk", "solo")
    }
    assert lanes == {"high": 8, "normal": 16, "bulk": 8 + 3, "solo": 2}
    assert sum(lanes.values()) + 1 == depth.queued
    assert sum(bool(raw.xlen(f"{T}:s:normal:{number}")) for number in (1, 2)), "no sub-lane was used"
    # 1 token for the prompt "Hi" in each of them.
    assert seen[series("queue_waiting_tokens", queue="q")] == 38 * 129
    assert seen[series("queue_open_tokens", queue="q")] == 38 * 129 + 3 * 1001
    assert seen[series("broker_up")] == 1
    memory: Any = raw.info("memory")
    assert seen[series("broker_memory_used_bytes")] == pytest.approx(memory["used_memory"], rel=0.5)
    assert series("broker_memory_max_bytes") not in seen
    raw.config_set("maxmemory", 123_456_789)
    try:
        assert (await exporter.samples())[series("broker_memory_max_bytes")] == 123_456_789
    finally:
        raw.config_set("maxmemory", 0)


def now_ms(raw: Any) -> float:
    seconds, micros = raw.time()
    return float(seconds * 1000 + micros / 1000)


async def test_the_oldest_is_as_old_as_its_entry(broker: Broker, raw: Any, exporter: Exporter) -> None:
    await broker.announce(card(max_queue_depth=100))
    await broker.create_groups()
    await broker.submit([submission(lane="normal")])
    await broker.submit([submission(lane="bulk")])
    accepted = {
        lane: float(raw.xrange(f"{T}:s:{lane}")[0][0].partition(b"-")[0]) for lane in ("normal", "bulk")
    }

    async def ages() -> dict[str, float]:
        seen = await exporter.samples()
        return {
            lane: 1000 * seen[series("queue_oldest_age_seconds", queue="q", lane=lane)]
            for lane in ("high", "normal", "bulk")
        }

    before = now_ms(raw)
    told = await ages()
    after = now_ms(raw)
    assert told["high"] == 0
    for lane, since in accepted.items():
        assert before - since - 1 <= told[lane] <= after - since + 1

    # When it has been taken nobody waits, whatever the last note says.
    await take(broker, 2)
    assert await ages() == {"high": 0, "normal": 0, "bulk": 0}
    raw.hdel(f"{T}:sweep", "oldest:normal")
    await broker.submit([submission()])
    raw.hdel(f"{T}:sweep", "oldest:normal")
    # Nobody has noted it: that is not 0.
    assert series("queue_oldest_age_seconds", queue="q", lane="normal") not in await exporter.samples()


async def test_what_nobody_has_said_yet_is_absent(redis_url: str, raw: Any) -> None:
    async with Exporter(redis_url, ["q", "q"]) as exporter:
        seen = await exporter.samples()

    assert seen[series("queue_depth", queue="q", state="queued")] == 0
    assert seen[series("queue_workers", queue="q", state="ready")] == 0
    assert {name for name, labels in seen if ("queue", "q") in labels}.isdisjoint(
        {"queue_max_depth", "queue_last_sweep_age_seconds"}
    )
    async with Exporter(redis_url) as exporter:
        assert not [name for name, _ in await exporter.samples() if name.startswith("queue_")]


async def test_no_more_queues_than_so_many(redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.hset("streamfleet:queues", mapping={f"q{number}": 1000 + number for number in range(7)})
    raw.hset("streamfleet:queues", b"not\nq a\xffname", 9000)
    monkeypatch.setattr(figures_reader, "MOST_QUEUES", 3)
    monkeypatch.setattr(figures_reader, "AT_ONCE", 2)

    async with Exporter(redis_url) as exporter:
        seen = await exporter.samples()

    told = {dict(labels)["queue"] for name, labels in seen if name == "queue_depth"}
    assert told == {"q4", "q5", "q6"}, "not the ones announced last"
    assert seen[series("exporter_queues_unread", reason="too_many")] == 4


async def test_what_there_was_no_time_for_is_counted(
    redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.hset("streamfleet:queues", mapping={"a": 3, "b": 2, "c": 1})
    monkeypatch.setattr(figures_reader, "AT_ONCE", 1)
    async with Exporter(redis_url, timeout_s=2.0) as exporter:
        reader = exporter.readings._reader
        ask = reader._queues

        async def slowly(queues: Any) -> Any:
            return await (asyncio.Event().wait() if "b" in queues else ask(queues))

        monkeypatch.setattr(reader, "_queues", slowly)
        seen = await exporter.samples()

    assert {dict(labels)["queue"] for name, labels in seen if name == "queue_depth"} == {"a"}
    assert seen[series("exporter_queues_unread", reason="out_of_time")] == 2
    assert seen[series("broker_up")] == 1


async def test_a_server_that_goes_and_comes_back() -> None:
    with EmbeddedBroker() as server:
        async with Exporter(server.url, ["q"]) as exporter:
            assert (await exporter.samples())[series("broker_up")] == 1
            server.kill()
            seen = await exporter.samples()
            assert seen.keys() == {series("broker_up"), series("exporter_scrape_seconds")}
            assert seen[series("broker_up")] == 0
            assert [(await exporter.http.get(path)).status_code for path in ("/healthz", "/readyz")] == [
                200,
                503,
            ]
            server.restart()
            seen = await exporter.samples()
            assert seen[series("broker_up")] == 1
            assert series("queue_depth", queue="q", state="queued") in seen
            assert (await exporter.http.get("/readyz")).status_code == 200


async def test_a_server_that_hangs_holds_no_scrape_up() -> None:
    with EmbeddedBroker() as server:
        async with Exporter(server.url, ["q"], timeout_s=0.3) as exporter:
            await eventually_so(lambda: _is_up(exporter), "an answer in time")
            os.kill(server.pid, signal.SIGSTOP)
            try:
                pages = await asyncio.gather(*(exporter.samples() for _ in range(20)))
                assert all(seen[series("broker_up")] == 0 for seen in pages)
                # Not as long as the client library has patience with one command.
                assert all(seen[series("exporter_scrape_seconds")] < COMMAND_TIMEOUT_S for seen in pages)
                assert (await exporter.http.get("/readyz")).status_code == 503
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await eventually_so(lambda: _is_up(exporter), "an answer in time")


async def _is_up(exporter: Exporter) -> bool:
    return (await exporter.samples())[series("broker_up")] == 1


async def test_scrapes_that_come_together_share_a_reading(redis_url: str, raw: Any) -> None:
    def readings() -> int:
        found: Any = raw.info("commandstats")
        return int(found["cmdstat_time"]["calls"]) // 2

    async with Exporter(redis_url, ["q"]) as exporter:
        await exporter.page()
        before = readings()
        await exporter.page()
        assert readings() - before == 1, "one reading does not ask for the time twice"
        await asyncio.gather(*(exporter.page() for _ in range(20)))
        assert readings() - before == 2


async def test_all_series_are_told_and_no_others(broker: Broker, raw: Any, exporter: Exporter) -> None:
    await busy_queue(broker)
    await broker.sweep()
    raw.config_set("maxmemory", 10**9)
    try:
        page = await exporter.page()
    finally:
        raw.config_set("maxmemory", 0)

    told = dict(re.findall(r"^\| `streamfleet_(\w+)(?:\{([\w,]+)\})?` \|", SECTION, re.MULTILINE))
    found: dict[str, str] = {}
    for name, labels in samples_of(page):
        found[name] = ",".join(sorted(label for label, _ in labels))
    assert {
        name: ",".join(sorted(labels.split(","))) if labels else "" for name, labels in told.items()
    } == found


async def test_a_scraper_may_ask_for_the_newer_form(broker: Broker, exporter: Exporter) -> None:
    """As Prometheus does."""
    await busy_queue(broker)
    wanted = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    answer = await exporter.http.get("/metrics", headers=wanted)

    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families: Any = openmetrics.text_string_to_metric_families(answer.text)  # type: ignore[no-untyped-call]
    newer = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
    older = await exporter.samples()
    assert {(name.removeprefix("streamfleet_"), labels) for name, labels in newer} == older.keys()
    assert newer["streamfleet_queue_ended_total", (("queue", "q"),)] == 2


async def test_other_paths_are_nowhere(exporter: Exporter) -> None:
    found = [
        (await exporter.http.get(path)).status_code for path in ("/", "/metrics/", "/metrics/q", "/docs")
    ]

    assert found == [404] * 4
    assert (await exporter.http.post("/metrics")).status_code == 405


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_nothing_to_say_of_the_page(broker: Broker, exporter: Exporter) -> None:
    await busy_queue(broker)
    page = await exporter.page()
    planted = page.replace("streamfleet_queue_paused", "streamfleet_queue_paused_total")

    for text in (page, planted):
        check = await asyncio.to_thread(
            subprocess.run,
            ["promtool", "check", "metrics"],
            input=text.encode(),
            capture_output=True,
            check=False,
        )
        assert (check.returncode == 0) == (text is page), check


def test_a_page_without_figures() -> None:
    families = {family.name for family in page_of(Reading(None, 1.5)).collect()}

    assert families == {"streamfleet_broker_up", "streamfleet_exporter_scrape_seconds"}
