"""arq for `fleet.py`: `python arq_noop.py work`, or without an argument the producer.

Set to its best: 256 jobs at once, a worker that polls every millisecond rather than every 500, msgpack rather
than pickle, no log of results, uvloop. Results are polled, every millisecond for a lone request and every ten
under load, where shorter polls cost more than they bring.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgpack
import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker

from load import TEXT, Load, measure

CODEC = {"job_serializer": msgpack.packb, "job_deserializer": msgpack.unpackb}
SERVER = RedisSettings.from_dsn(os.environ["BENCH_URL"])


async def echo(context: dict[Any, Any], text: str) -> str:
    """The job."""
    return text


async def produce(load: Load) -> dict[str, Any]:
    """One round."""
    pool: Any = await create_pool(SERVER, **CODEC)

    async def call(poll_s: float) -> Any:
        job = await pool.enqueue_job("echo", TEXT)
        return await job.result(timeout=30, poll_delay=poll_s)

    try:
        return await measure(load, lambda: call(0.01), alone=lambda: call(0.001))
    finally:
        await pool.aclose()


async def work() -> None:
    """Serve until the process ends."""
    worker = Worker(
        [echo],
        redis_settings=SERVER,
        max_jobs=256,
        poll_delay=0.001,
        keep_result=600,
        log_results=False,
        health_check_interval=3600,
        **CODEC,
    )
    await worker.async_run()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if sys.argv[1:] == ["work"]:
        asyncio.run(work())
    else:
        print(json.dumps(asyncio.run(produce(Load.read()))))
