"""The engine's thread: what it promises the event loop, and what it does not wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from eventually import PATIENCE_S, eventually
from gated_engine import GatedEngine
from item_models import Bench, Elsewhere, ElsewhereRunner, ListJob, ListRunner, text
from streamfleet_common.errors import ModelLoadFailed
from streamfleet_common.schemas import GenerateRequest
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Output, Step
from streamfleet_worker.engine.item import Done, ItemBatch
from streamfleet_worker.engine_thread import EngineThread, Report


class Loop:
    """What the event loop is told."""

    def __init__(self) -> None:
        self.calls: list[list[Report]] = []
        self.deaths: list[BaseException] = []
        self.threads: set[int] = set()
        self.fault: Exception | None = None

    def on_steps(self, reports: list[Report]) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(reports)
        if self.fault is not None:
            raise self.fault

    def on_death(self, error: BaseException) -> None:
        self.threads.add(threading.get_ident())
        self.deaths.append(error)

    @property
    def outputs(self) -> list[Output]:
        return [output for reports in self.calls for report in reports for output in report.step.outputs]

    @property
    def finished(self) -> list[Key]:
        return [output.key for output in self.outputs if isinstance(output.event, Finished)]


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
async def made(loop: Loop) -> AsyncIterator[Callable[[Callable[[], Engine]], EngineThread]]:
    threads: list[EngineThread] = []

    def make(build: Callable[[], Engine]) -> EngineThread:
        threads.append(EngineThread(build, loop.on_steps, loop.on_death))
        return threads[-1]

    yield make
    for thread in threads:
        await thread.close()


Make = Callable[[Callable[[], Engine]], EngineThread]


def arrival(engine: EngineThread, prompt: str) -> Arrival:
    prepared = engine.prepare(GenerateRequest(prompt=prompt, max_tokens=2000))
    return Arrival(prepared, accepted_at=0.0, deadline_at=1e12)


class Homebody(GatedEngine):
    """Notes on which threads it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = {threading.get_ident()}

    def step(self) -> Step:
        self.threads.add(threading.get_ident())
        return super().step()

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        super().close()


async def test_builds_steps_and_closes_on_one_thread_of_its_own(made: Make, loop: Loop) -> None:
    built: list[Homebody] = []

    def build() -> Engine:
        built.append(Homebody())
        return built[0]

    thread = made(build)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 3")})
    await eventually(lambda: loop.finished == [("a", 1)], "the end")
    await thread.close()
    assert not thread.alive
    (engine,) = built
    assert engine.closed.is_set()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    assert loop.threads == {threading.get_ident()}
    assert thread.steps == engine.taken == 3


async def test_reports_say_what_a_step_did_and_what_room_it_left(made: Make, loop: Loop) -> None:
    thread = made(lambda: GatedEngine(max_batch_size=4))
    await thread.start()
    thread.add({(name, 1): arrival(thread, "ECHO 2") for name in "abc"})
    await eventually(lambda: len(loop.finished) == 3, "the ends")
    reports = [report for reports in loop.calls for report in reports]
    assert [(report.step.rows, report.room.running, report.room.rows) for report in reports] == [
        (3, 3, 1),
        (3, 0, 4),
    ]
    assert all(report.seconds >= 0 for report in reports)


async def test_a_busy_event_loop_does_not_stop_the_engine(made: Make, loop: Loop) -> None:
    engine = GatedEngine()
    thread = made(lambda: engine)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 500")})
    limit = time.monotonic() + PATIENCE_S
    while thread.steps < 500 and time.monotonic() < limit:
        time.sleep(0.001)  # noqa: ASYNC251 (holding the event loop up is the point)
    assert thread.steps == 500
    assert len(loop.calls) == 0
    unheard_since = thread.unheard_since
    await eventually(lambda: loop.finished == [("a", 1)], "the end")
    assert (loop.calls[0][0].ended_at, thread.unheard_since) == (unheard_since, None)
    # All that had gathered came in one call, in order.
    assert len(loop.calls) == 1
    assert [r.step.generated_tokens for r in loop.calls[0]] == [1] * 500


async def test_cancel_reaches_the_engine_before_its_next_step(made: Make, loop: Loop) -> None:
    engine = GatedEngine(is_open=False)
    thread = made(lambda: engine)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 9"), ("b", 1): arrival(thread, "ECHO 9")})
    engine.allowed = 2
    await eventually(lambda: thread.steps == 2, "two steps")
    thread.cancel([("a", 1), ("unknown", 1)])
    engine.is_open = True
    await eventually(lambda: loop.finished == [("b", 1)], "the end of the other")
    assert len([output for output in loop.outputs if output.key == ("a", 1)]) == 2


def waiting_items(*names: str) -> dict[Key, Arrival]:
    return {(name, 1): Arrival(ListJob([text(name)]), accepted_at=0.0, deadline_at=1e12) for name in names}


