"""The worker: consumer, engine thread and publisher put together, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from streamfleet_common import codec
from streamfleet_common.broker import CARD_LIFE_MS, Broker, Delivery, Depth
from streamfleet_common.errors import BrokerUnavailable, GenerationFailed, StreamfleetError
from streamfleet_common.schemas import Card, End, Envelope, Limits, Start
from streamfleet_worker.consumer import Consumer
from streamfleet_worker.engine.base import Arrival, Engine, EngineInfo, Finished, Key, Output, Tokens
from streamfleet_worker.engine_thread import EngineThread, Report
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.publisher import Held, Publisher

ANNOUNCE_S = CARD_LIFE_MS / 1000 / 3
EXPIRE_S = 5.0
BEAT_S = 0.5
STALE_S = 10.0
"""A loop that has not moved for so long is not alive."""
STEP_LIMIT_S = 300.0
"""No single step takes so long, the worst prefill included."""

log = structlog.get_logger()


class Worker:
    """Serves one queue with one engine.

    `build` makes the engine, on the thread that will run it; `name` is unique to this process.
    """

    def __init__(
        self,
        broker: Broker,
        build: Callable[[], Engine],
        *,
        name: str,
        max_queue_depth: int,
        version: str,
        drain_timeout_s: float = 30.0,
    ) -> None:
        self._broker = broker
        self._build = build
        self._max_queue_depth = max_queue_depth
        self._version = version
        self._drain_timeout_s = drain_timeout_s
        self.name = name
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._death: BaseException | None = None
        self._state: str = "starting"
        self._beat_at = 0.0
        self._step_seen = (0, 0.0)
        # What was handed to the engine and has not come back finished.
        self._admitted: dict[Key, float] = {}
        self._first_token: set[Key] = set()
        self._preparing = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    # --- life

    async def start(self) -> bool:
        """Build the engine, announce it, and begin to consume. False if `stop` came first.

        Raises:
            StreamfleetError: the broker or the model cannot be had; nothing has been read then.
        """
        self._loop = asyncio.get_running_loop()
        await self._broker.ping()
        self._engine_thread = EngineThread(self._build, self._on_steps, self._on_death)
        # A model may take minutes to load; whoever wants the process gone should not wait for that.
        building = asyncio.create_task(self._engine_thread.start())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([building, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not building.done():
            building.cancel()
            log.info("stopped while loading")
            return False
        engine = await building
        self._prepare = engine.prepare
        self.info: EngineInfo = engine.info
        self.metrics = Metrics(self._broker.keys.queue, self.info, self._version)
        await self._broker.create_groups()
        identity = End(state="done", model=self.info.model, revision=self.info.revision, worker=self.name)
        self.publisher = Publisher(self._broker, identity, self._on_lost, self._on_done)
        start = Start(worker=self.name, model=self.info.model, revision=self.info.revision)
        self.consumer = Consumer(self._broker, self.name, start, self.capacity, self._deliver)
        await self._announce()
        self._state = "ready"
        self._beat_at = self._loop.time()
        self._consuming = asyncio.create_task(self.consumer.run(), name="consumer")
        for coroutine in (self.publisher.run(), self._beat(), self._keep_announced(), self._keep_expiring()):
            task = asyncio.create_task(coroutine)
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        self._consuming.add_done_callback(self._ended)
        log.info("ready", **self._describe())
        return True

    def stop(self) -> None:
        """Ask the worker to drain; `run` returns when it has. Safe in a signal handler."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain.

        Raises:
            GenerationFailed: the engine died; its requests have been failed as retryable.
        """
        await self._stop.wait()
        await self._drain()
        if self._death is not None:
            raise GenerationFailed(
                f"the engine died ({type(self._death).__name__}: {self._death}); start the worker again",
                retryable=True,
            ) from self._death

    async def _drain(self) -> None:
        self._state = "draining"
        log.info("draining", running=self.publisher.held)
        self.consumer.stop()
        with contextlib.suppress(BrokerUnavailable):
            await self._announce()
        await asyncio.wait([self._consuming])
        if self._death is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout_s):
                    await self.publisher.wait_empty()
        if self.publisher.held:
            # Until work can be handed back, an honest end is better than silence.
            why = "its worker stopped" if self._death is None else "the engine of its worker died"
            error = GenerationFailed(f"{why} before the answer was complete: send it again", retryable=True)
            log.warning("requests given up", count=self.publisher.held, reason=why)
            self.publisher.give_up(Finished("failed", error=error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self.publisher.wait_empty()
        with contextlib.suppress(BrokerUnavailable):
            await self._broker.announce(self.card(), life_ms=0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine_thread.close()
        self._pool.shutdown(wait=False)
        self._state = "stopped"
        log.info("stopped")

    # --- what others ask

    def capacity(self) -> int:
        """How many more requests would run now."""
        return self.info.max_batch_size - len(self._admitted) - self._preparing

    def card(self) -> Card:
        """This worker's card as of now."""
        return Card(
            worker=self.name,
            queue=self._broker.keys.queue,
            model=self.info.model,
            revision=self.info.revision,
            tasks=self.info.tasks,
            device=self.info.device,
            precision=self.info.precision,
            limits=Limits(
                max_batch_size=self.info.max_batch_size,
                max_seq_len=self.info.max_seq_len,
                max_queue_depth=self._max_queue_depth,
                max_request_bytes=codec.MAX_REQUEST_BYTES,
                vocab_size=self.info.vocab_size,
            ),
            capacity=max(0, self.capacity()),
            state="draining" if self._state == "draining" else "ready",
        )

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, or None. Callable from any thread."""
        if self._state in ("starting", "stopped"):
            return None
        now = self._loop.time()
        if now - self._beat_at > STALE_S:
            return f"the event loop has not moved for {now - self._beat_at:.0f} s"
        if not self._engine_thread.alive:
            return "the engine is dead"
        steps, since = self._step_seen
        if self._engine_thread.stepping and steps == self._engine_thread.steps and now - since > STEP_LIMIT_S:
            return f"the engine has been in one step for {now - since:.0f} s"
        return None

    def unready(self) -> str | None:
        """Why no work would be taken now, or None. Callable from any thread."""
        if self._state != "ready":
            return self._state
        idle_s = self._loop.time() - self.consumer.polled_at
        if idle_s > STALE_S:
            return f"no work could be read for {idle_s:.0f} s"
        return self.unhealthy()

    def depth(self) -> Depth | None:
        """The queue's depth, or None if Redis does not tell within a second. From other threads only."""
        asking = asyncio.run_coroutine_threadsafe(self._broker.depth(), self._loop)
        try:
            return asking.result(timeout=1.0)
        except (BrokerUnavailable, TimeoutError):
            asking.cancel()
            return None

    def _describe(self) -> dict[str, Any]:
        info = self.info
        return {
            "queue": self._broker.keys.queue,
            "model": info.model,
            "device": info.device,
            "precision": info.precision,
            "max_batch_size": info.max_batch_size,
            "max_seq_len": info.max_seq_len,
        }

    # --- the way in

    async def _deliver(self, deliveries: list[Delivery]) -> None:
        now = self._loop.time()
        wanted: list[tuple[Delivery, Envelope]] = []
        for delivery in deliveries:
            self.metrics.queue_time.observe((delivery.now_ms - delivery.accepted_at_ms) / 1000)
            try:
                envelope = codec.decode_envelope(delivery.entry.payload)
            except StreamfleetError as error:
                # Nobody checked it at the door, and nothing but its record says who waits for it.
                self.publisher.hold(delivery, tenant="", stream=False)
                self.publisher.take([Output(delivery.key, Finished("failed", error=error))])
                continue
            self.publisher.hold(delivery, tenant=envelope.tenant, stream=envelope.stream)
            wanted.append((delivery, envelope))
        if not wanted:
            return
        self._preparing = len(wanted)
        try:
            prepared = await self._loop.run_in_executor(
                self._pool, self._prepare_all, [envelope for _, envelope in wanted]
            )
        finally:
            self._preparing = 0
        arrivals: dict[Key, Arrival] = {}
        for (delivery, _), outcome in zip(wanted, prepared, strict=True):
            if isinstance(outcome, StreamfleetError):
                self.publisher.take([Output(delivery.key, Finished("failed", error=outcome))])
                continue
            accepted_at = now - (delivery.now_ms - delivery.accepted_at_ms) / 1000
            deadline_at = now + (delivery.deadline_at_ms - delivery.now_ms) / 1000
            arrivals[delivery.key] = Arrival(outcome, accepted_at, deadline_at)
            self._admitted[delivery.key] = accepted_at
        if arrivals:
            self._engine_thread.add(arrivals)

    def _prepare_all(self, envelopes: list[Envelope]) -> list[Any]:
        prepared: list[Any] = []
        for envelope in envelopes:
            try:
                prepared.append(self._prepare(envelope.request))
            except StreamfleetError as error:
                prepared.append(error)
            except Exception as error:
                # One request's fault, whatever it is, is that request's failure alone.
                log.exception("request cannot be prepared", rid=envelope.rid)
                prepared.append(GenerationFailed(f"cannot be prepared: {type(error).__name__}"))
        return prepared

    # --- the way back

    def _on_steps(self, reports: list[Report]) -> None:
        now = self._loop.time()
        for report in reports:
            self.metrics.stepped(report)
            for output in report.step.outputs:
                if isinstance(output.event, Finished):
                    self._admitted.pop(output.key, None)
                    self._first_token.discard(output.key)
                elif isinstance(output.event, Tokens) and output.key not in self._first_token:
                    accepted_at = self._admitted.get(output.key)
                    if accepted_at is not None:
                        self._first_token.add(output.key)
                        self.metrics.ttft.observe(max(0.0, now - accepted_at))
            self.publisher.take(report.step.outputs)
        self.consumer.wake()

    def _on_lost(self, keys: list[Key]) -> None:
        self.metrics.fenced.inc(len(keys))
        for key in keys:
            self._admitted.pop(key, None)
            self._first_token.discard(key)
        self._engine_thread.cancel(keys)
        self.consumer.wake()

    def _on_done(self, done: list[tuple[Held, End]]) -> None:
        for held, end in done:
            self.metrics.ended(end)
            waited_ms = held.delivery.now_ms - held.delivery.accepted_at_ms
            self.metrics.e2e.observe(waited_ms / 1000 + self._loop.time() - held.held_at)

    def _on_death(self, error: BaseException) -> None:
        log.critical("the engine died", error=f"{type(error).__name__}: {error}")
        self._death = error
        self._stop.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        # These tasks outlive every failure they know of; one that ends by itself is a fault of ours.
        if not task.cancelled() and task.exception() is not None:
            log.critical("a task of the worker died", task=task.get_name(), exc_info=task.exception())
            self._death = self._death or task.exception()
            self._stop.set()

    # --- what recurs

    async def _announce(self) -> None:
        await self._broker.announce(self.card())

    async def _keep_announced(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S * random.uniform(0.8, 1.0))
            with contextlib.suppress(BrokerUnavailable):
                await self._announce()

    async def _keep_expiring(self) -> None:
        while True:
            # Each worker does it, at odds, so that no lock is needed and no single one is missed.
            await asyncio.sleep(EXPIRE_S * random.uniform(0.7, 1.3))
            with contextlib.suppress(BrokerUnavailable):
                await self._broker.expire()

    async def _beat(self) -> None:
        while True:
            self._beat_at = self._loop.time()
            if self._engine_thread.steps != self._step_seen[0] or not self._engine_thread.stepping:
                self._step_seen = (self._engine_thread.steps, self._beat_at)
            self.metrics.since_poll.set(self._beat_at - self.consumer.polled_at)
            await asyncio.sleep(BEAT_S)
