"""What the HTTP gateway adds to the bare client, and how many requests one core of it carries.

    python tests/bench/gateway.py [--rounds 3] [--seconds 5] [--in-flight 64] [--tokens 8] [--json]

One server, one worker with the scripted engine, whose answers are `--tokens` tokens, one a step; the same
requests by the asynchronous client and through the gateway, which wrk loads. `alone` is the time of a request
with nothing else in flight, to the last byte of its answer. The gateway has one core to itself, everything
else shares the others (where there are at least two); `per core` is how many requests it would answer in a
second of its own CPU time, which says the same on a machine that is shared.

`--records FOLDER` measures each once more with callers in Python, who tell the times of single requests for
`streamfleet report`; their own cost counts, so these are later than wrk's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recorded
from gateway_client import QUEUE
from load import Load, busy_us, cpu_us
from server import add_options, describe, process, serving
from streamfleet_common.embedded import EmbeddedBroker

HERE = Path(__file__).parent
LIMIT_S = 60.0
ROUTES = ("/v1/completions", "/v1/chat/completions")

Row = dict[str, Any]


def pinned(command: list[str], *, alone: bool) -> list[str]:
    """The command on the first core, or on all others; as it is where there is one core only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or shutil.which("taskset") is None:
        return command
    some = cores[:1] if alone else cores[1:]
    return ["taskset", "-c", ",".join(map(str, some)), *command]