async def test_another_thread_may_wake_it(made: Make, loop: Loop) -> None:
    """A batch runs elsewhere; nothing but its word that it is ready has the engine step again."""
    runner = ElsewhereRunner(slots=2)
    bench = Bench(runner, size=2, delay=0.0)
    thread = made(lambda: bench.engine)
    await thread.start()
    thread.add(waiting_items("a", "b", "c"))
    await eventually(lambda: len(runner.running) == 2, "two batches")
    await eventually(lambda: not thread.stepping, "rest")
    steps = thread.steps
    for batch in runner.running[::-1]:
        batch.tell(*(Done(value) for value in batch.batch.values))
        waking = threading.Thread(target=runner.wake)
        waking.start()
        waking.join()
    await eventually(lambda: sorted(loop.finished) == [("a", 1), ("b", 1), ("c", 1)], "the ends")
    assert thread.steps - steps <= 3, "it has not looked all the time"
    assert loop.deaths == []


async def test_no_wake_up_is_missed(made: Make, loop: Loop) -> None:
    """However it falls between a look and a wait."""
    runner = ElsewhereRunner()
    bench = Bench(runner, size=1, delay=0.0)
    thread = made(lambda: bench.engine)
    await thread.start()
    launch, told = runner.launch, []

    def at_once(batch: ItemBatch) -> Elsewhere:
        running = launch(batch)

        def end() -> None:
            running.tell(Done("x"))
            runner.wake()

        told.append(threading.Thread(target=end))
        told[-1].start()
        return running

    runner.launch = at_once  # type: ignore[method-assign]
    for number in range(300):
        thread.add(waiting_items(f"r{number}"))
    await eventually(lambda: len(loop.finished) == 300, "the ends")
    for one in told:
        one.join()


async def test_counts_and_memory_are_the_engines(made: Make) -> None:
    bench = Bench(ListRunner())
    thread = made(lambda: bench.engine)
    assert (thread.counts, thread.memory) == ({}, {})
    await thread.start()
    assert thread.counts == bench.engine.counts
    assert thread.memory == {"weights": 1, "items": 0, "answers": 0}


async def test_what_building_raises_comes_out_of_start(made: Make, loop: Loop) -> None:
    def build() -> Engine:
        raise ModelLoadFailed("no such model")

    thread = made(build)
    with pytest.raises(ModelLoadFailed, match="no such model"):
        await thread.start()
    await eventually(lambda: not thread.alive, "the thread's end")
    assert loop.deaths == []


async def test_an_engine_that_raises_dies_once_and_tells_what_came_before(made: Make, loop: Loop) -> None:
    engine = GatedEngine(is_open=False)
    thread = made(lambda: engine)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 9")})
    engine.allowed = 2
    await eventually(lambda: thread.steps == 2, "two steps")
    engine.broken = MemoryError("no more")
    await eventually(lambda: loop.deaths != [], "the death")
    assert loop.deaths == [engine.broken]
    assert len(loop.outputs) == 2
    await eventually(lambda: not thread.alive, "the thread's end")
    assert engine.closed.is_set()
    assert not thread.stepping


async def test_a_close_that_raises_hides_nothing(made: Make, loop: Loop) -> None:
    engine = GatedEngine()
    engine.broken = ValueError("first")

    def close() -> None:
        raise ValueError("second")

    engine.close = close  # type: ignore[method-assign]
    thread = made(lambda: engine)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 1")})
    await eventually(lambda: not thread.alive, "the thread's end")
    await eventually(lambda: loop.deaths == [engine.broken], "the death")


async def test_a_callback_that_raises_counts_as_a_death(made: Make, loop: Loop) -> None:
    loop.fault = ZeroDivisionError("ours")
    thread = made(GatedEngine)
    await thread.start()
    thread.add({("a", 1): arrival(thread, "ECHO 5")})
    await eventually(lambda: loop.deaths != [], "the death")
    assert loop.deaths == [loop.fault]


async def test_closed_while_building_it_ends_when_the_model_is_there(made: Make, loop: Loop) -> None:
    engine, there = GatedEngine(), threading.Event()

    def build() -> Engine:
        assert there.wait(60)
        return engine

    thread = made(build)
    starting = asyncio.create_task(thread.start())
    await eventually(lambda: thread.alive, "the thread")
    starting.cancel()
    await thread.close(timeout_s=0)
    assert thread.alive
    there.set()
    await eventually(lambda: not thread.alive, "the thread's end")
    assert engine.closed.is_set()
    assert engine.taken == 0
    assert loop.calls == []
    assert loop.deaths == []


async def test_nothing_is_known_before_the_engine_is_built(made: Make) -> None:
    thread = made(GatedEngine)
    with pytest.raises(RuntimeError, match="not built"):
        thread.info  # noqa: B018
