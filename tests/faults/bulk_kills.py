"""Kills RQ workers, the processes of their jobs, fleet workers and Redis under a bulk job; judges its files.

    python tests/faults/bulk_kills.py [--lines 10000] [--kills 6] [--seed 1] [--appendfsync always]

Each kind is killed so many times, at random moments of the job's progress. Every `custom_id` must be answered
once in output and errors together, with its own answer, and no request may have been started more often than
once and once more for each of its owners that was lost. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

# Run as a script, only its own folder is found.
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.crew import ChaosWorker, Crew, _die_with_parent
from chaos.server import ChaosServer
from command import PROGRAM, descendants, environment
from faults.processes import settings
from faults.scene import QUEUE
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.records import Record
from streamfleet_producer.bulk.answered import id_digest
from streamfleet_producer.bulk.batch import Batch
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.intake import keyed_rid

RQ_WORKERS = 2
FLEET_WORKERS = 3
RQ_LEASE_S = 2
REPLACED_AFTER_S = 0.2
POLL_S = 0.01
LAST_TICK_MS = 1500
"""The last line is a slow one: on a busy machine the job would be over before all are killed."""
LIMIT_S = 600.0

Victim = Literal["rq worker", "job", "fleet worker", "redis"]
VICTIMS: tuple[Victim, ...] = ("rq worker", "job", "fleet worker", "redis")


def prompt(number: int, tick_ms: int = 5) -> str:
    return f"ECHO 3 AS c{number}. TICK {tick_ms}"


def answer(number: int) -> str:
    return f"c{number}.0 c{number}.1 c{number}.2"


@dataclass(slots=True)
class Judged:
    """What a job came to."""

    batch: Batch
    took_s: float
    killed: Counter[Victim]
    lines: Counter[str] = field(default_factory=Counter)
    """How many lines of output and errors each custom_id has."""
    wrong: list[str] = field(default_factory=list)
    """Those whose answer is another's, or an error."""
    attempts: Counter[int] = field(default_factory=Counter)
    beyond: int = 0
    """Requests that were started more often than once, and once more for each owner lost."""
    unknown: int = 0
    """Requests whose record is not there."""

    def faults(self, count: int) -> list[str]:
        """Everything that is not as promised."""
        found = []
        if self.batch.status != "completed":
            found.append(f"the job is {self.batch.status}: {self.batch.error}")
        expected = Counter({f"c{number}": 1 for number in range(count)})
        if self.lines != expected:
            more = [name for name, times in self.lines.items() if times > 1 or name not in expected]
            found.append(f"{len(expected - self.lines)} are missing, {len(more)} too many: {more[:5]}")
        if self.wrong:
            found.append(f"{len(self.wrong)} have another's answer or an error: {self.wrong[:5]}")
        if self.beyond or self.unknown:
            found.append(f"{self.beyond} were started too often, {self.unknown} are unknown")
        counts = self.batch.counts
        if (counts.completed, counts.failed, counts.total) != (count, 0, count):
            found.append(f"the job counts {counts}")
        return found


class RqWorkers:
    """Processes of `streamfleet bulk worker`, replaced when they end; an async context manager."""

    def __init__(self, url: str, folder: Path, count: int = RQ_WORKERS) -> None:
        self._command = [*PROGRAM, "bulk", "worker", "--folder", str(folder), "--lease", str(RQ_LEASE_S)]
        self._env = environment(STREAMFLEET_REDIS_URL=url)
        self._log = (folder / "rq.log").open("ab")
        self._posts = [self._start() for _ in range(count)]
        self._keeping: list[asyncio.Task[None]] = []
        self.replaced = 0

    async def __aenter__(self) -> Self:
        self._keeping = [asyncio.create_task(self._keep(post)) for post in range(len(self._posts))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for process in self._posts:
            process.kill()
            process.wait()
        self._log.close()

    def pids(self) -> list[int]:
        """Those that run."""
        return [process.pid for process in self._posts if process.poll() is None]

    def kill_busy(self, *, job_alone: bool) -> bool:
        """SIGKILL the worker that runs a job, or the job's own process; False if none does now."""
        for process in self._posts:
            jobs = descendants(process.pid) if process.poll() is None else {}
            for job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job if job_alone else process.pid, signal.SIGKILL)
                    return True
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )

    async def _keep(self, post: int) -> None:
        while True:
            while self._posts[post].poll() is None:  # noqa: ASYNC110 (a process has no event for us)
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(REPLACED_AFTER_S)
            self.replaced += 1
            self._posts[post] = self._start()