class Scene:
    """A server, a worker and a gateway, and what is asked of them."""

    def __init__(self, broker: EmbeddedBroker, options: argparse.Namespace) -> None:
        self._broker = broker
        self._options = options
        self._prompt = f"ECHO {options.tokens}"
        self.text = " ".join(f"tok{n}" for n in range(options.tokens))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def worker(self) -> tuple[list[str], dict[str, str]]:
        """Its command and settings."""
        command = pinned([sys.executable, "-m", "streamfleet_worker"], alone=False)
        return command, {
            "STREAMFLEET_REDIS_URL": self._broker.url,
            "STREAMFLEET_QUEUE": QUEUE,
            "STREAMFLEET_ENGINE": "scripted",
            "STREAMFLEET_MAX_DELAY_MS": "0",
            "STREAMFLEET_MAX_BATCH_SIZE": "64",
            "STREAMFLEET_MAX_QUEUE_DEPTH": "100000",
            "STREAMFLEET_LOG_LEVEL": "error",
        }

    def gateway(self) -> tuple[list[str], dict[str, str]]:
        """Its command and settings."""
        command = pinned([sys.executable, "-m", "streamfleet_producer.gateway"], alone=True)
        return command, {
            "STREAMFLEET_REDIS_URL": self._broker.url,
            "STREAMFLEET_GATEWAY_PORT": str(self.port),
            "STREAMFLEET_LOG_LEVEL": "error",
        }

    def body(self, route: str, *, streams: bool) -> str:
        """A request's body."""
        asked: dict[str, Any] = {"model": QUEUE, "temperature": 0, "stream": streams, "max_tokens": 512}
        if route == "/v1/completions":
            asked["prompt"] = self._prompt
        else:
            asked["messages"] = [{"role": "user", "content": self._prompt}]
        return json.dumps(asked)

    def wanted(self, *, streams: bool) -> str:
        """What each right answer holds: its last token."""
        last = f"tok{self._options.tokens - 1}"
        return f'{last}"' if not streams else last

    def load(self, worker: subprocess.Popen[bytes], records: Path | None = None) -> Load:
        """What callers in Python do; `records` takes the times of their requests."""
        return Load(
            url=self._broker.url,
            seconds=self._options.seconds,
            in_flight=self._options.in_flight,
            trips=self._options.trips,
            worker_pid=worker.pid,
            server_pid=self._broker.pid,
            records="" if records is None else str(records),
        )

    def bare(self, *, streams: bool, worker: subprocess.Popen[bytes], records: Path | None = None) -> Row:
        """The client without a gateway."""
        load = self.load(worker, records)
        script = [sys.executable, str(HERE / "gateway_client.py"), "stream" if streams else "run"]
        answer = subprocess.run(
            pinned(script, alone=True),
            env={
                **os.environ,
                "BENCH_LOAD": json.dumps(asdict(load)),
                "BENCH_REQUEST": json.dumps({"prompt": self._prompt, "max_tokens": 512}),
                "BENCH_WANTED": self.text,
            },
            cwd=HERE,
            stdout=subprocess.PIPE,
            timeout=LIMIT_S + 10 * self._options.seconds,
            check=True,
        )
        told = json.loads(answer.stdout)
        return {
            "alone_p50_ms": told["alone"]["p50_ms"],
            "requests_per_s": told["requests_per_s"],
            **told["crowded"],
            "cpu_us": told["cpu_us"]["producer"],
            "others_cores": told["others_cores"],
        }

    def through(self, route: str, *, streams: bool, gateway: subprocess.Popen[bytes]) -> Row:
        """The gateway, loaded by wrk."""
        seconds = self._options.seconds
        self._wrk(route, streams, 8, 1.0)
        alone = self._wrk(route, streams, 1, max(2.0, seconds / 2))
        before, busy = cpu_us(gateway.pid), busy_us()
        crowded = self._wrk(route, streams, self._options.in_flight, seconds)
        used = cpu_us(gateway.pid) - before
        return {
            "alone_p50_ms": alone["p50_ms"],
            "requests_per_s": round(crowded["requests"] / crowded["seconds"]),
            "p50_ms": crowded["p50_ms"],
            "p99_ms": crowded["p99_ms"],
            "cpu_us": round(used / crowded["requests"], 1),
            "machine_cores": round((busy_us() - busy) / 1e6 / crowded["seconds"], 2),
        }

    def recorded(self, folder: Path, worker: subprocess.Popen[bytes], server: str) -> None:
        """Measure each once more, request by request, and leave a file for each in `folder`."""
        settings = {
            "server": server,
            "tokens of an answer": self._options.tokens,
            "crowded": f"{self._options.in_flight} in flight for {self._options.seconds:g} s",
            "alone": f"{self._options.trips}, one after the other",
        }
        with tempfile.TemporaryDirectory() as temporary:
            lines = Path(temporary, "lines")
            for streams in (True, False):
                how = "stream" if streams else "whole"
                self.bare(streams=streams, worker=worker, records=lines)
                self._keep(folder, f"client-{how}", lines, settings)
                for route in ROUTES:
                    self._call(route, streams, self.load(worker, lines))
                    name = route.removeprefix("/v1/").replace("/", "-")
                    self._keep(folder, f"{name}-{how}", lines, settings)

    def _keep(self, folder: Path, name: str, lines: Path, settings: dict[str, object]) -> None:
        with lines.open("rb") as found:
            recorded.write(folder, name, found, settings)

    def _call(self, route: str, streams: bool, load: Load) -> None:
        subprocess.run(
            pinned([sys.executable, str(HERE / "gateway_caller.py")], alone=False),
            env={
                **os.environ,
                "BENCH_LOAD": json.dumps(asdict(load)),
                "BENCH_URL": self.url + route,
                "BENCH_BODY": self.body(route, streams=streams),
                "BENCH_WANTED": self.wanted(streams=streams),
            },
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S + 10 * self._options.seconds,
            check=True,
        )

    def _wrk(self, route: str, streams: bool, connections: int, seconds: float) -> Row:
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s"]
        done = subprocess.run(
            pinned([*command, "-s", str(HERE / "gateway.lua"), self.url + route], alone=False),
            env={
                **os.environ,
                "BENCH_BODY": self.body(route, streams=streams),
                "BENCH_WANTED": self.wanted(streams=streams),
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S + seconds,
            check=True,
        )
        told: Row = json.loads(done.stdout.splitlines()[-1])
        if told["wrong"] or not told["requests"]:
            raise SystemExit(f"of {told['requests']} requests to {route}, {told['wrong']} failed")
        return told

    def wait(self) -> None:
        """Until the worker answers through the gateway, and rightly.

        Raises:
            SystemExit: it does not in time.
        """
        until = time.monotonic() + LIMIT_S
        body = self.body("/v1/completions", streams=False).encode()
        headers = {"Content-Type": "application/json"}
        while time.monotonic() < until:
            try:
                asked = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
                with urllib.request.urlopen(asked, timeout=10) as response:
                    if json.loads(response.read())["choices"][0]["text"] == self.text:
                        return
            except (OSError, urllib.error.URLError):
                time.sleep(0.1)
        raise SystemExit("the gateway does not answer as it should")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, in turn, and their medians."""
    with serving(options.server, aof=False) as broker:
        scene = Scene(broker, options)
        command, settings = scene.worker()
        rounds: list[dict[str, Row]] = []
        with process(command, settings, HERE) as worker:
            command, settings = scene.gateway()
            with process(command, settings, HERE) as gateway:
                scene.wait()
                for _ in range(options.rounds):
                    round_: dict[str, Row] = {}
                    for streams in (True, False):
                        how = "stream" if streams else "whole"
                        round_[f"client, {how}"] = scene.bare(streams=streams, worker=worker)
                        for route in ROUTES:
                            row = scene.through(route, streams=streams, gateway=gateway)
                            row["added_p50_ms"] = round(
                                row["alone_p50_ms"] - round_[f"client, {how}"]["alone_p50_ms"], 2
                            )
                            round_[f"{route}, {how}"] = row
                    rounds.append(round_)
                if options.records is not None:
                    scene.recorded(options.records, worker, describe(broker, aof=False))
        return {"server": describe(broker, aof=False), "rounds": rounds, "medians": _medians(rounds)}


def _medians(rounds: list[dict[str, Row]]) -> dict[str, Row]:
    return {
        name: {key: statistics.median(round_[name][key] for round_ in rounds) for key in rounds[0][name]}
        for name in rounds[0]
    }


HEAD = (
    f"{'':29} {'alone p50':>10} {'added':>7} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'CPU µs':>8} "
    f"{'per core':>9}"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The gateway beside the bare client.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument(
        "--trips", type=int, default=300, help="of the bare client with nothing else in flight"
    )
    parser.add_argument("--json", action="store_true")
    recorded.add_option(parser)
    add_options(parser, aof=False)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing, which loads the gateway: apt-get install wrk")
    found = measure(options)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['server']}; {options.tokens} tokens, {options.in_flight} in flight, {options.seconds:g} s "
        f"each, medians of {options.rounds}\n{HEAD}"
    )
    for name, row in found["medians"].items():
        added = f"{row['added_p50_ms']:.2f}" if "added_p50_ms" in row else ""
        crowded = f"{row['requests_per_s']:8,.0f} {row['p50_ms']:8.1f} {row['p99_ms']:8.1f}"
        per_core = f"{row['cpu_us']:8.0f} {1e6 / row['cpu_us']:9,.0f}"
        print(f"{name:29} {row['alone_p50_ms']:10.2f} {added:>7} {crowded} {per_core}")


if __name__ == "__main__":
    main()
