"""Our side of the calls of `one_shot.py`: submit to pushed result, through Redis."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import Load, measure
from one_shot_handlers import ITEM, Serving
from streamfleet_producer import CallRequest, Client

QUEUE = "bench"


def worker(url: str, serving: Serving) -> tuple[list[str], dict[str, str]]:
    """The command of a worker, and its settings."""
    return [sys.executable, "-m", "streamfleet_worker"], {
        "PYTHONPATH": str(Path(__file__).parent),
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": QUEUE,
        "STREAMFLEET_HANDLER": f"streamfleet_handlers:{serving.handler}",
        "STREAMFLEET_MAX_BATCH_SIZE": str(serving.max_batch_size),
        "STREAMFLEET_MAX_DELAY_MS": str(serving.delay_ms),
        "STREAMFLEET_MAX_QUEUE_DEPTH": "100000",
        "STREAMFLEET_LOG_LEVEL": "error",
    }


async def produce(load: Load, around: Callable[[bool], None] = lambda _: None) -> dict[str, Any]:
    """One round, with whichever handler the worker serves."""
    async with Client(load.url, queue=QUEUE) as fleet:
        while not (cards := await fleet.models()):  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.05)
        request = CallRequest(handler=cards[0].model, input=ITEM)

        async def call() -> Any:
            return (await fleet.run(request)).output["text"]

        return await measure(load, call, around=around)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(produce(Load.read()))))