class BulkKills:
    """One job of `count` lines, and whom to kill, `kills` times each kind; `run` it once."""

    def __init__(
        self,
        count: int,
        kills: int,
        *,
        victims: Sequence[Victim] = VICTIMS,
        seed: int = 1,
        appendfsync: str = "always",
        folder: Path,
    ) -> None:
        self._count = count
        self._victims = victims
        self._random = random.Random(seed)
        self._plan = self._planned(kills)
        self._flags = ("--appendfsync", appendfsync)
        self._folder = folder
        self.killed: Counter[Victim] = Counter()

    async def run(self) -> Judged:
        self._write_input()
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(ChaosServer(flags=self._flags))
            connections = Connections.open(server.url)
            stack.push_async_callback(connections.close)
            broker = Broker(connections, QUEUE)
            crew = Crew([server.url] * FLEET_WORKERS, settings(), _noted)
            rq = await stack.enter_async_context(RqWorkers(server.url, self._folder))
            await stack.enter_async_context(crew)
            batches = stack.enter_context(Batches(server.url, lease_s=RQ_LEASE_S))
            began = time.monotonic()
            batch = await asyncio.to_thread(
                batches.create,
                self._path("in"),
                self._path("out"),
                self._path("err"),
                fleet_queue=QUEUE,
                window=64,
            )
            async with asyncio.timeout(LIMIT_S):
                await self._kill(server, crew, rq, batches, batch.id)
                batch = await self._ended(batches, batch.id)
            judged = Judged(batch, time.monotonic() - began, self.killed)
            self._judge_files(judged)
            await self._judge_records(judged, broker)
        return judged

    # --- whom to kill, and when

    def _planned(self, kills: int) -> list[tuple[int, Victim]]:
        """After how many written lines whom."""
        victims = [victim for victim in self._victims for _ in range(kills)]
        self._random.shuffle(victims)
        moments = sorted(self._random.randrange(self._count * 9 // 10) for _ in victims)
        return list(zip(moments, victims, strict=True))

    async def _kill(
        self,
        server: ChaosServer,
        crew: Crew,
        rq: RqWorkers,
        batches: Batches,
        id: str,  # noqa: A002
    ) -> None:
        for lines, victim in self._plan:
            while self._written() < lines:  # noqa: ASYNC110 (files and processes have no event for us)
                await asyncio.sleep(POLL_S)
            while not await self._hit(victim, server, crew, rq):
                # Nobody will run it any more: to wait for that would be to wait for ever.
                if (await asyncio.to_thread(batches.get, id)).is_over:
                    raise AssertionError(f"the job was over before its {victim} was killed: {self.killed}")
                await asyncio.sleep(POLL_S)
            self.killed[victim] += 1

    async def _hit(self, victim: Victim, server: ChaosServer, crew: Crew, rq: RqWorkers) -> bool:
        match victim:
            case "rq worker" | "job":
                return rq.kill_busy(job_alone=victim == "job")
            case "fleet worker":
                workers: Sequence[ChaosWorker] = crew.workers
                if workers:
                    self._random.choice(workers).kill()
                return bool(workers)
            case "redis":
                await server.kill()
                await asyncio.sleep(self._random.random() / 2)
                await server.start()
                return True

    def _written(self) -> int:
        try:
            return self._path("out").read_bytes().count(b"\n")
        except OSError:
            return 0

    # --- its end, and what it came to

    async def _ended(self, batches: Batches, id: str) -> Batch:  # noqa: A002
        while not (batch := await asyncio.to_thread(batches.get, id)).is_over:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S * 10)
        return batch

    def _judge_files(self, judged: Judged) -> None:
        for kind in ("out", "err"):
            for raw in self._path(kind).read_text().splitlines():
                line: dict[str, Any] = json.loads(raw)
                name = str(line["custom_id"])
                judged.lines[name] += 1
                told = line.get("answer", {}).get("choices", [{}])[0].get("text")
                if told != answer(int(name[1:])):
                    judged.wrong.append(raw[:300])

    async def _judge_records(self, judged: Judged, broker: Broker) -> None:
        names = [f"c{number}" for number in range(self._count)]
        rids = [keyed_rid(b"default", f"{judged.batch.id}:{id_digest(name).hex()}") for name in names]
        records: list[Record | None] = []
        for start in range(0, len(rids), 500):
            records += await broker.status(rids[start : start + 500], "default")
        for record in records:
            if record is None:
                judged.unknown += 1
                continue
            judged.attempts[record.attempts] += 1
            judged.beyond += record.attempts > 1 + record.crashes

    def _write_input(self) -> None:
        with self._path("in").open("w") as file:
            for number in range(self._count):
                tick = LAST_TICK_MS if number == self._count - 1 else 5
                request = {"kind": "generate", "prompt": prompt(number, tick), "max_tokens": 8}
                file.write(json.dumps({"custom_id": f"c{number}", "request": request}) + "\n")

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}.jsonl"


async def _noted(_: ChaosWorker) -> None:
    """What a dead worker held is found by its lease alone."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=6, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--appendfsync", choices=("always", "everysec", "no"), default="always")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kills = BulkKills(
            asked.lines, asked.kills, seed=asked.seed, appendfsync=asked.appendfsync, folder=Path(folder)
        )
        judged = asyncio.run(kills.run())
        faults = judged.faults(asked.lines)
        log = (Path(folder) / "rq.log").read_text(errors="replace")
    killed = ", ".join(f"{count} x {victim}" for victim, count in sorted(judged.killed.items()))
    sys.stdout.write(
        f"{asked.lines} lines in {judged.took_s:.1f} s, {judged.batch.runs} runs, killed {killed}; "
        f"starts of a request: {dict(sorted(judged.attempts.items()))}\n"
    )
    for fault in faults:
        sys.stdout.write(f"FAULT: {fault}\n")
    if faults:
        sys.stdout.write(log[-4000:])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
