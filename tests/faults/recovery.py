"""Kills workers that run 24 requests each, and measures when others begin these requests anew.

    python tests/faults/recovery.py [--rounds 20] [--lease-s 2] [--supervised]

The line has p50, p99 and the longest time from the kill to the next start, on the server's clock, and the
bound N = L + 1.3 S. The exit status is 1 if a start came later than N, or a request was not done in company.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# Run as a script, only its own folder is found.
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.crew import ChaosWorker
from faults.figures import keep
from faults.load import ended
from faults.processes import Fleet, settings
from faults.scene import until
from hired import submit
from streamfleet_common.records import Record
from streamfleet_worker.worker import SWEEPS

WORKERS = 3
RUNNING = 24
SUPERVISED_MS = 1000
SLACK_MS = 500
"""How late a sweep may be on a machine that has other work too."""


@dataclass(slots=True)
class Recovery:
    """What came of some rounds. Times are milliseconds from the kill to the next start, one a request."""

    lease_s: float
    supervised: bool = False
    took_ms: list[int] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    solo: int = 0
    attempts: Counter[int] = field(default_factory=Counter)

    @property
    def bound_ms(self) -> float:
        """N, or what is promised of a supervisor."""
        return SUPERVISED_MS if self.supervised else 1000 * self.lease_s * (1 + 1.3 / SWEEPS)

    def is_prompt(self) -> bool:
        return max(self.took_ms) <= self.bound_ms + SLACK_MS

    def is_whole(self) -> bool:
        """Each was begun once more, in company, and is done."""
        count = len(self.took_ms)
        return self.states == {"done": count} and self.attempts == {2: count} and not self.solo

    def __str__(self) -> str:
        ordered = sorted(self.took_ms)
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        states = ", ".join(f"{count} {state}" for state, count in self.states.items())
        return (
            f"{len(ordered)} requests begun anew after p50 {p50} ms, p99 {p99} ms, at most {ordered[-1]} ms; "
            f"{states}, {self.solo} of them alone"
        )


async def run(rounds: int, lease_s: float, *, supervised: bool = False) -> Recovery:
    """So many workers killed, one after the other."""
    found = Recovery(lease_s, supervised)
    told: dict[str, Any] = {"lease_s": lease_s, "max_batch_size": RUNNING, "max_queue_depth": 1000}
    async with Fleet(0 if supervised else WORKERS, **told) as fleet:
        for _ in range(rounds):
            # A supervisor waits ever longer before it replaces those that die young: a new one each round.
            supervisor = (
                ChaosWorker(fleet.server.url, settings(workers=WORKERS, **told)) if supervised else None
            )
            try:
                await until(partial(_all_ready, fleet, supervisor))
                await _round(fleet, supervisor, found)
            finally:
                if supervisor is not None:
                    supervisor.drain()
                    await supervisor.ended()
                    supervisor.close()
    return found


async def _round(fleet: Fleet, supervisor: ChaosWorker | None, found: Recovery) -> None:
    prompts = ["ECHO 30 TICK 50"] * (WORKERS * RUNNING)
    rids = await submit(fleet.broker, prompts, stream=True, deadline_ms=120_000)
    owners: dict[str, str] = {}

    async def all_run() -> bool:
        owners.update(await fleet.owners(rids))
        return all(owners.values())

    await until(all_run)
    # The others have as much room as it takes: what remains is how soon they begin.
    victim = owners[rids[0]]
    doomed = [rid for rid in rids if owners[rid] == victim]
    assert len(doomed) == RUNNING, f"{victim} runs {len(doomed)}"
    await fleet.broker.cancel([rid for rid in rids if owners[rid] != victim], "default")
    killed_ms = await fleet.server_ms()
    os.kill(_pid(fleet, supervisor, victim), signal.SIGKILL)
    records = await ended(fleet.broker, doomed, limit_s=60 + 3 * found.lease_s)
    for rid, record in zip(doomed, records, strict=True):
        starts = await fleet.starts_ms(rid)
        assert len(starts) >= 2, f"{rid} was started at {starts}"
        found.took_ms.append(sorted(starts.values())[1] - killed_ms)
        _note(found, record)


def _note(found: Recovery, record: Record) -> None:
    found.states[record.state] += 1
    found.attempts[record.attempts] += 1
    found.solo += record.crashes != 1 or record.solo_losses


def _pid(fleet: Fleet, supervisor: ChaosWorker | None, name: str) -> int:
    if supervisor is None:
        return next(worker.pid for worker in fleet.crew.workers if worker.name == name)
    lines = [json.loads(line) for line in supervisor.lines() if line.startswith("{")]
    started = [line for line in lines if line["event"] == "worker started" and line["worker"] == name]
    return int(started[0]["pid"])


async def _all_ready(fleet: Fleet, supervisor: ChaosWorker | None) -> bool:
    # Not by their cards: that of a killed one lives on for a while.
    if supervisor is None:
        return len(fleet.crew.workers) == WORKERS
    return sum('"event": "ready"' in line for line in supervisor.lines()) >= WORKERS


def say(found: Recovery, rounds: int) -> None:
    """Print what was found, and keep it."""
    how = "a supervisor's workers" if found.supervised else "workers"
    bound = f"{'within' if found.supervised else 'N ='} {found.bound_ms:.0f} ms"
    keep(
        f"F1 recovery{', supervised' if found.supervised else ''}, {rounds} rounds",
        f"kill -9 of one of {WORKERS} {how} with {RUNNING} running requests, L = {found.lease_s:g} s",
        str(found),
        f"the next start {bound}, all in company",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lease-s", type=float, default=2.0)
    parser.add_argument("--supervised", action="store_true", help="under a supervisor, which misses the dead")
    args = parser.parse_args()
    found = asyncio.run(run(args.rounds, args.lease_s, supervised=args.supervised))
    say(found, args.rounds)
    return 0 if found.is_whole() and found.is_prompt() else 1


if __name__ == "__main__":
    sys.exit(main())
