"""The bare client's side of `gateway.py`: what the gateway's own requests cost without it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from load import TEXT, Load, measure
from streamfleet_producer import Client, GenerateRequest

QUEUE = "bench"


async def produce(load: Load, *, streams: bool) -> dict[str, Any]:
    """One round."""
    request = GenerateRequest(**json.loads(os.environ["BENCH_REQUEST"]))
    wanted = os.environ["BENCH_WANTED"]
    async with Client(load.url, queue=QUEUE) as fleet:
        while not await fleet.models():  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.05)

        async def run() -> str:
            return (await fleet.run(request)).text

        async def stream() -> str:
            async with fleet.stream(request) as tokens:
                return "".join([delta.text async for delta in tokens])

        call = stream if streams else run

        async def checked() -> str:
            text = await call()
            if text != wanted:
                raise AssertionError(f"another answer than was asked for: {text!r}")
            return TEXT

        return await measure(load, checked)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(produce(Load.read(), streams=sys.argv[1] == "stream"))))
