"""What the fleet itself costs: requests and results through Redis with a no-op engine, beside dramatiq.

    python tests/bench/fleet.py [--requests 20000] [--in-flight 256] [--batch 32] [--json]

One broker, one worker process, one producer process, a prompt and a result of 200 characters. Both systems
run against the same server, one after the other, several rounds in turn; the ratio counts, not the absolute
figures, since machines differ and are shared. CPU times are the processes' own, in microseconds a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client, GenerateRequest

HERE = Path(__file__).parent
TEXT = "x" * 200
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


def cpu_us(pid: int) -> float:
    """CPU time that a process has used so far, in microseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_US


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child process for as long as the block lasts."""
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        try:
            yield child
        finally:
            child.terminate()
            child.wait(30)


async def until(condition: Any) -> None:
    """Wait for a worker to be there."""
    while not await condition():  # noqa: ASYNC110 (another process makes it true)
        await asyncio.sleep(0.05)


async def streamfleet(url: str, pid: int, count: int, in_flight: int, batch: int) -> dict[str, Any]:
    """One round through the fleet."""
    environment = {
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": "bench",
        "STREAMFLEET_ENGINE": "scripted",
        "STREAMFLEET_MAX_DELAY_MS": "0",
        "STREAMFLEET_MAX_BATCH_SIZE": str(batch),
        "STREAMFLEET_MAX_QUEUE_DEPTH": "100000",
    }
    request = GenerateRequest(prompt=TEXT)
    with process(sys.executable, "-m", "streamfleet_worker", **environment) as worker:
        async with Client(url, queue="bench") as fleet:
            await until(fleet.models)
            await asyncio.gather(*(fleet.run(request) for _ in range(in_flight)))

            trips = []
            for _ in range(min(count, 500)):
                began = time.perf_counter()
                answer = await fleet.run(request)
                trips.append(time.perf_counter() - began)
                assert answer.text == TEXT

            left = iter(range(count))

            async def caller() -> None:
                for _ in left:
                    await fleet.run(request)

            before = [cpu_us(p) for p in (os.getpid(), worker.pid, pid)]
            began = time.perf_counter()
            await asyncio.gather(*(caller() for _ in range(in_flight)))
            seconds = time.perf_counter() - began
            after = [cpu_us(p) for p in (os.getpid(), worker.pid, pid)]
    used = [round((b - a) / count, 1) for a, b in zip(before, after, strict=True)]
    return {
        "requests_per_s": round(count / seconds),
        **percentiles(trips),
        "cpu_us": dict(zip(("producer", "worker", "redis"), used, strict=True)),
    }


def dramatiq(url: str, count: int, in_flight: int) -> dict[str, Any]:
    """One round through dramatiq: eight threads, results in Redis, polled as its documentation does."""
    os.environ["BENCH_REDIS_URL"] = url
    sys.path.insert(0, str(HERE))
    import dramatiq_noop as peer  # noqa: PLC0415 (it connects when imported)

    count = min(count, 2000)
    command = (sys.executable, "-m", "dramatiq", "dramatiq_noop", "-p", "1", "-t", "8")
    with process(*command, "--path", str(HERE), PYTHONPATH=str(HERE)):
        peer.echo.send(TEXT).get_result(block=True, timeout=30_000)
        trips = []
        for _ in range(200):
            began = time.perf_counter()
            peer.echo.send(TEXT).get_result(block=True, timeout=30_000)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        waiting: list[Any] = []
        for _ in range(count):
            waiting.append(peer.echo.send(TEXT))
            if len(waiting) >= in_flight:
                waiting.pop(0).get_result(block=True, timeout=30_000)
        for message in waiting:
            message.get_result(block=True, timeout=30_000)
        seconds = time.perf_counter() - began
    return {"requests_per_s": round(count / seconds), **percentiles(trips)}


def main() -> None:
    """Run the rounds and print them."""
    parser = argparse.ArgumentParser(description="Requests per second and round trip with a no-op engine.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="max_batch_size of the worker")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    rounds: list[dict[str, Any]] = []
    with EmbeddedBroker() as broker:
        for _ in range(options.rounds):
            ours = asyncio.run(
                streamfleet(broker.url, broker.pid, options.requests, options.in_flight, options.batch)
            )
            rounds.append({"streamfleet": ours})
            if not options.no_peer:
                rounds[-1]["dramatiq"] = dramatiq(broker.url, options.requests, options.in_flight)
    if options.json:
        print(json.dumps(rounds, indent=2))
        return
    print(f"{'':12} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8}   CPU µs a request")
    for round_ in rounds:
        for name, row in round_.items():
            cpu = ", ".join(f"{part} {used}" for part, used in row.get("cpu_us", {}).items())
            figures = f"{row['requests_per_s']:>8,} {row['p50_ms']:>8} {row['p99_ms']:>8}"
            print(f"{name:12} {figures}   {cpu}")
    if not options.no_peer:
        ratios = [r["streamfleet"]["requests_per_s"] / r["dramatiq"]["requests_per_s"] for r in rounds]
        print(f"streamfleet ÷ dramatiq: {min(ratios):.1f} to {max(ratios):.1f}")


if __name__ == "__main__":
    main()
