"""What the flight record costs: the batch in each answer, and the notes of who shared one.

    python tests/bench/flight_cost.py [--rounds 100] [--seconds 1] [--part notes] [--part answers] [--json]

Measured as `metrics_cost.py` does: one worker with the no-op engine that tells of its batches and does not in
turn, under the load of `fleet.py`, window by window. Notes are told ten times as often here as by a real
worker, a tenth of them at a time, so that none is told in the next window: their cost is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any

import metrics_cost
from server import add_options, describe, serving
from streamfleet_worker import launch_log
from streamfleet_worker import worker as workers

PARTS = ("notes", "answers")
VARIABLE = "BENCH_FLIGHT_PARTS"
OF = launch_log.Batches.of


class SwitchedWorker(workers.Worker):
    """A worker that tells of its batches, or does not, by a signal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._told: Any = self._launch_log
        self._parts = os.environ[VARIABLE].split()
        signal.signal(metrics_cost.COUNT, lambda *_: self._switch(tells=True))
        signal.signal(metrics_cost.DO_NOT, lambda *_: self._switch(tells=False))

    def _switch(self, *, tells: bool) -> None:
        if "notes" in self._parts:
            nothing: Any = metrics_cost.Nothing()
            self._launch_log = self._told if tells else nothing
        if "answers" in self._parts:
            of: Any = OF if tells else lambda *_: None
            setattr(launch_log.Batches, "of", of)  # noqa: B010 (of a class: for mypy)


def work(port: int) -> int:
    """Be the worker."""
    program = import_module("streamfleet_worker.process")
    vars(program)["Worker"] = SwitchedWorker
    launch_log.ROUND_S /= 10
    launch_log.MOST_A_ROUND //= 10
    os.environ["STREAMFLEET_HTTP_PORT"] = str(port)
    return int(program.main())


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a window")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=int, metavar="PORT", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.work is not None:
        sys.exit(work(options.work))

    os.environ[VARIABLE] = " ".join(options.part or PARTS)
    options.scrape_s = float("inf")
    with serving(options.server, aof=options.aof) as broker:
        server = describe(broker, aof=options.aof)
        rounds, _ = asyncio.run(metrics_cost.measure(broker, options))
    found = metrics_cost.ratios(rounds)
    for part in metrics_cost.PARTS:
        found[part] = metrics_cost.spread([pair["with"][part] - pair["without"][part] for pair in rounds])
    if options.json:
        print(json.dumps({"server": server, "rounds": options.rounds, **found}, indent=2))
        return
    off = found["without"]
    print(
        f"{os.environ[VARIABLE]}; {server}; {options.rounds} pairs of {options.seconds:g} s; without: "
        f"{off['requests_per_s']:,.0f} req/s, CPU µs a request: worker {off['worker']}, producer "
        f"{off['producer']}, redis {off['redis']}"
    )
    for part in metrics_cost.PARTS:
        row = found[part]
        print(f"{part:34} {row['median']:+.2f} µs a request, 90 % sure {row['least']}..{row['most']}")
    for name, label in metrics_cost.LABELS.items():
        row = found[name]
        print(f"{label:34} {row['median']:.4f} with over without, 90 % sure {row['least']}..{row['most']}")


if __name__ == "__main__":
    metrics_cost.__file__ = __file__  # it starts the very file that it is in
    main()
