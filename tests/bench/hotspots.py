"""Where the time of one request goes: CPU of producer, worker and server, by part.

    python tests/bench/hotspots.py [--seconds 10] [--top 20] [--server redis-server] [--aof] [--json]
    python tests/bench/hotspots.py --handler --batch 16

The load is that of `fleet.py`, or with `--handler` that of the no-op handler of `one_shot.py`. Producer and
worker look at their own stacks (see `sampler.py`); shares of the samples are turned into microseconds a
request with the CPU time that the process used. `package`: whose code ran. `function`: the innermost function
of ours that was being served, libraries below it included. The server's part are its own counts of its
commands, by the wall clock: on a busy machine they hold time in which it did not run, too. The rest of its
CPU time is reading, writing, housekeeping.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import redis

import streamfleet_calls
import streamfleet_noop
from load import Load
from one_shot_handlers import Serving
from sampler import Sampler
from server import add_options, describe, process, serving
from streamfleet_common.embedded import EmbeddedBroker

HERE = Path(__file__).parent
HANDLER_DELAY_MS = 10


def work(path: Path) -> int:
    """Be a worker that samples itself from SIGUSR1 to SIGUSR2, and then writes what it saw."""
    from streamfleet_worker import process as worker_process  # noqa: PLC0415 (the parent needs none of it)

    sampler = Sampler()

    def write(*_: object) -> None:
        sampler.stop()
        path.write_text(json.dumps({"packages": sampler.packages, "functions": sampler.functions}))

    signal.signal(signal.SIGUSR1, lambda *_: sampler.start())
    signal.signal(signal.SIGUSR2, write)
    return worker_process.main()


def load(broker: EmbeddedBroker, options: argparse.Namespace) -> dict[str, Any]:
    """One crowded round; the samples of both sides and the server's counts."""
    system: Any = streamfleet_noop
    _, environment = streamfleet_noop.worker(broker.url, options.batch)
    if options.handler:
        system = streamfleet_calls
        noop = Serving("noop", 0, options.batch, HANDLER_DELAY_MS)
        _, environment = streamfleet_calls.worker(broker.url, noop)
    sampler = Sampler()
    commands: Any = {}
    with tempfile.TemporaryDirectory() as folder, redis.Redis.from_url(broker.url) as client:
        seen = Path(folder, "seen.json")
        with process([sys.executable, __file__, "--work", str(seen)], environment, HERE) as worker:

            def around(begins: bool) -> None:
                nonlocal commands
                if begins:
                    client.config_resetstat()
                    worker.send_signal(signal.SIGUSR1)
                    sampler.start()
                else:
                    sampler.stop()
                    worker.send_signal(signal.SIGUSR2)
                    commands = client.info("commandstats")

            wanted = Load(
                url=broker.url,
                seconds=options.seconds,
                in_flight=options.in_flight,
                trips=10,
                worker_pid=worker.pid,
                server_pid=broker.pid,
            )
            result = asyncio.run(system.produce(wanted, around))
        there = json.loads(seen.read_text())
    return {
        **result,
        "producer": _in_us(sampler.packages, sampler.functions, result["cpu_us"]["producer"]),
        "worker": _in_us(Counter(there["packages"]), Counter(there["functions"]), result["cpu_us"]["worker"]),
        "redis": {
            name.removeprefix("cmdstat_"): round(stat["usec"] / result["requests"], 2)
            for name, stat in sorted(commands.items(), key=lambda pair: -pair[1]["usec"])
        },
    }


def _in_us(packages: Counter[str], functions: Counter[str], cpu_us: float) -> dict[str, Any]:
    """Samples as µs a request, the largest first."""

    def shares(counted: Counter[str]) -> dict[str, float]:
        return {name: round(cpu_us * n / counted.total(), 2) for name, n in counted.most_common()}

    return {"samples": packages.total(), "package": shares(packages), "function": shares(functions)}


def show(found: dict[str, Any], top: int) -> None:
    """The largest of each part."""
    for side in ("producer", "worker"):
        part = found[side]
        print(f"\n{side}: {found['cpu_us'][side]} µs a request, {part['samples']} samples")
        for by in ("package", "function"):
            print(f"  by {by}")
            for name, us in list(part[by].items())[:top]:
                print(f"  {us:>8.1f}  {name}")
    inside = sum(us for name, us in found["redis"].items() if name in ("evalsha", "eval"))
    print(f"\nserver: {found['cpu_us']['redis']} µs a request, {inside:.1f} of them inside the scripts")
    for name, us in list(found["redis"].items())[:top]:
        print(f"  {us:>8.2f}  {name}")


def main() -> int:
    """Profile one round and print it."""
    parser = argparse.ArgumentParser(description="Where the time of one request goes.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="max_batch_size of the worker")
    parser.add_argument("--handler", action="store_true", help="call a no-op handler, as `one_shot.py` does")
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.work is not None:
        return work(options.work)
    with serving(options.server, aof=options.aof) as broker:
        server = describe(broker, aof=options.aof)
        found = {"server": server, **load(broker, options)}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{server}; {found['requests_per_s']:,} requests/s while being sampled")
        show(found, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
