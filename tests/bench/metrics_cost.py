"""What the metrics cost: one worker that counts and does not count in turn, under the load of `fleet.py`.

    python tests/bench/metrics_cost.py [--rounds 200] [--seconds 0.5] [--scrape-s 5] [--json]

One server, one worker process with the no-op engine, and this process, which keeps 256 requests in flight. A
signal switches the worker between its metrics and a stand-in whose every method does nothing. While it
counts, `/metrics` is read every five seconds, as Prometheus does. It is one process all the time, and windows
are short and alternate, so that neither memory layout nor what else the machine does is measured.

Ratios are of both windows of a pair, with over without: CPU time of the worker a request, which others on the
machine disturb less, and requests a second, which they disturb more. Shown are the median and the middle half
of all pairs, and where the median lies in nine of ten samples drawn anew from them. On a busy machine that is
a wide range. So the calls themselves are timed besides, as often as it takes to find the machine quiet, with
what a worker tells of a batch of the same requests; and so is a scrape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import streamfleet_noop
from load import TEXT
from metrics_calls import calls_us
from server import add_options, describe, process, serving
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client, GenerateRequest
from streamfleet_worker import intake
from streamfleet_worker import worker as workers
from streamfleet_worker.metrics import Metrics

HERE = Path(__file__).parent
COUNT, DO_NOT = signal.SIGUSR1, signal.SIGUSR2
SETTLE_S = 0.05
"""After a switch, before a window begins: what was taken in by one is not told by the other."""
START_LIMIT_S = 60.0
WARM_UP_S = 3.0
SCRAPES = 50
PARTS = ("worker", "producer", "redis")
FOLLOW = intake._follow

Pair = dict[str, dict[str, float]]
"""Figures of two windows, by `with` and `without`."""


class Nothing:
    """Stands for metrics, and for each of their parts."""

    def __getattr__(self, name: str) -> Nothing:
        found = Nothing()
        setattr(self, name, found)  # looked up once
        return found

    def __call__(self, *_: object) -> None:
        pass

    def noted(self, ends: Sequence[object]) -> Sequence[object]:
        """As many as there are."""
        return ends


class SwitchedWorker(workers.Worker):
    """A worker whose parts are given its metrics, or nothing, by a signal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counting, self._nothing = self.metrics, Nothing()
        signal.signal(COUNT, lambda *_: self._switch(self._counting))
        signal.signal(DO_NOT, lambda *_: self._switch(self._nothing))

    def _switch(self, metrics: Metrics | Nothing) -> None:
        for part in (self, self._intake, self._publisher):
            for name in ("metrics", "_metrics"):
                if name in vars(part):
                    setattr(part, name, metrics)
        vars(intake)["_follow"] = FOLLOW if metrics is self._counting else lambda *_: None


def work(port: int) -> int:
    """Be the worker."""
    program = import_module("streamfleet_worker.process")
    vars(program)["Worker"] = SwitchedWorker
    os.environ["STREAMFLEET_HTTP_PORT"] = str(port)
    return int(program.main())


def cpu_s(pid: int) -> float:
    """CPU time of another process so far, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # its clock's number, as clock_getcpuclockid(3) has it


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Producer:
    """Keeps requests in flight, and counts those that are answered."""

    def __init__(self, client: Client, in_flight: int) -> None:
        self.answered = 0
        self._client = client
        self._tasks = [asyncio.create_task(self._call()) for _ in range(in_flight)]

    async def _call(self) -> None:
        request = GenerateRequest(prompt=TEXT)
        while True:
            answer = await self._client.run(request)
            assert answer.text == TEXT
            self.answered += 1

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raises what a call has raised."""
        for task in self._tasks:
            if task.done():
                task.result()


async def window(
    producer: Producer, pids: dict[str, int], seconds: float, url: str | None
) -> dict[str, float]:
    """Requests per second and CPU microseconds a request of one window; the page at `url` is read amid it."""
    await asyncio.sleep(SETTLE_S)
    answered, began = producer.answered, time.perf_counter()
    used = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds / 2)
    if url is not None:
        await asyncio.to_thread(_read, url)
    await asyncio.sleep(began + seconds - time.perf_counter())
    producer.check()
    count, took = producer.answered - answered, time.perf_counter() - began
    cpu = {name: (cpu_s(pid) - used[name]) / count * 1e6 for name, pid in pids.items()}
    return {"requests_per_s": count / took, **cpu}


def _read(url: str) -> None:
    with urlopen(url, timeout=60) as reply:
        assert b"streamfleet_request_success_total" in reply.read()


