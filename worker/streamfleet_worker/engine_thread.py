"""The thread that owns the engine: model, batches, all of it. The event loop only talks to it.

Orders go in through an inbox, steps come out through an outbox. Neither side ever waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from streamfleet_common.schemas import Request
from streamfleet_worker.engine.base import Arrival, Engine, EngineInfo, Key, Room, Step
from streamfleet_worker.engine.faults import death_of

Order = Callable[[Engine], None]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Report:
    """One step as the event loop hears of it: what it did, how long it took, what room it left."""

    step: Step
    seconds: float
    room: Room
    ended_at: float
    """When it was over, by `time.perf_counter`."""


class EngineThread:
    """Builds an engine on a thread of its own and steps it while it has work.

    `on_steps` is called on the event loop with what has happened since its last call. `on_death` is called
    there once if the engine, or `on_steps`, raises: nothing the engine holds will ever end then.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_steps: Callable[[list[Report]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._on_steps = on_steps
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._orders: deque[Order] = deque()
        self._closing = False
        self._dead = False
        self._outbox: deque[Report] = deque()
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.first_room: Room | None = None
        """What the engine could take when it was built."""
        self.steps = 0
        """Steps taken; that it moves while there is work is the proof of life."""
        self.stepping = False
        """Whether the engine is in a step now."""

    async def start(self) -> None:
        """Start the thread and wait until the engine is built. Raises what building it raised."""
        self._thread.start()
        self._engine = await asyncio.shield(self._ready)

    @property
    def info(self) -> EngineInfo:
        """What the engine serves, once it is built."""
        return self._built().info

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that the engine takes, by use; none before it is built."""
        return {} if self._engine is None else self._engine.memory

    def prepare(self, request: Request, scope: str = "") -> Any:
        """As `Engine.prepare`; callable from any thread, once the engine is built."""
        return self._built().prepare(request, scope)

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        self._order(lambda engine: engine.add(arrivals))

    def cancel(self, keys: Collection[Key]) -> None:
        self._order(lambda engine: engine.cancel(keys))

    def drain(self) -> None:
        self._order(lambda engine: engine.drain())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step, or the building, that is under way, and wait for it so long."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive() and timeout_s > 0:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _built(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine is not built yet")
        return self._engine

    @property
    def counts(self) -> Mapping[str, int]:
        """What the engine's caches have counted; nothing before it is built."""
        return {} if self._engine is None else self._engine.counts

    @property
    def unheard_since(self) -> float | None:
        """When the oldest step was over that the event loop has not heard of, or None; from any thread."""
        try:
            return self._outbox[0].ended_at
        except IndexError:
            return None

    def _notify(self) -> None:
        # As an order that asks for nothing: a wake-up between the look and the wait must not be lost.
        self._order(_nothing)

    def _order(self, order: Order) -> None:
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    # --- on the thread

    def _run(self) -> None:
        try:
            engine = self._build()
            engine.listen(self._notify)
            self.first_room = engine.room()
        except BaseException as error:  # noqa: BLE001 (whatever it is, it belongs to whoever started us)
            self._call(self._settle, error)
            return
        self._call(self._settle, engine)
        try:
            self._serve(engine)
        except BaseException as error:  # noqa: BLE001 (a dead engine must not look like a busy one)
            self.stepping = False
            self._call(self._die, error)
        try:
            engine.close()
        except Exception as error:  # noqa: BLE001 (nothing is lost with it any more)
            log.warning("the engine could not be closed", error=death_of(error))

    def _serve(self, engine: Engine) -> None:
        while True:
            due_in = engine.due_in()
            with self._wake:
                if not self._orders and not self._closing and (due_in is None or due_in > 0):
                    self._wake.wait(None if due_in is None else min(due_in, threading.TIMEOUT_MAX))
                orders = list(self._orders)
                self._orders.clear()
                if self._closing:
                    return
            for order in orders:
                order(engine)
            due_in = engine.due_in()
            if due_in is not None and due_in <= 0:
                self._step(engine)

    def _step(self, engine: Engine) -> None:
        self.stepping = True
        began = time.perf_counter()
        step = engine.step()
        seconds = time.perf_counter() - began
        self.stepping = False
        self._outbox.append(Report(step, seconds, engine.room(), began + seconds))
        self.steps += 1
        # With more than one, the loop has been called already and will find this one too.
        if len(self._outbox) == 1:
            self._call(self._deliver)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)

    # --- on the event loop

    def _deliver(self) -> None:
        reports = []
        while self._outbox:
            reports.append(self._outbox.popleft())
        if not reports:
            return
        try:
            self._on_steps(reports)
        except Exception as error:  # noqa: BLE001 (outputs are lost: as bad as a dead engine)
            self._die(error)

    def _die(self, error: BaseException) -> None:
        if self._dead:
            return
        self._dead = True
        self._deliver()  # what came before the end still counts
        self._on_death(error)

    def _settle(self, outcome: Engine | BaseException) -> None:
        if self._ready.done() or self._closing:
            return
        if isinstance(outcome, BaseException):
            self._ready.set_exception(outcome)
        else:
            self._ready.set_result(outcome)


def _nothing(_: Engine) -> None:
    pass
