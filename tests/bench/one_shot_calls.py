"""The part of `one_shot.py` about handlers: a no-op one and one of 5 ms a batch, served by each system.

Peers are loaded over HTTP by wrk, in C and with connections kept open, so that it is never what holds them
up; ours by one process with the asynchronous client. Everything runs on this machine and shares its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import streamfleet_calls
from load import Load, busy_us, cpu_us
from one_shot_handlers import ITEM, SLEEP_S, Serving
from peers import SERVERS
from server import process, serving

HERE = Path(__file__).parent
OURS = "streamfleet"
SYSTEMS = (OURS, *SERVERS)
START_LIMIT_S = 120.0
WARM_UP_S = 2.0
TRIPS = 3
"""With one request in flight, before what is measured."""

Row = dict[str, Any]


def measure(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of all systems and handlers, in turn."""
    for name in names:
        if name != OURS:
            SERVERS[name].prepare()
    if set(names) - {OURS} and shutil.which("wrk") is None:
        raise SystemExit("wrk is missing, which loads the peers: apt-get install wrk")
    rounds: list[dict[str, dict[str, dict[str, Row]]]] = []
    for round_ in range(options.rounds):
        rounds.append({handler: {} for handler in options.handlers})
        for handler in options.handlers:
            for name in names:
                rows = (ours if name == OURS else theirs)(name, handler, options)
                rounds[-1][handler][name] = rows
                rates = ", ".join(f"{row['requests_per_s']:,.0f}" for row in rows.values())
                print(
                    f"round {round_ + 1}: {handler}: {name} {rates} requests/s", file=sys.stderr, flush=True
                )
    return {"rounds": rounds, "summary": summary(rounds, names, options)}


def ours(name: str, handler: str, options: argparse.Namespace) -> dict[str, Row]:
    """A round of ours: a server, a worker, and a client for each number of requests in flight."""
    asked = Serving(handler, 0, options.handler_batch, options.delay_ms)
    found = {}
    with serving(options.server, aof=options.aof) as broker:
        command, environment = streamfleet_calls.worker(broker.url, asked)
        with process(command, environment, HERE) as worker:
            for in_flight in options.in_flight:
                load = Load(
                    url=broker.url,
                    seconds=options.seconds,
                    in_flight=in_flight,
                    trips=TRIPS,
                    worker_pid=worker.pid,
                    server_pid=broker.pid,
                )
                answer = subprocess.run(
                    [sys.executable, str(HERE / "streamfleet_calls.py")],
                    env={**os.environ, "BENCH_LOAD": json.dumps(asdict(load))},
                    cwd=HERE,
                    stdout=subprocess.PIPE,
                    timeout=START_LIMIT_S + 10 * options.seconds,
                    check=True,
                )
                told = json.loads(answer.stdout)
                row = {key: told[key] for key in ("requests_per_s", "others_cores", "cpu_us")}
                found[str(in_flight)] = row | told["crowded"]
    return found


def theirs(name: str, handler: str, options: argparse.Namespace) -> dict[str, Row]:
    """A round of a peer."""
    asked = Serving(handler, free_ports(), options.handler_batch, options.delay_ms)
    url = f"http://127.0.0.1:{asked.port}/predict"
    with process(SERVERS[name].command, asked.environment(), HERE) as server:
        wait_for(name, url, server)
        wrk(url, max(options.in_flight), WARM_UP_S, server.pid)
        return {str(n): wrk(url, n, options.seconds, server.pid) for n in options.in_flight}


def free_ports() -> int:
    """The first of two in a row that nobody listens on."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def wait_for(name: str, url: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers, and rightly.

    Raises:
        SystemExit: it ends, does not answer in time, or gives another answer.
    """
    request = urllib.request.Request(url, json.dumps(ITEM).encode(), {"Content-Type": "application/json"})
    until = time.monotonic() + START_LIMIT_S
    answer = None
    while answer is None:
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                answer = json.loads(response.read())
        except (OSError, urllib.error.URLError) as error:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{name} does not serve: {error}") from error
            time.sleep(0.1)
    if answer != ITEM:
        raise SystemExit(f"{name} gives another answer than was asked for: {answer!r}")


