"""What the fleet itself costs: requests and results through Redis with a no-op engine, beside job queues.

    python tests/bench/fleet.py [--rounds 3] [--seconds 5] [--aof] [--server redis-server] [--json]
    python tests/bench/fleet.py --only streamfleet --only taskiq
    python tests/bench/fleet.py --records runs && streamfleet report runs/streamfleet.jsonl runs/taskiq.jsonl

One server, one worker process, one producer process, 200 characters each way, the result in the producer's
hands. All systems run against the same server, one after the other, several rounds in turn; the ratio counts,
not the absolute figures, since machines differ and are shared. `alone` is the round trip with one request in
flight, `crowded` the latency with 256. How each peer is set, its `*_noop.py` says. What they do for it
differs: we admit, fence, batch and push; none of them does all of that, and none refuses when full.
`others` are the cores that everything else on the machine took meanwhile: a row with much of it says little,
so it is measured up to four times, and the quietest shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

import recorded
import streamfleet_noop
from load import Load
from peers import PEERS
from server import add_options, describe, process, serving
from streamfleet_common.embedded import EmbeddedBroker

HERE = Path(__file__).parent
OURS = "streamfleet"
TRIES = 4


def one(
    name: str, broker: EmbeddedBroker, options: argparse.Namespace, records: Path | None = None
) -> dict[str, Any]:
    """One round of one system on an empty server; the times of its requests go to `records`.

    Raises:
        CalledProcessError: its producer failed; what it said is on the standard error.
    """
    with redis.Redis.from_url(broker.url) as client:
        client.flushall()
    if name == OURS:
        work, environment = streamfleet_noop.worker(broker.url, options.batch)
        produce = [sys.executable, str(HERE / "streamfleet_noop.py")]
    else:
        peer = PEERS[name]
        work, environment = [str(peer.python), *peer.work], peer.environment
        produce = [str(peer.python), str(peer.producer)]
    environment = {**environment, "BENCH_URL": broker.url}
    with process(work, environment, HERE) as worker:
        load = Load(
            url=broker.url,
            seconds=options.seconds,
            in_flight=options.in_flight,
            trips=options.trips,
            worker_pid=worker.pid,
            server_pid=broker.pid,
            records="" if records is None else str(records.resolve()),
        )
        answer = subprocess.run(
            produce,
            env={**os.environ, **environment, "BENCH_LOAD": json.dumps(asdict(load))},
            cwd=HERE,
            stdout=subprocess.PIPE,
            timeout=120 + 10 * options.seconds,
            check=True,
        )
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def quietest(name: str, broker: EmbeddedBroker, options: argparse.Namespace) -> dict[str, Any]:
    """A round that others on the machine left alone, or of `TRIES` the one that they disturbed least."""
    with tempfile.TemporaryDirectory() as folder:
        last, kept = Path(folder, "last"), Path(folder, "kept")
        best: dict[str, Any] | None = None
        for _ in range(TRIES):
            row = one(name, broker, options, None if options.records is None else last)
            if best is None or row["others_cores"] < best["others_cores"]:
                best = row
                if options.records is not None:
                    last.replace(kept)
            if best["others_cores"] <= options.quiet:
                break
        assert best is not None
        if options.records is not None:
            settings = {
                "server": describe(broker, aof=options.aof),
                "requests": "200 characters each way",
                "crowded": f"{options.in_flight} in flight for {options.seconds:g} s",
                "alone": f"{options.trips}, one after the other",
                "others on the machine": f"{best['others_cores']} cores",
            }
            with kept.open("rb") as lines:
                recorded.write(options.records, name, lines, settings)
    return best


def ratios(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each round, against its best peers: our requests per second, and our CPU time a request."""
    found = []
    for round_ in rounds:
        peers = {name: row for name, row in round_.items() if name != OURS}
        if OURS not in round_ or not peers:
            continue
        ours = round_[OURS]
        fastest = max(peers, key=lambda name: int(peers[name]["requests_per_s"]))
        thriftiest = min(peers, key=lambda name: _cpu(peers[name]))
        found.append(
            {
                "fastest_peer": fastest,
                "requests_per_s": round(ours["requests_per_s"] / peers[fastest]["requests_per_s"], 2),
                "thriftiest_peer": thriftiest,
                "cpu": round(_cpu(ours) / _cpu(peers[thriftiest]), 2),
                "others_cores": max(row["others_cores"] for row in round_.values()),
            }
        )
    return found


def _cpu(row: dict[str, Any]) -> float:
    return float(sum(row["cpu_us"].values()))


HEAD = (
    f"{'':12} {'':>8} {'alone, ms':>19} {'crowded, ms':>19}   {'CPU µs a request':>35}   {'others,':>7}\n"
    f"{'':12} {'req/s':>8} {'p50':>9} {'p99':>9} {'p50':>9} {'p99':>9}   "
    f"{'producer':>8} {'worker':>8} {'redis':>8} {'sum':>8}   {'cores':>7}"
)


def table(name: str, row: dict[str, Any]) -> str:
    """A line of figures."""
    times = " ".join(f"{row[part][cut]:>9}" for part in ("alone", "crowded") for cut in ("p50_ms", "p99_ms"))
    parts = " ".join(f"{row['cpu_us'][part]:>8}" for part in ("producer", "worker", "redis"))
    figures = f"{row['requests_per_s']:>8,} {times}   {parts} {_cpu(row):>8.1f}"
    return f"{name:12} {figures}   {row['others_cores']:>7}"


def main() -> None:
    """Run the rounds and print them."""
    parser = argparse.ArgumentParser(description="Requests per second and round trip with a no-op engine.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each system in each round")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--trips", type=int, default=300, help="requests with nothing else in flight")
    parser.add_argument("--batch", type=int, default=32, help="max_batch_size of our worker")
    parser.add_argument(
        "--quiet", type=float, default=0.25, metavar="CORES", help="a row with more for others is repeated"
    )
    parser.add_argument("--only", action="append", choices=[OURS, *PEERS], help="may be repeated")
    parser.add_argument("--json", action="store_true")
    recorded.add_option(parser)
    add_options(parser)
    options = parser.parse_args()

    names = options.only or [OURS, *PEERS]
    for name in names:
        if name != OURS:
            PEERS[name].prepare()

    rounds: list[dict[str, Any]] = []
    with serving(options.server, aof=options.aof) as broker:
        server = describe(broker, aof=options.aof)
        if not options.json:
            print(
                f"{server}; {options.in_flight} in flight, batch {options.batch}, {options.seconds:g} s each"
            )
            print(HEAD)
        for _ in range(options.rounds):
            rounds.append({})
            for name in names:
                rounds[-1][name] = quietest(name, broker, options)
                if not options.json:
                    print(table(name, rounds[-1][name]), flush=True)
    best = ratios(rounds)
    if options.json:
        print(json.dumps({"server": server, "rounds": rounds, "against_best_peers": best}, indent=2))
    else:
        for found in best:
            print(
                f"against the best peer of a round: {found['requests_per_s']} times the requests per second "
                f"({found['fastest_peer']}), {found['cpu']} times the CPU time ({found['thriftiest_peer']}); "
                f"others took up to {found['others_cores']} cores"
            )


if __name__ == "__main__":
    main()
