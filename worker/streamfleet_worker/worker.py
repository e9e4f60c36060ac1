"""The worker: intake, engine thread and publisher put together, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from streamfleet_common.broker import Broker
from streamfleet_common.connections import BLOCK_MS
from streamfleet_common.deliveries import Delivery
from streamfleet_common.errors import BrokerUnavailable, GenerationFailed, ModelLoadFailed, StreamfleetError
from streamfleet_common.schemas import End, Start
from streamfleet_worker.consumer import Consumer
from streamfleet_worker.engine.base import Engine, Key
from streamfleet_worker.engine.faults import death_of, frames_of
from streamfleet_worker.engine_thread import EngineThread, Report
from streamfleet_worker.intake import Intake
from streamfleet_worker.launch_log import LaunchLog
from streamfleet_worker.leases import Leases
from streamfleet_worker.metrics import ALONE, Metrics
from streamfleet_worker.presence import COURTESY_S, Presence
from streamfleet_worker.publisher import Publisher
from streamfleet_worker.stats import Stats
from streamfleet_worker.vitals import Vitals

if TYPE_CHECKING:
    from streamfleet_worker.request_spans import RequestSpans

LAST_WORDS_S = 5.0
"""How long a drain that has run out of time goes on trying to say so."""
TELL_S = 1.0
"""How long what is complete is told before the rest is handed back: longer only where Redis is away."""
LEASE_S = 15.0
STEP_LIMIT_S = 300.0
AUDITS = 4
"""So often within a lease a worker looks for requests that were given to it, but whose reply was lost."""
SWEEPS = 4
"""So often within a lease each worker sweeps: if nobody has for half a lease, the server is thought to have
stood still, and nothing is taken from anybody."""
CANCEL_AGAIN_S = 0.1
RIDS_SAID = 20
"""So many requests, at most, are named in one line of the log."""

log = structlog.get_logger()


class Worker:
    """Serves one queue with one engine.

    Args:
        broker: where the work is.
        build: makes the engine, on the thread that will run it.
        name: unique to this process.
        max_queue_depth: accepted and unfinished requests at which the queue refuses more.
        version: of this package, for the metrics.
        slot: which of its supervisor's workers it is, for the metrics.
        max_queue_tokens: their tokens at which it does, 0 for no limit.
        keep_payload: whether dead letters hold the requests themselves.
        sub_lanes: into how many each lane is split, by tenant.
        lease_s: after so long a silence the worker's requests are given to others.
        step_limit_s: a worker whose engine takes longer for one step gives itself up.
        drain_timeout_s: how long running requests may go on after `stop`; then they are handed back.
        block_ms: how long a read waits for work.
        moved: is called again and again while the event loop moves.
        clock: seconds, monotonic; the engine's clock too.
        spans: make the spans of what has ended, where they are wanted.
    """

    def __init__(
        self,
        broker: Broker,
        build: Callable[[], Engine],
        *,
        name: str,
        max_queue_depth: int,
        version: str,
        slot: str = ALONE,
        max_queue_tokens: int = 0,
        keep_payload: bool = False,
        sub_lanes: int = 1,
        lease_s: float = LEASE_S,
        step_limit_s: float = STEP_LIMIT_S,
        drain_timeout_s: float = 30.0,
        block_ms: int = BLOCK_MS,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        spans: RequestSpans | None = None,
    ) -> None:
        self.name = name
        self.metrics = Metrics(broker.keys.queue, version, slot)
        self._broker = broker
        self._drain_timeout_s = drain_timeout_s
        self._lease_s = lease_s
        self._engine_thread = engine = EngineThread(build, self._on_steps, self._on_death)
        self._publisher = Publisher(
            broker,
            self.metrics,
            forget=self._forget,
            freed=self._wake,
            memory=lambda: engine.memory,
            ran_out=lambda: self._leases.ran_out,
            spans=spans,
        )
        self._launch_log = LaunchLog(broker, name)
        self._intake = Intake(engine, self._publisher, self.metrics, clock)
        self._consumer = Consumer(
            broker,
            name,
            room=self._intake.room,
            empty=lambda: self._publisher.held == 0,
            known=self._publisher.places,
            deliver=self._intake.take,
            skipped=self.metrics.skipped,
            reconnected=self.metrics.reconnected,
            block_ms=block_ms,
            audit_s=lease_s / AUDITS,
            clock=clock,
        )
        self._presence = Presence(
            broker,
            name,
            max_queue_depth,
            lambda: engine.info,
            self._intake.room,
            lease_s=lease_s,
            max_queue_tokens=max_queue_tokens,
            keep_payload=keep_payload,
            sub_lanes=sub_lanes,
            stats=Stats(self.metrics.registry, clock).read,
            version=version,
        )
        self.vitals = Vitals(engine, self._consumer, step_limit_s, moved, clock)
        self._leases = Leases(
            broker,
            name,
            lease_s=lease_s,
            held=self._publisher.deliveries,
            moving=lambda: not self.vitals.hung(),
            lost=self._publisher.lose,
            drain=self._asked_to_drain,
            clock=clock,
        )
        self.metrics.read(
            since_poll_s=self.vitals.since_poll_s,
            publisher_lag_s=self._publisher_lag_s,
            memory=lambda: engine.memory,
            counts=lambda: engine.counts,
        )
        self._publishing: asyncio.Task[None] | None = None
        self._consuming: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    # --- life

    async def start(self) -> bool:
        """Build the engine, announce it, and begin to consume. False if `stop` came first.

        Raises:
            StreamfleetError: the broker or the model cannot be had; nothing has been read then, and the name
                of a queue that was new with this worker is forgotten unless requests wait there.
        """
        try:
            for step in (self._broker.ping, self._presence.herald, self._build, self._present):
                if not await self._unless_stopped(step()):
                    log.info("stopped while starting")
                    await self._presence.withdraw()
                    await self._close(0)
                    return False
        except BaseException:
            await self._presence.withdraw()
            await self._close(0)
            raise
        info = self._engine_thread.info
        start = Start(worker=self.name, model=info.model, revision=info.revision, exact=info.exact)
        identity = End(
            state="done", model=info.model, revision=info.revision, worker=self.name, exact=info.exact
        )
        self.vitals.beat()
        self.vitals.state = "ready"
        self._publishing = publishing = self._spawn("publisher", self._publisher.run(identity))
        # Without it no end can be told, so there is nothing to wait for.
        publishing.add_done_callback(lambda _: self._hurry.set())
        pulse = self._spawn("pulse", self.vitals.run())
        # It ends by itself only when the engine hangs, and what that runs never ends.
        pulse.add_done_callback(lambda _: self._hurry.set())
        self._tasks = [
            publishing,
            pulse,
            self._spawn("presence", self._presence.keep(self._consumer.share_with)),
            self._spawn("leases", self._leases.keep()),
            self._spawn("sweeps", self._keep_sweeping()),
            self._spawn("launches", self._launch_log.run()),
        ]
        self._consuming = self._spawn("consumer", self._consumer.run(start))
        log.info("ready", **self._describe())
        return True

    def stop(self) -> None:
        """Ask the worker to drain; `run` returns when it has. Asked twice, it hands back what still runs.

        Safe in a signal handler of the event loop.
        """
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain.

        Raises:
            GenerationFailed: the engine, or a part of the worker, died. Its requests have been given to
                others, and its death counts against those that it ran.
        """
        await self._stop.wait()
        await self._drain()
        if self.vitals.fault is not None:
            raise self.vitals.fault

    @property
    def abandoned(self) -> bool:
        """Whether a thread is left that hangs or still loads: only the end of the process will end it."""
        return self._engine_thread.alive or self._intake.preparing

    # --- start

    async def _build(self) -> None:
        try:
            await self._engine_thread.start()
        except StreamfleetError:
            raise
        except Exception as error:
            raise ModelLoadFailed(f"the engine cannot be built ({type(error).__name__}: {error})") from error
        self.metrics.built(self._engine_thread.info, self._engine_thread.first_room)

    async def _present(self) -> None:
        await self._broker.create_groups()
        await self._presence.announce()

    async def _unless_stopped(self, step: Coroutine[Any, Any, None]) -> bool:
        # A model may take minutes to load; whoever wants the process gone should not wait for that.
        doing = asyncio.create_task(step)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                await doing
            return not self._stop.is_set()
        finally:
            await _end(doing, stopping)

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(self._ended)
        return task

    def _describe(self) -> dict[str, Any]:
        info = self._engine_thread.info
        return {
            "queue": self._broker.keys.queue,
            "model": info.model,
            "tasks": info.tasks,
            "device": info.device,
            "precision": info.precision,
            "max_batch_size": info.max_batch_size,
            "max_seq_len": info.max_seq_len,
        }

    # --- drain

    async def _drain(self) -> None:
        self.vitals.state = "draining"
        log.info("draining", running=self._publisher.held)
        self._consumer.stop()
        self._engine_thread.drain()
        telling = asyncio.create_task(self._presence.drain())
        if not await self._finish_running(self._drain_timeout_s, self._hurry):
            # What is complete is told first, unless there is nobody left to tell it.
            told = self._publishing is not None and not self._publishing.done()
            if told:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self._publisher.wait_told()
            await self._hand_back(self._publisher.unfinished() if told else self._publisher.deliveries())
            if not await self._finish_running(LAST_WORDS_S):
                # What was still on its way into the engine, or could not be told.
                await self._hand_back(self._publisher.deliveries())
        # First nobody refreshes the card any more, then it goes.
        await _end(telling, *self._tasks, *filter(None, [self._consuming]))
        await self._leave_nothing()
        await self._presence.leave()
        await self._close(0.0 if self.vitals.hung() else 10.0)
        log.info("stopped")

    async def _finish_running(self, limit_s: float, hurry: asyncio.Event | None = None) -> bool:
        """Wait until nothing is read and nothing is held any more; False if it did not come to that."""

        async def finish() -> None:
            if self._consuming is not None:
                await asyncio.wait([self._consuming])
            await self._publisher.wait_empty()

        finishing = asyncio.create_task(finish())
        hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
        await asyncio.wait([finishing, hurrying], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finished = finishing.done()
        await _end(finishing, hurrying)
        return finished

    async def _hand_back(self, held: list[Delivery]) -> None:
        """Give these to others, and fall silent about them."""
        if not held:
            return
        fault = self.vitals.fault
        rids = [delivery.entry.rid for delivery in held[:RIDS_SAID]]
        log.warning("requests handed back", count=len(held), reason="fault" if fault else "drain", rids=rids)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if fault is None:
                    await self._broker.release(held)
                else:
                    # One of them may be why: that has to count, or it would go on from worker to worker.
                    await self._broker.hand_back(self.name, crashed=True)
        except (BrokerUnavailable, TimeoutError) as error:
            log.warning("nothing can be handed back: the leases will run out", error=str(error))
        self._publisher.lose([delivery.key for delivery in held], "handed_back")

    async def _leave_nothing(self) -> None:
        """Give back what this worker was given without ever hearing of it, if Redis will hear that."""
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(COURTESY_S):
                await self._broker.hand_back(self.name, crashed=False)

    async def _close(self, limit_s: float) -> None:
        self._intake.close()
        await self._engine_thread.close(limit_s)
        self.vitals.state = "stopped"

    # --- what the parts tell

    def _on_steps(self, reports: list[Report]) -> None:
        for report in reports:
            self.metrics.stepped(report)
            self._intake.stepped(report)
            for launch in report.step.launches:
                self._publisher.begun(launch.keys)
            self._publisher.take(report.step.outputs, report.ended_at)
            self._launch_log.take(report.step.launches)
        self._settle()
        self._wake()

    def _publisher_lag_s(self) -> float:
        # On any thread, also while the event loop stands still: events wait before it then.
        # In this order: from there they come to the publisher.
        waits = self._engine_thread.unheard_since, self._publisher.waiting_since()
        since = min((at for at in waits if at is not None), default=None)
        return 0.0 if since is None else max(0.0, time.perf_counter() - since)

    def _forget(self, keys: list[Key]) -> None:
        self._intake.drop(keys)
        self._settle()
        self._wake()

    def _settle(self) -> None:
        # What the engine is to forget may need no further step, which would say so.
        if self._intake.admitted == 0:
            self.metrics.idle()

    def _wake(self) -> None:
        self._consumer.wake()

    def _on_death(self, error: BaseException) -> None:
        self._die("engine", error)
        # What it runs will never end: there is nothing to wait for.
        self._hurry.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        # These tasks outlive every failure they know of; one that ends by itself is a fault of ours.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(task.get_name(), error)

    def _die(self, part: str, error: BaseException) -> None:
        kind = death_of(error)
        log.critical("a part of the worker died", part=part, error=kind, at=frames_of(error))
        if self.vitals.fault is None:
            fault = GenerationFailed(f"the {part} died ({kind}); start the worker again", retryable=True)
            self.vitals.fault = fault
        self._stop.set()

    def _asked_to_drain(self) -> None:
        if not self._stop.is_set():
            log.info("asked to drain")
            self.stop()

    async def _keep_sweeping(self) -> None:
        while True:
            # Each worker does it, at odds, so that no lock is needed and no single one is missed.
            await asyncio.sleep(self._lease_s / SWEEPS * random.uniform(0.7, 1.3))
            try:
                swept = await self._broker.sweep(lease_ms=round(self._lease_s * 1000))
            except BrokerUnavailable as error:
                log.warning("no sweep", error=str(error))
                continue
            self.metrics.swept(swept)
            self._consumer.waited(swept.waited_ms)
            if swept.requeued or swept.failed or swept.dead or swept.stray:
                log.info(
                    "swept",
                    requeued=swept.requeued,
                    failed=swept.failed,
                    dead=swept.dead,
                    stray=swept.stray,
                    rids=list(swept.rids),
                    buried=list(swept.buried),
                )


async def _end(*tasks: asyncio.Task[Any]) -> None:
    pending = set(tasks)
    while pending:
        # More than once, since `asyncio.wait_for` of Python 3.11, under every command of the Redis client,
        # forgets a cancellation that comes just as its own work is done.
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
