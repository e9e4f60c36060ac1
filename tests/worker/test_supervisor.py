"""The supervisor's decisions, with workers, a queue and a clock of the test's own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
from structlog.testing import capture_logs

from streamfleet_common.deliveries import HandedBack
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_worker.child import Child
from streamfleet_worker.supervisor import (
    DRAIN_MARGIN_S,
    LAST_WORDS_S,
    LONGEST_PAUSE_S,
    ORPHAN_GRACE_S,
    SOUND_S,
    Supervisor,
)

DRAIN_S = 30.0
LEASE_S = 15.0


class FakeChild:
    """A worker that ends when the test says so."""

    def __init__(self, name: str, served: Callable[[], None], at_once_ready: bool) -> None:
        self.name = name
        self.pid = 1
        self.served = served
        self.told = 0
        self.killed = False
        self.no_broker = False
        self.ready = asyncio.Event()
        if at_once_ready:
            self.ready.set()
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def told_to_stop(self) -> bool:
        return self.told > 0

    @property
    def ended(self) -> bool:
        return self._status.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    async def reason(self) -> str:
        return "a reason"

    def how(self) -> str:
        return f"it ended with status {self._status.result()}"

    def last_line(self) -> str:
        return "no memory"

    def stop(self) -> None:
        self.told += 1

    def kill(self) -> None:
        self.killed = True
        self.die(-9)

    def die(self, status: int = 1) -> None:
        self._status.set_result(status)


class Scene:
    """A supervisor, the workers it has started, and what it has handed back."""

    def __init__(self, count: int, max_crashes: int) -> None:
        self.now = 0.0
        self.children: list[FakeChild] = []
        self.handed_back: list[tuple[str, bool]] = []
        self.pauses: list[float] = []
        self.startable = True
        self.buries = False
        """What is handed back comes into the dead letters."""
        self.at_once_ready = True
        self.broker_error: Exception | None = None
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self.supervisor = Supervisor(
            count,
            self._start,
            self._hand_back,
            drain_timeout_s=DRAIN_S,
            lease_s=LEASE_S,
            max_crashes=max_crashes,
            clock=lambda: self.now,
            sleep=self._sleep,
            jitter=self._jitter,
        )
        self.running = asyncio.create_task(self.supervisor.run())

    def _start(self, number: int, served: Callable[[], None]) -> Child:
        if not self.startable:
            raise OSError("no more processes")
        self.children.append(FakeChild(f"{number}.{len(self.children)}", served, self.at_once_ready))
        return cast(Child, self.children[-1])

    async def _hand_back(self, owner: str, *, crashed: bool) -> HandedBack:
        if self.broker_error is not None:
            raise self.broker_error
        self.handed_back.append((owner, crashed))
        if self.buries:
            return HandedBack(1, (), ("a",))
        return HandedBack(1, ("a",))

    async def _sleep(self, seconds: float) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, sleeper))
        await sleeper

    def _jitter(self, low: float, high: float) -> float:
        assert low == 0.0
        self.pauses.append(high)
        return high

    async def at(self, now: float) -> None:
        """Let the time come, and everything happen that happens by then."""
        await settle()
        while due := [entry for entry in self._sleepers if entry[0] <= now]:
            first = min(due, key=lambda entry: entry[0])
            self._sleepers.remove(first)
            self.now = max(self.now, first[0])
            if not first[1].done():
                first[1].set_result(None)
            await settle()
        self.now = now

    async def after(self, seconds: float) -> None:
        await self.at(self.now + seconds)

    async def status(self) -> int:
        async with asyncio.timeout(60.0):
            return await self.running


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
async def scene() -> AsyncIterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(count: int = 1, max_crashes: int = 5) -> Scene:
        scenes.append(Scene(count, max_crashes))
        return scenes[-1]

    yield make
    for made in scenes:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


Make = Callable[..., Scene]


# --- deaths


async def test_a_dead_worker_s_work_is_handed_back_before_anything_else(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.children[0].die(-9)
    await settle()

    assert fleet.handed_back == [("1.0", True)]
    assert len(fleet.children) == 2
    await fleet.after(1.0)
    assert [child.name for child in fleet.children] == ["1.0", "2.1", "1.2"]


async def test_pauses_grow_up_to_a_minute_and_begin_anew_after_a_sound_life(scene: Make) -> None:
    fleet = scene(max_crashes=100)
    await settle()
    for _ in range(8):
        fleet.children[-1].die()
        await fleet.after(LONGEST_PAUSE_S)
    assert fleet.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]

    await fleet.after(SOUND_S)
    fleet.children[-1].die()
    await settle()
    assert fleet.pauses[-1] == 1.0


async def test_crashes_in_a_row_without_an_answer_end_it_with_the_last_words(scene: Make) -> None:
    fleet = scene(2, max_crashes=2)
    await settle()
    with capture_logs() as logs:
        for _ in range(4):
            await fleet.after(LONGEST_PAUSE_S)
            assert fleet.children[0].told == 0
            fleet.children[-1].die(-11)
            await settle()
        fleet.children[0].die(0)
        assert await fleet.status() == 1
    assert fleet.children[0].told == 1
    assert len(fleet.children) == 5
    (error,) = (line["event"] for line in logs if line["log_level"] == "error")
    assert error == (
        "giving up: 4 crashes without one answered request; of the last worker: "
        "it ended with status -11, after the line 'no memory'"
    )


async def test_one_answered_request_begins_a_new_row(scene: Make) -> None:
    fleet = scene(max_crashes=2)
    await settle()
    for _ in range(5):
        fleet.children[-1].served()
        fleet.children[-1].die()
        await fleet.after(LONGEST_PAUSE_S)
    assert not fleet.running.done()
    fleet.children[-1].die()
    assert await fleet.status() == 1


async def test_crashes_of_a_request_that_is_buried_are_its_own(scene: Make) -> None:
    fleet = scene(max_crashes=5)
    await settle()
    with capture_logs() as logs:
        for poison in range(1, 6):
            for crash in range(1, 5):
                assert not fleet.running.done(), (poison, crash)
                fleet.buries = crash == 4
                fleet.children[-1].die(-11)
                await fleet.after(LONGEST_PAUSE_S)
        # Where all requests kill, it is not they who are to blame.
        fleet.children[-1].die(-11)
        assert await fleet.status() == 1
    (error,) = (line["event"] for line in logs if line["log_level"] == "error")
    assert error.startswith("giving up: 5 times a request that kills its workers without one answered ")


async def test_the_last_crash_may_be_explained_by_what_is_handed_back(scene: Make) -> None:
    fleet = scene(max_crashes=4)
    await settle()
    for _ in range(3):
        fleet.children[-1].die(-11)
        await fleet.after(LONGEST_PAUSE_S)
    fleet.buries = True
    fleet.children[-1].die(-11)
    await fleet.after(LONGEST_PAUSE_S)
    assert not fleet.running.done()
    assert len(fleet.children) == 5
    assert fleet.pauses == [1.0, 2.0, 4.0, 1.0], "the last one failed for no fault of its own"


async def test_what_a_worker_that_did_not_crash_leaves_explains_no_crash(scene: Make) -> None:
    fleet = scene(max_crashes=2)
    await settle()
    fleet.children[-1].die(-11)
    await fleet.after(LONGEST_PAUSE_S)
    fleet.buries = True
    fleet.children[-1].die(0)
    await fleet.after(LONGEST_PAUSE_S)
    fleet.buries = False
    fleet.children[-1].die(-11)
    assert await fleet.status() == 1


async def test_redis_s_absence_is_nobody_s_crash(scene: Make) -> None:
    fleet = scene(max_crashes=1)
    fleet.at_once_ready = False
    await settle()
    for _ in range(3):
        fleet.children[-1].no_broker = True
        fleet.children[-1].die()
        await fleet.after(LONGEST_PAUSE_S)
    assert fleet.handed_back == []  # nor did they ever hold anything
    assert len(fleet.children) == 4
    fleet.children[-1].ready.set()
    fleet.children[-1].no_broker = True
    fleet.children[-1].die()
    await settle()
    assert fleet.handed_back == [("1.3", False)]


async def test_a_worker_that_somebody_else_drained_is_replaced_and_no_crash(scene: Make) -> None:
    fleet = scene(max_crashes=1)
    await settle()
    fleet.children[0].die(0)
    await fleet.after(1.0)
    assert fleet.handed_back == [("1.0", False)]
    assert len(fleet.children) == 2


async def test_wrong_settings_are_never_tried_again(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.children[0].die(2)
    await settle()
    fleet.children[1].die(0)
    assert await fleet.status() == 2
    assert len(fleet.children) == 2


async def test_a_process_that_cannot_be_started_is_tried_again_and_counts(scene: Make) -> None:
    fleet = scene(max_crashes=3)
    fleet.startable = False
    await settle()
    fleet.startable = True
    await fleet.after(1.0)
    assert len(fleet.children) == 1
    fleet.startable = False
    fleet.children[0].die()
    await fleet.after(LONGEST_PAUSE_S)
    assert await fleet.status() == 1


# --- handing back


async def test_it_goes_on_trying_while_redis_is_away(scene: Make) -> None:
    fleet = scene()
    fleet.broker_error = BrokerUnavailable("away")
    await settle()
    fleet.children[0].die()
    await fleet.after(LEASE_S)
    assert fleet.handed_back == []
    assert len(fleet.children) == 2  # nor does the next one wait for it
    fleet.broker_error = None
    await fleet.after(1.0)
    assert fleet.handed_back == [("1.0", True)]


async def test_it_leaves_the_work_to_its_lease_in_the_end(scene: Make) -> None:
    fleet = scene()
    fleet.broker_error = BrokerUnavailable("away")
    await settle()
    with capture_logs() as logs:
        fleet.children[0].die()
        await fleet.after(3 * LEASE_S)
    assert "work not handed back: it waits for its lease" in [line["event"] for line in logs]
    fleet.broker_error = None
    await fleet.after(3 * LEASE_S)
    assert fleet.handed_back == []


async def test_a_fault_in_handing_back_keeps_nobody_from_being_replaced(scene: Make) -> None:
    fleet = scene()
    fleet.broker_error = ValueError("ours")
    await settle()
    with capture_logs() as logs:
        fleet.children[0].die()
        await fleet.after(1.0)
    assert len(fleet.children) == 2
    assert [line["log_level"] for line in logs].count("critical") == 1


# --- the end


async def test_all_are_told_once_to_drain(scene: Make) -> None:
    fleet = scene(3)
    await settle()
    fleet.supervisor.stop()
    await settle()
    assert [child.told for child in fleet.children] == [1, 1, 1]
    assert not fleet.running.done()
    for child in fleet.children:
        child.die(0)
    assert await fleet.status() == 0
    assert {crashed for _, crashed in fleet.handed_back} == {False}


async def test_a_second_request_is_passed_on(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.supervisor.stop()
    await settle()
    fleet.supervisor.stop()
    assert [child.told for child in fleet.children] == [2, 2]


async def test_who_does_not_drain_in_time_is_killed_which_is_no_crash_of_its_own(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.supervisor.stop()
    await settle()
    fleet.children[0].die(0)
    await fleet.after(DRAIN_S + DRAIN_MARGIN_S - 0.1)
    assert not fleet.children[1].killed
    await fleet.after(0.1)
    assert await fleet.status() == 1
    assert (fleet.children[0].killed, fleet.children[1].killed) == (False, True)
    assert fleet.handed_back == [("1.0", False), ("2.1", False)]


@pytest.mark.parametrize(
    ("status", "crashed"), [(-signal.SIGTERM, False), (-signal.SIGSEGV, True), (-signal.SIGKILL, True)]
)
async def test_only_an_ordered_death_is_no_crash(scene: Make, status: int, crashed: bool) -> None:
    fleet = scene()
    await settle()
    fleet.supervisor.stop()
    await settle()
    fleet.children[0].die(status)
    await fleet.status()
    assert fleet.handed_back == [("1.0", crashed)]


async def test_nobody_is_started_any_more(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.children[0].die()
    await settle()
    fleet.supervisor.stop()
    await fleet.after(1.0)
    assert len(fleet.children) == 2
    fleet.children[1].die(0)
    assert await fleet.status() == 0


async def test_it_does_not_wait_for_redis_for_ever(scene: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfleet_worker.supervisor.LAST_WORDS_S", 0.0)
    assert LAST_WORDS_S > 0.0
    fleet = scene()
    fleet.broker_error = BrokerUnavailable("away")
    await settle()
    fleet.supervisor.stop()
    await settle()
    fleet.children[0].die(0)
    assert await fleet.status() == 0
    assert fleet.handed_back == []


async def test_orphaned_it_makes_haste(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.supervisor.orphaned()
    await settle()
    assert [child.told for child in fleet.children] == [1, 1]
    await fleet.after(ORPHAN_GRACE_S / 2)
    assert [child.told for child in fleet.children] == [2, 2]
    fleet.children[0].die(0)
    await fleet.after(ORPHAN_GRACE_S)
    assert await fleet.status() == 1
    assert fleet.children[1].killed


# --- rolling


async def test_a_successor_is_ready_before_its_predecessor_drains(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.at_once_ready = False
    fleet.supervisor.roll()
    await settle()
    first, second, successor = fleet.children
    assert (first.told, second.told) == (0, 0)
    successor.ready.set()
    await settle()
    assert (first.told, second.told, len(fleet.children)) == (1, 0, 3)
    first.die(0)
    await settle()
    fleet.children[3].ready.set()
    await settle()
    assert second.told == 1
    second.die(0)
    await fleet.after(LONGEST_PAUSE_S)
    assert [child.name for child in fleet.children] == ["1.0", "2.1", "1.2", "2.3"]
    assert fleet.handed_back == [("1.0", False), ("2.1", False)]


async def test_the_old_ones_stay_if_a_successor_cannot_live(scene: Make) -> None:
    fleet = scene(2, max_crashes=1)
    await settle()
    fleet.at_once_ready = False
    fleet.supervisor.roll()
    await settle()
    fleet.children[2].die()
    await fleet.after(LONGEST_PAUSE_S)
    assert [child.told for child in fleet.children] == [0, 0, 0]
    assert not fleet.running.done()


async def test_a_death_while_its_successor_loads_is_mended_by_the_successor(scene: Make) -> None:
    fleet = scene()
    await settle()
    fleet.at_once_ready = False
    fleet.supervisor.roll()
    await settle()
    fleet.children[0].die()
    await settle()
    fleet.children[1].ready.set()
    await fleet.after(LONGEST_PAUSE_S)
    assert len(fleet.children) == 2
    assert fleet.children[1].told == 0


async def test_a_predecessor_that_does_not_drain_is_killed(scene: Make) -> None:
    fleet = scene()
    await settle()
    fleet.at_once_ready = False
    fleet.supervisor.roll()
    await settle()
    fleet.children[1].ready.set()
    await fleet.after(DRAIN_S + DRAIN_MARGIN_S)
    assert fleet.children[0].killed
    fleet.supervisor.stop()
    await settle()
    fleet.children[1].die(0)
    assert await fleet.status() == 0


async def test_told_to_stop_it_replaces_nobody(scene: Make) -> None:
    fleet = scene(2)
    await settle()
    fleet.at_once_ready = False
    fleet.supervisor.roll()
    await settle()
    fleet.supervisor.stop()
    await settle()
    assert [child.told for child in fleet.children] == [1, 1, 1]
    for child in fleet.children:
        child.die(0)
    assert await fleet.status() == 0
