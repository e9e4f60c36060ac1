"""taskiq over Redis streams for `fleet.py`.

Set to its best: 256 tasks at once, msgpack rather than pickle, uvloop, no parsing of arguments; acknowledged
once the result is saved, as we do. Results are polled, every millisecond for a lone request and every ten
under load, where shorter polls cost more than they bring.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import uvloop
from taskiq.serializers import MSGPackSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from load import TEXT, Load, measure

URL = os.environ["BENCH_URL"]
results: Any = RedisAsyncResultBackend(URL, result_ex_time=600, serializer=MSGPackSerializer())
broker: Any = RedisStreamBroker(URL, consumer_id="0").with_result_backend(results)
broker.with_serializer(MSGPackSerializer())


async def _echo(text: str) -> str:
    return text


echo: Any = broker.register_task(_echo, task_name="echo")


async def produce(load: Load) -> dict[str, Any]:
    """One round."""
    await broker.startup()

    async def call(poll_s: float) -> Any:
        task = await echo.kiq(TEXT)
        return (await task.wait_result(check_interval=poll_s, timeout=30)).return_value

    try:
        return await measure(load, lambda: call(0.01), alone=lambda: call(0.001))
    finally:
        await broker.shutdown()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    print(json.dumps(asyncio.run(produce(Load.read()))))
