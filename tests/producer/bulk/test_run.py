"""One run of a job, in the test's own process: what it goes through with the Redis that keeps the jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from eventually import eventually
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.connection import connect
from streamfleet_producer.bulk.jobs import BulkJob
from streamfleet_producer.bulk.run import _Run
from streamfleet_producer.bulk.settings import BulkSettings


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client
        client.config_set("maxmemory", 0)


async def test_a_redis_that_was_full_keeps_nobody_from_cancelling(
    redis_url: str, raw: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"custom_id": "a", "request": {"prompt": "p"}}\n')
    raw.hset("streamfleet:queues", "q", 1)
    with Batches(redis_url) as batches, connect(redis_url) as jobs:
        made = batches.create(tmp_path / "in", tmp_path / "out", tmp_path / "err", fleet_queue="q")
        job = BulkJob.fetch(made.id, connection=jobs)
        assert isinstance(job, BulkJob)
        run = _Run(job, made.spec, BulkSettings(redis_url=redis_url))
        raw.lpop("rq:queue:streamfleet-bulk")
        raw.config_resetstat()
        raw.config_set("maxmemory", 1)
        task = asyncio.create_task(run.to_end())
        # It has tried to tell where it stands, in vain.
        await eventually(lambda: raw.info("commandstats").get("cmdstat_hset", {}).get("rejected_calls"))
        raw.config_set("maxmemory", 0)
        await asyncio.to_thread(batches.cancel, made.id)
        async with asyncio.timeout(30):
            await task
        assert batches.get(made.id).status == "cancelled"
