"""What a tenant that floods a queue costs a quiet one: its latency alone, and beside the flood.

    python tests/bench/fairness.py [--seconds 40] [--sub-lanes 8] [--server redis-server] [--json]

Workers of the scripted engine, whose answers take a while and differ in length, as those of a model do, so
that rows become free one by one. The quiet tenant asks now and then, at random times, for a percent of what
the workers can do; the loud one asks for 100 times as much, from a process of its own: more than they can do,
so the queue grows. With several sub-lanes the two wait in different ones. Accepted is a p99 beside the
flood of at most twice that alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import redis

from load import percentiles
from server import add_options, describe, process, serving
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.keys import sub_lane_of
from streamfleet_common.schemas import Envelope
from streamfleet_common.submissions import Submission
from streamfleet_producer import Client, GenerateRequest

HERE = Path(__file__).parent
QUEUE = "bench"
QUIET, LOUD = "beta", "acme"
TIMES = 100
DEEP = 1_000_000
TICK_MS = 5
MOST = 2.0


def request(chance: random.Random) -> GenerateRequest:
    """An answer of 8 to 16 tokens, 60 ms in the middle."""
    return GenerateRequest(prompt=f"ECHO {chance.randint(8, 16)} TICK {TICK_MS}", max_tokens=16)


async def flood(url: str, per_s: float) -> None:
    """Ask for so much, whether it is answered or not, until the process is ended."""
    connections = Connections.open(url)
    broker, chance = Broker(connections, QUEUE), random.Random(1)
    began, asked = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began) * per_s) - asked
        many = [Submission.of(Envelope(tenant=LOUD, request=request(chance))) for _ in range(due)]
        await broker.submit(many, max_queue_depth=DEEP)
        asked += due
        await asyncio.sleep(0.05)


async def ask(url: str, seconds: float, per_s: float) -> list[float]:
    """Seconds of each answer to the quiet tenant."""
    chance = random.Random(2)
    took: list[float] = []

    async def one(fleet: Client) -> None:
        began = time.perf_counter()
        await fleet.run(request(chance))
        took.append(time.perf_counter() - began)

    async with Client(url, QUEUE, tenant=QUIET) as fleet, asyncio.TaskGroup() as asking:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            asking.create_task(one(fleet))
            await asyncio.sleep(chance.expovariate(per_s))
    return took


async def ready(url: str, workers: int) -> None:
    """Wait for the workers."""
    async with Client(url, QUEUE) as fleet:
        while len(await fleet.models()) < workers:  # noqa: ASYNC110 (other processes make it true)
            await asyncio.sleep(0.05)


def measure(
    broker: EmbeddedBroker, options: argparse.Namespace, sub_lanes: int, *, flooded: bool
) -> dict[str, Any]:
    """One run on an empty server."""
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    settings = {
        "STREAMFLEET_REDIS_URL": broker.url,
        "STREAMFLEET_QUEUE": QUEUE,
        "STREAMFLEET_ENGINE": "scripted",
        "STREAMFLEET_MAX_DELAY_MS": "0",
        "STREAMFLEET_MAX_BATCH_SIZE": str(options.rows),
        "STREAMFLEET_MAX_QUEUE_DEPTH": str(DEEP),
        "STREAMFLEET_SUB_LANES": str(sub_lanes),
        "STREAMFLEET_WORKERS": str(options.workers),
        "STREAMFLEET_LOG_LEVEL": "error",
    }
    capacity = options.workers * options.rows / (11 * TICK_MS / 1000)
    per_s = capacity * options.load / TIMES
    with process([sys.executable, "-m", "streamfleet_worker"], settings, HERE):
        asyncio.run(ready(broker.url, options.workers))
        if not flooded:
            took = asyncio.run(ask(broker.url, options.seconds, per_s))
            depth = 0
        else:
            loud = [sys.executable, __file__, "--flood", broker.url, "--per-s", str(per_s * TIMES)]
            with process(loud, dict(os.environ), HERE):
                asyncio.run(behind(broker.url, 4 * options.workers * options.rows))
                took = asyncio.run(ask(broker.url, options.seconds, per_s))
                depth = asyncio.run(open_now(broker.url))
    return {
        "sub_lanes": sub_lanes,
        "flooded": flooded,
        "requests": len(took),
        "open": depth,
        **percentiles(took),
    }


async def open_now(url: str) -> int:
    async with Client(url, QUEUE) as fleet:
        return (await fleet.depth()).open


async def behind(url: str, requests: int) -> None:
    """Wait until so many wait."""
    async with Client(url, QUEUE) as fleet:
        while (await fleet.depth()).open < requests:  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.05)


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each run."""
    alone = rows[0]
    print(
        f"{'the quiet tenant':32} {'requests':>8} {'p50, ms':>9} {'p99, ms':>9} "
        f"{'p99 / alone':>12} {'open at the end':>16}"
    )
    for row in rows:
        beside = (
            f"beside the flood, F = {row['sub_lanes']}"
            if row["flooded"]
            else f"alone, F = {row['sub_lanes']}"
        )
        ratio = row["p99_ms"] / alone["p99_ms"]
        print(
            f"{beside:32} {row['requests']:>8} {row['p50_ms']:>9.1f} {row['p99_ms']:>9.1f} {ratio:>12.2f} "
            f"{row['open']:>16,}"
        )


def main() -> None:
    """Run the three and print them."""
    parser = argparse.ArgumentParser(description="The latency of a tenant beside one that floods the queue.")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--sub-lanes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="max_batch_size of each worker")
    parser.add_argument(
        "--load", type=float, default=1.3, help="of the loud tenant, in what the workers can do"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--flood", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--per-s", type=float, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.flood:
        asyncio.run(flood(options.flood, options.per_s))
        return
    if sub_lane_of(QUIET, options.sub_lanes) == sub_lane_of(LOUD, options.sub_lanes):
        raise SystemExit(f"with {options.sub_lanes} sub-lanes both tenants share one: take another number")
    with serving(options.server, aof=options.aof) as broker:
        server = describe(broker, aof=options.aof)
        rows = [
            measure(broker, options, sub_lanes, flooded=flooded)
            for sub_lanes, flooded in ((options.sub_lanes, False), (1, True), (options.sub_lanes, True))
        ]
    accepted = rows[2]["p99_ms"] <= MOST * rows[0]["p99_ms"]
    if options.json:
        print(json.dumps({"server": server, "runs": rows, "accepted": accepted}, indent=2))
        return
    print(f"{server}; {options.workers} workers with {options.rows} rows each")
    show(rows)
    print(f"accepted (at most {MOST:g} times alone): {'yes' if accepted else 'no'}")


if __name__ == "__main__":
    main()
