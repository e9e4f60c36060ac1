"""All workers killed: the exporter still tells what is queued and what ran, and how long the oldest waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker_parts import card
from delivery.workers import Nursery, WorkerProcess
from exporter_page import Exporter, Series, series
from hired import eventually_so, submit
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections

RUNNING, QUEUED = 20, 50
ENDLESS = "ECHO 1900 TICK 60000"
"""A token a minute."""


@pytest.fixture
def worker(redis_url: str, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A real worker that runs twenty at a time, and sweeps every second."""
    with Nursery(tmp_path) as nursery:
        yield nursery.worker(redis_url, max_batch_size=RUNNING, lease_s=3, max_delay_ms=0)


def now_ms(raw: Any) -> float:
    seconds, micros = raw.time()
    return float(seconds * 1000 + micros / 1000)


async def test_fifty_queued_and_twenty_that_ran(redis_url: str, worker: WorkerProcess) -> None:
    connections = Connections.open(redis_url)
    broker = Broker(connections, "q")
    raw: Any = redis.Redis.from_url(redis_url, protocol=2)
    await worker.ready()
    await submit(broker, [ENDLESS] * RUNNING)

    async def all_run() -> bool:
        return (await broker.depth()).running == RUNNING

    await eventually_so(all_run, "twenty that run")
    await submit(broker, [ENDLESS] * QUEUED)
    stream = "{q:q:0}:s:normal"
    accepted = min(int(eid.partition(b"-")[0]) for eid, _ in raw.xrange(stream)[-QUEUED:])

    async def is_noted() -> bool:
        return bool(raw.hget("{q:q:0}:sweep", "oldest:normal") == str(accepted).encode())

    await eventually_so(is_noted, "a sweep")
    worker.signal(signal.SIGKILL)
    await worker.ended()

    async with Exporter(redis_url) as exporter:
        before = now_ms(raw)
        first = await exporter.samples()
        between = now_ms(raw)
        second = await exporter.samples()
        while age(second) <= age(first):  # as long as the server's clock has not moved on
            second = await exporter.samples()
        after = now_ms(raw)

    for seen in (first, second):
        assert seen[series("queue_depth", queue="q", state="queued")] == QUEUED
        assert seen[series("queue_depth", queue="q", state="running")] == RUNNING
        assert seen[series("queue_lane_depth", queue="q", lane="normal")] == QUEUED
    assert before - 1 <= accepted + 1000 * age(first) <= between + 1
    assert between - 1 <= accepted + 1000 * age(second) <= after + 1
    raw.close()
    await connections.close()


def age(seen: dict[Series, float]) -> float:
    return seen[series("queue_oldest_age_seconds", queue="q", lane="normal")]


async def test_when_its_card_has_run_out_nobody_is_ready(redis_url: str) -> None:
    """The card outlives who was killed for some seconds; here it does not, so that no test waits for them."""
    raw: Any = redis.Redis.from_url(redis_url)
    raw.hset("streamfleet:queues", "q", 1)
    cards = {"gone": b"1|" + codec.encode(card()), "odd": b"no number", "far": b"99999999999999|\xc1"}
    raw.hset("{q:q:0}:workers", mapping=cards)
    raw.close()
    async with Exporter(redis_url) as exporter:
        seen = await exporter.samples()

    states = [seen[series("queue_workers", queue="q", state=state)] for state in ("ready", "draining")]
    assert states == [0, 0]
