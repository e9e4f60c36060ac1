"""Carries planned faults out, writes them into the diary, and answers for the workers that they lose."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from chaos.crew import ChaosWorker, Crew
from chaos.history import Cause, History, Loss
from chaos.observer import Observer
from chaos.plan import FaultKind, Plan, PlannedFault
from chaos.proxy import ChaosProxy
from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES

ALONE_LIMIT_S = 3.0
"""How long a kill is put off while every worker runs a suspect alone that is no poison."""
POLL_S = 0.05
HANDED_BACK = 0.3
"""The share of the dead whose work is handed back, as by a supervisor; that of the others is swept up."""


class Faults:
    """What breaks in a run. `run` returns when all of the plan is done and mended."""

    def __init__(
        self,
        plan: Plan,
        history: History,
        observer: Observer,
        crew: Crew,
        *,
        worker_line: ChaosProxy,
        client_line: ChaosProxy,
        broker: Broker,
    ) -> None:
        self._plan = plan
        self._broker = broker
        self._random = random.Random(plan.seed)
        self._history = history
        self._observer = observer
        self._server = observer.server
        self._crew = crew
        self._worker_line = worker_line
        self._client_line = client_line
        self._began = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server_lock = asyncio.Lock()
        self.counts: Counter[str] = Counter()
        lines = {"worker": worker_line, "client": client_line}
        self._deeds: dict[FaultKind, Callable[[PlannedFault], Awaitable[None]]] = {
            "kill worker": self._kill_worker,
            "pause worker": self._pause_worker,
            "drain worker": self._drain_worker,
            "move waiting": self._move_waiting,
            "kill redis": lambda fault: self._restart_redis(fault, self._server.kill),
            "end redis": lambda fault: self._restart_redis(fault, self._server.terminate),
            "stall redis": self._stall_redis,
            "pause writes": self._pause_writes,
            "cut normal": lambda _: self._cut_clients("normal"),
            "cut pubsub": lambda _: self._cut_clients("pubsub"),
            "worker line cut": lambda _: self._cut(lines["worker"]),
            "worker line black": lambda fault: self._blacken(lines["worker"], fault),
            "worker line half open": lambda fault: self._half_open(lines["worker"], fault),
            "worker line slow": lambda fault: self._slow(lines["worker"], fault),
            "worker line deaf": lambda fault: self._deafen(lines["worker"], fault),
            "client line cut": lambda _: self._cut(lines["client"]),
            "client line black": lambda fault: self._blacken(lines["client"], fault),
            "client line flaps": self._flap,
            "client line slow": lambda fault: self._slow(lines["client"], fault),
            "client line deaf": lambda fault: self._deafen(lines["client"], fault),
        }

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        for fault in self._plan.faults:
            await asyncio.sleep(self._began + fault.at_s - loop.time())
            # Side by side: what breaks does not wait for what is broken.
            task = asyncio.create_task(self._do(fault), name=fault.kind)
            self._tasks.add(task)
        for task in self._tasks:
            await task

    async def _do(self, fault: PlannedFault) -> None:
        try:
            await self._deeds[fault.kind](fault)
        except (RedisError, OSError) as error:  # the server is away already
            self._note(f"{fault.kind}: not done, {type(error).__name__}")
            return
        self.counts[fault.kind] += 1

    def _note(self, words: str) -> None:
        now = asyncio.get_running_loop().time()
        self._history.diary.append(f"{now - self._began:7.2f} s  {words}")

    # --- workers

    async def ended(self, worker: ChaosWorker) -> None:
        """A worker has ended: if nobody told it to, whatever it ran is to blame. Some are handed back."""
        status = worker.status
        if status == 0 and worker.told_to_end:
            return
        if worker.name not in {loss.worker for loss in self._history.losses}:
            self._note(f"worker {worker.name} ended by itself with status {status}")
            self.counts["lost to poison"] += 1
            await self._lose(worker, "poison")
        if self._random.random() < HANDED_BACK:
            with contextlib.suppress(BrokerUnavailable):
                back = await self._broker.hand_back(worker.name, crashed=True)
                self._note(f"handed back {back.requests} requests of {worker.name}")
                self.counts["handed back"] += 1
                if worker.url == self._server.url:  # what a proxy still holds open may yet read for it
                    self._history.remains.stale_consumers_allowed.discard(worker.name)

    async def _lose(self, worker: ChaosWorker, cause: Cause, *, is_watched: bool = True) -> None:
        loss = Loss(worker.name, cause, is_watched=is_watched)
        self._history.remains.stale_consumers_allowed.add(worker.name)
        await self._observer.lost(loss)

    async def _victim(self, fault: PlannedFault) -> ChaosWorker | None:
        """A worker that does not run an innocent suspect alone: two such kills would convict it."""
        limit = asyncio.get_running_loop().time() + ALONE_LIMIT_S
        while asyncio.get_running_loop().time() < limit:
            await self._observer.look()
            able = [worker for worker in self._crew.workers if not worker.is_paused and self._may_die(worker)]
            if able:
                return able[int(fault.choice * len(able)) % len(able)]
            await asyncio.sleep(POLL_S)
        return None

    def _may_die(self, worker: ChaosWorker) -> bool:
        rid = self._observer.alone.get(worker.name)
        order = self._history.orders.get(rid or "")
        return rid is None or (order is not None and order.is_poison)

    async def _kill_worker(self, fault: PlannedFault) -> None:
        worker = await self._victim(fault)
        if worker is not None:
            worker.kill()
            self._note(f"killed {worker.name}")
            await self._lose(worker, "kill")

    async def _pause_worker(self, fault: PlannedFault) -> None:
        worker = await self._victim(fault)
        if worker is None:
            return
        seconds = self._plan.lease_s * (0.4 + 2.6 * fault.strength)
        worker.pause()
        self._note(f"paused {worker.name} for {seconds:.1f} s")
        await self._lose(worker, "stop", is_watched=False)
        await asyncio.sleep(seconds)
        worker.resume()

    async def _drain_worker(self, fault: PlannedFault) -> None:
        workers = [worker for worker in self._crew.workers if not worker.is_paused]
        if workers:
            worker = workers[int(fault.choice * len(workers)) % len(workers)]
            self._note(f"told {worker.name} to drain")
            worker.drain()

    # --- what waits

    async def _move_waiting(self, fault: PlannedFault) -> None:
        """All of one lane to the next, again and again, while workers take from them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._plan.lease_s * (0.5 + fault.strength)
        outcomes: Counter[str] = Counter()
        at = int(fault.choice * len(LANES))
        while loop.time() < until:
            source, to = LANES[at % len(LANES)], LANES[(at + 1) % len(LANES)]
            at += 1
            with contextlib.suppress(BrokerUnavailable):
                waiting = await self._broker.waiting(source)
                moves = await self._broker.move([one.rid for one in waiting], to=to, source=source)
                outcomes.update(one.outcome for one in moves)
            await asyncio.sleep(POLL_S)
        self._note(f"moved what waits around: {dict(outcomes) or 'nothing'}")
        self.counts["moved"] += outcomes["moved"] + outcomes["there"]

    # --- the server

    async def _restart_redis(self, fault: PlannedFault, end: Callable[[], Awaitable[None]]) -> None:
        async with self._server_lock:
            away_s = 0.1 + 1.5 * fault.strength
            began = asyncio.get_running_loop().time()
            await end()
            self._note(f"{fault.kind}, back in {away_s:.1f} s")
            await asyncio.sleep(away_s)
            await self._server.start()
            self._observer.outage(asyncio.get_running_loop().time() - began)

    async def _stall_redis(self, fault: PlannedFault) -> None:
        async with self._server_lock:
            seconds = self._plan.lease_s * (0.2 + 1.3 * fault.strength)
            self._note(f"stalled Redis for {seconds:.1f} s")
            self._observer.outage(seconds)
            await self._server.stall(seconds)

    async def _pause_writes(self, fault: PlannedFault) -> None:
        async with self._server_lock:
            seconds = self._plan.lease_s * (0.2 + 0.8 * fault.strength)
            self._note(f"paused writes for {seconds:.1f} s")
            self._observer.outage(seconds)
            await self._server.pause_writes(round(seconds * 1000))
            await asyncio.sleep(seconds)

    async def _cut_clients(self, kind: str) -> None:
        async with self._server_lock:
            count = await self._server.kill_clients(kind)
            self._note(f"cut {count} {kind} clients")

    # --- lines

    async def _cut(self, line: ChaosProxy) -> None:
        self._note(f"cut {line.lines} lines of {self._whose(line)}")
        line.cut()

    async def _blacken(self, line: ChaosProxy, fault: PlannedFault) -> None:
        seconds = 0.3 + 2.0 * fault.strength
        self._note(f"black hole before {self._whose(line)} for {seconds:.1f} s")
        line.is_black_hole = True
        if line is self._worker_line:
            # What was lost on a line is noticed after seconds, by which a lease may be over.
            for worker in self._crew.behind(line.url):
                await self._lose(worker, "cut", is_watched=False)
        await asyncio.sleep(seconds)
        line.heal()

    async def _half_open(self, line: ChaosProxy, fault: PlannedFault) -> None:
        seconds = 0.5 + 2.0 * fault.strength
        self._note(f"half-open lines of {self._whose(line)} for {seconds:.1f} s")
        line.is_half_open = True
        await asyncio.sleep(seconds)
        line.heal()

    async def _slow(self, line: ChaosProxy, fault: PlannedFault) -> None:
        delay_s, seconds = 0.05 + 0.2 * fault.strength, 1.0 + 2.0 * fault.choice
        self._note(f"delay of {delay_s:.2f} s before {self._whose(line)} for {seconds:.1f} s")
        line.delay_s = delay_s
        await asyncio.sleep(seconds)
        line.delay_s = 0.0

    async def _deafen(self, line: ChaosProxy, fault: PlannedFault) -> None:
        count = 1 + int(8 * fault.strength)
        self._note(f"lose the replies to the next {count} scripts of {self._whose(line)}")
        line.drop_next_reply(b"EVALSHA", count)

    async def _flap(self, fault: PlannedFault) -> None:
        self._note("the clients' lines flap")
        await self._client_line.flap(3 + int(5 * fault.strength), down_s=0.15, up_s=0.1)

    def _whose(self, line: ChaosProxy) -> str:
        return "workers" if line is self._worker_line else "clients"
