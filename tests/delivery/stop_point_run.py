"""One worker that is lost at one point, and what its loss looks like from everywhere."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, field

from chaos.checker import Violation, check
from chaos.history import History, Loss, Order, Reply
from chaos.observer import Observer
from chaos.server import ChaosServer
from delivery.stopping_worker import Point
from delivery.workers import Nursery, WorkerProcess
from eventually import eventually
from hired import ends, eventually_so
from stopping import stopped
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.schemas import End, Envelope, GenerateRequest
from streamfleet_common.submissions import Submission

LEASE_S = 1.6
PAUSE_LEASES = 3
PATIENCE_S = 90.0
"""So many points at once keep a small machine busy, and each pause of its server is a lease more."""
TOKENS = 24
TICK_MS = 50


@dataclass
class Run:
    """What became of one point."""

    point: Point
    history: History
    victim: str = ""
    survivor: str = ""
    last: list[str] = field(default_factory=list)
    """What was submitted last before the victim was lost."""
    begun: dict[str, int] = field(default_factory=dict)
    """What the victim had begun and not ended when it was lost: rid to epoch."""
    ends: dict[str, End] = field(default_factory=dict)
    victim_status: int | None = None
    survivor_status: int | None = None
    violations: list[Violation] = field(default_factory=list)

    @property
    def slowest_ms(self) -> float:
        """How long the slowest request was in a lost worker's hands."""
        return max((ms for loss in self.history.losses for ms in loss.freed_ms.values()), default=0.0)


class Play:
    """Plays one point on a queue of its own."""

    def __init__(self, server: ChaosServer, nursery: Nursery, point: Point) -> None:
        self._server = server
        self._nursery = nursery
        self._connections = Connections.open(server.url)
        self.broker = Broker(self._connections, f"at-{point}")
        self.run = Run(point, History(lease_ms=round(LEASE_S * 1000)))
        self.observer = Observer(server, self.broker.keys, self.run.history)

    async def play(self) -> Run:
        run, point = self.run, self.run.point
        sweeping = asyncio.create_task(self._sweep())
        try:
            victim = self._worker(stop_at=point)
            run.victim = await victim.ready()
            await self._lose(victim)
            lost_at_ms = await self._now_ms()
            loss = Loss(run.victim, "kill" if point.signal == "KILL" else "stop")
            await self.observer.lost(loss)
            run.begun = dict(loss.held)
            rids = list(run.history.orders)
            if point.signal == "STOP":
                await eventually_so(lambda: self._is_past(lost_at_ms), "three leases")
                # A server that was busy gives everybody one lease more.
                await eventually(
                    lambda: loss.freed_ms.keys() == loss.held.keys(),
                    "the loss of its work",
                    patience_s=PATIENCE_S,
                )
            survivor = self._worker()
            run.survivor = await survivor.ready()
            if point.signal == "STOP":
                # It wakes up while the other one is in the middle of what was its own.
                await eventually_so(self._survivor_has_begun, "another owner")
                victim.signal(signal.SIGCONT)
            run.ends = dict(zip(rids, await ends(self.broker, rids), strict=True))
            await self._dismiss(victim, survivor)
        finally:
            await asyncio.gather(stopped(sweeping), return_exceptions=True)
            await self._connections.close()
        await self._judge()
        return run

    def _worker(self, stop_at: Point | None = None) -> WorkerProcess:
        return self._nursery.worker(
            self._server.url, self.broker.keys.queue, stop_at=stop_at, lease_s=LEASE_S, drain_timeout_s=20
        )

    async def _lose(self, victim: WorkerProcess) -> None:
        """Give it work until it reaches the point."""

        def is_lost() -> bool:
            return victim.is_stopped or victim.status is not None

        async def is_over() -> bool:
            found = await self.broker.status(self.run.last, "default")
            return is_lost() or all(one is not None and one.end is not None for one in found)

        await self._submit()
        # A machine that is short of time puts more into each call: all may be done before there were so many.
        # And what is there before the worker waits for it is never read, but found by its first take.
        while (self.run.point.number > 1 or self.run.point.step == "read") and not is_lost():
            await eventually_so(is_over, "the loss of its worker, or the end of its work")
            if not is_lost():
                await self._submit()
        await eventually(is_lost, f"{self.run.point}")

    async def _submit(self) -> None:
        submissions = []
        for number, word in enumerate(("ash", "elm", "oak", "yew")):
            prompt = f"ECHO {TOKENS} AS {word} TICK {TICK_MS} SIGNED"
            envelope = Envelope(request=GenerateRequest(prompt=prompt), stream=number > 0)
            submission = Submission.of(envelope)
            submissions.append(submission)
            self.run.history.orders[envelope.rid] = Order(
                rid=envelope.rid,
                tenant="default",
                word=word,
                count=TOKENS,
                digest=submission.digest,
                stream=number > 0,
                is_signed=True,
            )
        self.run.last = [one.envelope.rid for one in submissions]
        for at, outcome in enumerate(await self.broker.submit(submissions)):
            rid = submissions[at].envelope.rid
            self.run.history.replies.append(Reply(at, rid, submissions[at].digest, outcome.outcome))

    async def _sweep(self) -> None:
        # As clients do: a fleet of one worker has nobody else to miss it.
        while True:
            await self.broker.sweep()
            await asyncio.sleep(LEASE_S / 4 * random.uniform(0.7, 1.3))

    async def _now_ms(self) -> int:
        seconds, micros = await self._server.control.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def _is_past(self, lost_at_ms: int) -> bool:
        return await self._now_ms() >= lost_at_ms + PAUSE_LEASES * LEASE_S * 1000

    async def _survivor_has_begun(self) -> bool:
        found = await self.broker.status(list(self.run.history.orders), "default")
        return all(one is not None and (one.end or one.owner == self.run.survivor) for one in found)

    async def _dismiss(self, victim: WorkerProcess, survivor: WorkerProcess) -> None:
        for process in (victim, survivor):
            process.signal(signal.SIGTERM)
        self.run.victim_status = await victim.ended()
        self.run.survivor_status = await survivor.ended()

    async def _judge(self) -> None:
        history, remains = self.run.history, self.run.history.remains
        await self.observer.settle()
        # Others are at work on this server.
        remains.clients = remains.clients_before = 0
        if self.run.point.signal == "KILL":
            remains.stale_consumers_allowed.add(self.run.victim)
        else:
            history.losses[0].is_watched = False
        self.run.violations = check(history)
