"""Our side of `fleet.py`: the whole protocol, submit to pushed result, with the worker's no-op engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from load import TEXT, Load, measure
from streamfleet_producer import Client, GenerateRequest

QUEUE = "bench"


def worker(url: str, batch: int) -> tuple[list[str], dict[str, str]]:
    """The command of a worker, and its settings."""
    return [sys.executable, "-m", "streamfleet_worker"], {
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": QUEUE,
        "STREAMFLEET_ENGINE": "scripted",
        "STREAMFLEET_MAX_DELAY_MS": "0",
        "STREAMFLEET_MAX_BATCH_SIZE": str(batch),
        "STREAMFLEET_MAX_QUEUE_DEPTH": "100000",
        "STREAMFLEET_LOG_LEVEL": "error",
    }


async def produce(load: Load, around: Callable[[bool], None] = lambda _: None) -> dict[str, Any]:
    """One round."""
    request = GenerateRequest(prompt=TEXT)
    async with Client(load.url, queue=QUEUE) as fleet:
        while not await fleet.models():  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.05)

        async def call() -> str:
            return (await fleet.run(request)).text

        return await measure(load, call, around=around)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(produce(Load.read()))))
