"""One timer for all that is waited for, and the sweeps of those who wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from eventually import eventually
from hand_worker import HandWorker
from streamfleet_producer import Client, GenerateRequest
from streamfleet_producer import watch as watch_module
from streamfleet_producer.watch import Watch

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


class Waiter:
    """Somebody who waits, for ever unless told otherwise."""

    def __init__(self, deadline_in_s: float = math.inf, late_in_s: float = math.inf) -> None:
        now = asyncio.get_running_loop().time()
        self.heard_at = now
        self.deadline_at = now + deadline_in_s
        self.late_at = now + late_in_s
        self.silences = 0
        self.times_late = 0

    def silent(self) -> None:
        self.silences += 1

    def late(self) -> None:
        self.times_late += 1


class Sweeps:
    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self) -> None:
        self.at.append(asyncio.get_running_loop().time())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how often those who wait sweep."""
    return lambda seconds: monkeypatch.setattr(watch_module, "SWEEP_S", seconds)


async def test_whoever_waits_sweeps_again_and_again(often: Callable[[float], None]) -> None:
    often(0.01)
    sweeps = Sweeps()
    watch = Watch(60, sweeps)
    watch.add(Waiter())
    await eventually(lambda: len(sweeps.at) >= 20, "sweeping")
    gaps = {round(b - a, 4) for a, b in zip(sweeps.at, sweeps.at[1:], strict=False)}
    assert min(gaps) >= 0.0069
    assert len(gaps) > 5  # never in step with others
    watch.close()


async def test_where_nobody_waits_nobody_sweeps(often: Callable[[float], None]) -> None:
    often(0.01)
    sweeps, other = Sweeps(), Sweeps()
    watch, running = Watch(60, sweeps), Watch(60, other)
    waiter = Waiter()
    watch.add(waiter)
    watch.discard(waiter)
    running.add(Waiter())
    await eventually(lambda: len(other.at) >= 10, "sweeping")
    assert sweeps.at == []
    # And whoever comes after a long pause does not sweep at once.
    watch.add(waiter)
    assert watch._sweep_at > asyncio.get_running_loop().time()
    watch.close()
    running.close()


async def test_many_short_waits_sweep_as_one_long_one_does(often: Callable[[float], None]) -> None:
    often(0.02)
    sweeps = Sweeps()
    watch = Watch(60, sweeps)

    async def come_and_go() -> None:
        while len(sweeps.at) < 3:
            waiter = Waiter()
            watch.add(waiter)
            await asyncio.sleep(0)
            watch.discard(waiter)

    async with asyncio.timeout(60):
        await asyncio.gather(come_and_go(), come_and_go())
    watch.close()


async def test_a_deadline_sweeps_at_once_and_silence_and_lateness_are_told() -> None:
    sweeps = Sweeps()
    watch = Watch(0.02, sweeps)
    due, late, patient = Waiter(deadline_in_s=0.01), Waiter(late_in_s=0.01), Waiter()
    for waiter in (due, late, patient):
        watch.add(waiter)
    await eventually(lambda: patient.silences >= 2, "silence")
    assert len(sweeps.at) == 1
    assert (due.times_late, late.times_late, patient.times_late) == (0, 1, 0)
    watch.close()


async def test_lost_work_comes_back_with_no_worker_left_to_fetch_it(
    redis_url: str, worker: HandWorker, often: Callable[[float], None]
) -> None:
    often(0.05)
    await worker.redis.hset(worker.broker.keys.control, "lease_ms", "600")
    async with Client(redis_url, queue="q", silence_s=60) as fleet:
        running = asyncio.create_task(fleet.run(REQUEST))
        await worker.take()  # and it is never heard of again
        async with asyncio.timeout(60), HandWorker(redis_url, name="w2") as second:
            [work] = await second.take()
            assert (work.delivery.attempts, work.delivery.crashes) == (2, 1)
            await second.finish(work, "abc")
            assert (await running).text == "abc"
