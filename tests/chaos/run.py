"""Runs requests through a fleet while everything breaks, and judges what became of them.

    python tests/chaos/run.py --seed 1 --requests 1000 --seeds 10

The same seed draws the same requests and faults, at the same times. The last line of each run says how many
requests and faults there were, and `violations: 0`; otherwise the whole history is kept in a file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Run as a script, only its own folder is found.
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.checker import Violation, check, summary
from chaos.crew import ChaosWorker, Crew
from chaos.faults import Faults
from chaos.history import SUB_LANES, History
from chaos.observer import Observer
from chaos.plan import Plan
from chaos.producers import Producers
from chaos.proxy import ChaosProxy
from chaos.server import ChaosServer, binaries
from chaos.upkeep import innocents
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.keys import Keys

QUEUE = "chaos"
WORKERS = 4
TELL_LIMIT_S = 150.0
"""How long the last callers are waited for once everything has been asked."""
REST_LIMIT_S = 15.0
MAX_SHOWN = 5


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    plan: Plan
    history: History
    violations: list[Violation]
    faults: Counter[str] = field(default_factory=Counter)
    graces: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        states = Counter(
            record.state for rid in self.history.accepted() if (record := self.history.remains.record(rid))
        )
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())) or "none"
        took = [ms for loss in self.history.losses for ms in loss.freed_ms.values()]
        poison = [order for order in self.history.orders.values() if order.is_poison]
        dead = sum(
            (record := self.history.remains.record(order.rid)) is not None and record.state == "dead"
            for order in poison
        )
        return (
            f"seed {self.plan.seed}: {len(self.history.accepted())} requests "
            f"({', '.join(f'{state} {count}' for state, count in sorted(states.items()))}), "
            f"faults: {faults}; poison dead: {dead} of {len(poison)}, "
            f"innocents dead: {len(innocents(self.history))}; "
            f"taken from the lost: {len(took)} within {max(took, default=0.0) / 1000:.1f} s, "
            f"graces: {self.graces}; "
            f"{self.seconds:.0f} s; violations: {len(self.violations)}"
        )


def settings(plan: Plan) -> dict[str, object]:
    """What every worker of a run is told."""
    return {
        "queue": QUEUE,
        "lease_s": plan.lease_s,
        "step_limit_s": 1.5 * plan.lease_s,
        # Shorter than many requests take: a drain has to give running work back, too.
        "drain_timeout_s": 0.3,
        "max_batch_size": 8,
        "max_delay_ms": 5,
        "max_queue_depth": 150,
        "sub_lanes": SUB_LANES if plan.seed % 2 else 1,
    }


async def run(plan: Plan, folder: Path, binary: ServerBinary | None = None) -> Outcome:
    """One run, from an empty server to an empty queue."""
    began = time.monotonic()
    history = History(seed=plan.seed, lease_ms=round(plan.lease_s * 1000))
    async with (
        ChaosServer(binary) as server,
        ChaosProxy(server.port) as worker_line,
        ChaosProxy(server.port) as client_line,
        Observer(server, Keys(QUEUE), history) as observer,
    ):
        connections = Connections.open(server.url)
        faults: Faults

        async def ended(worker: ChaosWorker) -> None:
            await faults.ended(worker)

        urls = [worker_line.url if number % 2 else server.url for number in range(WORKERS)]
        crew = Crew(urls, settings(plan), ended, folder / "workers.log")
        faults = Faults(
            plan,
            history,
            observer,
            crew,
            worker_line=worker_line,
            client_line=client_line,
            broker=Broker(connections, QUEUE),
        )
        async with crew:
            async with Producers(client_line.url, QUEUE, plan, history) as producers:
                breaking = asyncio.create_task(faults.run())
                limit_s = plan.wishes[-1].at_s + TELL_LIMIT_S
                try:
                    async with asyncio.timeout(limit_s):
                        await producers.run()
                except TimeoutError:
                    history.diary.append(f"not everybody was told within {limit_s:.0f} s")
                await breaking
            await _rest(observer)
            await crew.drained()
        await connections.close()
        await observer.settle()
    return Outcome(plan, history, check(history), faults.counts, observer.graces, time.monotonic() - began)


async def _rest(observer: Observer) -> None:
    """Wait until nothing is open; what nobody asks for any more may still run."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + REST_LIMIT_S
    while loop.time() < limit:
        glimpse = await observer.look()
        if glimpse is not None and not glimpse.open:
            return
        await asyncio.sleep(0.1)


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def report(outcome: Outcome, folder: Path) -> None:
    """Print a run's outcome; keep its history if something was violated."""
    if outcome.violations:
        path = folder / "history.jsonl"
        outcome.history.write(path)
        shown: Counter[str] = Counter()
        for violation in outcome.violations:
            shown[violation.invariant] += 1
            if shown[violation.invariant] <= MAX_SHOWN:
                say(f"  {violation}")
        say(f"  by invariant: {summary(outcome.violations)}")
        say(f"  everything that happened is in {path}, what the workers said in {folder / 'workers.log'}")
    say(str(outcome))


def main() -> int:
    """Run as many seeds as asked for; the status is 1 if any invariant was violated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, counted up from the first")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--fault-every", type=float, default=1.5, help="seconds between two faults")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--only-poison", action="store_true", help="no faults but those of requests")
    parser.add_argument("--server", choices=sorted(binaries()), help="by default the embedded one")
    given = parser.parse_args()
    violations = 0
    total: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.seeds):
        plan = Plan.draw(
            seed,
            given.requests,
            rate=given.rate,
            fault_every_s=given.fault_every,
            lease_s=given.lease,
            only_poison=given.only_poison,
        )
        folder = Path(tempfile.mkdtemp(prefix=f"streamfleet-chaos-{seed}-"))
        outcome = asyncio.run(run(plan, folder, binaries().get(given.server)))
        report(outcome, folder)
        if not outcome.violations:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        violations += len(outcome.violations)
        total += outcome.faults
        total["requests"] += len(outcome.history.accepted())
    requests = total.pop("requests")
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(total.items())) or "none"
    say(f"seeds: {given.seeds}, requests: {requests}, faults: {kinds}, violations: {violations}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