async def measure(broker: EmbeddedBroker, options: argparse.Namespace) -> tuple[list[Pair], float]:
    """Pairs of windows, `with` and `without`; and the CPU seconds of a scrape."""
    _, environment = streamfleet_noop.worker(broker.url, options.batch)
    port = free_port()
    command = [sys.executable, __file__, "--work", str(port)]
    rounds: list[Pair] = []
    with process(command, environment, HERE) as worker:
        pids = {"worker": worker.pid, "producer": os.getpid(), "redis": broker.pid}
        async with Client(broker.url, queue=streamfleet_noop.QUEUE) as client:
            async with asyncio.timeout(START_LIMIT_S):
                while not await client.models():  # noqa: ASYNC110 (another process makes it true)
                    await asyncio.sleep(0.05)
            producer = Producer(client, options.in_flight)
            await asyncio.sleep(WARM_UP_S)
            url, unread_s = f"http://127.0.0.1:{port}/metrics", 0.0
            for number in range(options.rounds):
                found = {}
                for name in ("with", "without") if number % 2 else ("without", "with"):
                    worker.send_signal(COUNT if name == "with" else DO_NOT)
                    unread_s += options.seconds if name == "with" else 0.0
                    is_read = name == "with" and unread_s >= options.scrape_s
                    unread_s = 0.0 if is_read else unread_s
                    found[name] = await window(producer, pids, options.seconds, url if is_read else None)
                rounds.append(found)
            await producer.close()
        used = cpu_s(worker.pid)
        for _ in range(SCRAPES):
            _read(url)
        return rounds, (cpu_s(worker.pid) - used) / SCRAPES


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, middle half, and where the median lies in nine of ten samples drawn anew."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    drawn = random.Random(1)
    medians = sorted(statistics.median(drawn.choices(values, k=len(values))) for _ in range(2000))
    found = {"median": median, "p25": low, "p75": high, "least": medians[100], "most": medians[1899]}
    return {name: round(value, 4) for name, value in found.items()}


def ratios(rounds: Sequence[Pair]) -> dict[str, Any]:
    """With over without."""
    pairs = [(round_["with"], round_["without"]) for round_ in rounds]
    return {
        "worker_cpu": spread([on["worker"] / off["worker"] for on, off in pairs]),
        "all_cpu": spread([sum(on[p] for p in PARTS) / sum(off[p] for p in PARTS) for on, off in pairs]),
        "requests_per_s": spread([on["requests_per_s"] / off["requests_per_s"] for on, off in pairs]),
        "without": {
            name: round(statistics.median(off[name] for _, off in pairs), 1)
            for name in ("requests_per_s", *PARTS)
        },
    }


LABELS = {
    "worker_cpu": "the worker's CPU time a request",
    "all_cpu": "everybody's CPU time a request",
    "requests_per_s": "requests a second",
}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window")
    parser.add_argument("--scrape-s", type=float, default=5.0, help="between two scrapes")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=int, metavar="PORT", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.work is not None:
        sys.exit(work(options.work))

    with serving(options.server, aof=options.aof) as broker:
        server = describe(broker, aof=options.aof)
        rounds, scrape_s = asyncio.run(measure(broker, options))
    found = ratios(rounds) | {
        "calls_us": round(calls_us(options.batch), 2),
        "scrape_ms": round(scrape_s * 1000, 2),
    }
    if options.json:
        print(json.dumps({"server": server, "rounds": options.rounds, **found}, indent=2))
        return
    off = found["without"]
    print(
        f"{server}; {options.rounds} pairs of {options.seconds:g} s, {options.in_flight} in flight, batch "
        f"{options.batch};\nwithout: {off['requests_per_s']:,.0f} req/s, CPU µs a request: worker "
        f"{off['worker']}, producer {off['producer']}, redis {off['redis']}"
    )
    print(f"{'with over without':34} {'median':>7}  {'middle half':>16}  {'90 % sure':>16}")
    for name, label in LABELS.items():
        row = found[name]
        middle, sure = f"{row['p25']:.4f}..{row['p75']:.4f}", f"{row['least']:.4f}..{row['most']:.4f}"
        print(f"{label:34} {row['median']:>7.4f}  {middle:>16}  {sure:>16}")
    everybody = sum(off[part] for part in PARTS)
    calls, scrape_ms = found["calls_us"], found["scrape_ms"]
    scrapes = scrape_ms / 1000 / options.scrape_s
    print(
        f"the calls alone: {calls} µs a request, {calls / off['worker']:.2%} of the worker's and "
        f"{calls / everybody:.2%} of everybody's CPU time;\na scrape: {scrape_ms} ms, every "
        f"{options.scrape_s:g} s {scrapes:.3%} of a core"
    )


if __name__ == "__main__":
    main()