def wrk(url: str, in_flight: int, seconds: float, server_pid: int) -> Row:
    """One load, from as many connections as requests are in flight.

    Raises:
        SystemExit: some requests were not answered.
    """
    before = {"client": _client_us(), "server": cpu_us(server_pid)}
    busy = busy_us()
    done = subprocess.run(
        ["wrk", "-t1", f"-c{in_flight}", f"-d{seconds:g}s", "-s", str(HERE / "one_shot.lua"), url],
        env={**os.environ, "BENCH_BODY": json.dumps(ITEM)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    used = {"client": _client_us() - before["client"], "server": cpu_us(server_pid) - before["server"]}
    others = busy_us() - busy - sum(used.values())
    told = json.loads(done.stdout.splitlines()[-1])
    if told["wrong"]:
        raise SystemExit(f"of {told['requests']} requests to {url}, {told['wrong']} failed")
    return {
        "requests_per_s": told["requests"] / told["seconds"],
        "p50_ms": told["p50_ms"],
        "p99_ms": told["p99_ms"],
        "cpu_us": {part: us / told["requests"] for part, us in used.items()},
        "others_cores": max(0.0, others / told["seconds"] / 1e6),
    }


def _client_us() -> float:
    """CPU time of the loads that have ended; the servers have not, meanwhile."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e6


# --- what is shown


def summary(rounds: list[Any], names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the rounds, by handler, requests in flight and system; ratios are ours by the system's."""

    def row(handler: str, in_flight: str, name: str) -> Row:
        rows = [round_[handler][name][in_flight] for round_ in rounds]
        found = {
            key: statistics.median(row[key] for row in rows)
            for key in ("requests_per_s", "p50_ms", "p99_ms", "others_cores")
        }
        cpu_us = {part: statistics.median(row["cpu_us"][part] for row in rows) for part in rows[0]["cpu_us"]}
        if name == OURS or OURS not in names:
            return {**found, "cpu_us": cpu_us}
        mine = [round_[handler][OURS][in_flight] for round_ in rounds]
        ratio = {
            key: statistics.median(a[key] / b[key] for a, b in zip(mine, rows, strict=True))
            for key in ("requests_per_s", "p99_ms")
        }
        return {**found, "cpu_us": cpu_us, "ratio": ratio}

    return {
        handler: {
            in_flight: {name: row(handler, in_flight, name) for name in names}
            for in_flight in map(str, options.in_flight)
        }
        for handler in options.handlers
    }


HEAD = (
    f"{'':11} {'in':>6} {'':>7} {'latency, ms':>15} {'of its':>7}  {'CPU µs a request':>18} {'others':>7}"
    f"  {'ours by it':^13}\n"
    f"{'':11} {'flight':>6} {'req/s':>7} {'p50':>7} {'p99':>7} {'ceiling':>7}  {'client':>8} {'all':>9}"
    f" {'cores':>7}  {'req/s':>6} {'p99':>6}"
)


def line(name: str, in_flight: str, row: Row, ceiling: float | None) -> str:
    """A row of the table."""
    of_it = f"{row['requests_per_s'] / ceiling:.2f}" if ceiling else ""
    used = row["cpu_us"]
    client = used.get("client", used.get("producer"))
    ratio = row.get("ratio")
    ratios = f"{ratio['requests_per_s']:6.2f} {ratio['p99_ms']:6.2f}" if ratio else ""
    return (
        f"{name:11} {in_flight:>6} {row['requests_per_s']:7,.0f} {row['p50_ms']:7.1f} {row['p99_ms']:7.1f}"
        f" {of_it:>7}  {client:8.1f} {sum(used.values()):9.1f} {row['others_cores']:7.2f}  {ratios}".rstrip()
    )


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    """A table for each handler."""
    for handler, loads in found["summary"].items():
        takes_s = SLEEP_S if handler == "sleep" else None
        what = "that takes 5 ms a batch" if takes_s else "that does nothing"
        print(
            f"\na handler {what}: batches of {options.handler_batch}, delay {options.delay_ms} ms, "
            f"{options.seconds:g} s each, medians of {options.rounds} round(s)\n{HEAD}"
        )
        for in_flight, rows in loads.items():
            # A lone request is all that its batch can hold.
            rows_of_a_batch = min(int(in_flight), options.handler_batch)
            ceiling = rows_of_a_batch / takes_s if takes_s else None
            for name, row in rows.items():
                print(line(name, in_flight, row, ceiling))
