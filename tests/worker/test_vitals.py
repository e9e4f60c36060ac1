"""Alive, and ready: told from what was done last, under a clock that the test holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import redis

from eventually import eventually
from hired import Hired
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.vitals import BEAT_S, STALE_S, Vitals

STEP_LIMIT_S = 300.0

Hire = Callable[..., Awaitable[Hired]]


class Engine:
    alive = True
    stepping = False
    steps = 0


class Consumer:
    polled_at = 0.0


class Body:
    """A worker's vitals, and all that they look at."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = Engine()
        self.consumer = Consumer()
        self.moves = 0
        self.vitals = Vitals(
            self.engine,  # type: ignore[arg-type]
            self.consumer,  # type: ignore[arg-type]
            STEP_LIMIT_S,
            self._moved,
            lambda: self.now,
        )
        self.vitals.state = "ready"

    def _moved(self) -> None:
        self.moves += 1

    @property
    def all_well(self) -> bool:
        return self.vitals.unhealthy() is None and self.vitals.unready() is None


@pytest.fixture
def body() -> Body:
    return Body()


def test_all_is_well_while_everything_moves(body: Body) -> None:
    for _ in range(100):
        body.now += STALE_S
        body.consumer.polled_at = body.now
        body.vitals.beat()
        assert body.all_well
    assert body.vitals.since_poll_s() == 0


def test_without_a_completed_poll_it_is_not_ready_but_alive(body: Body) -> None:
    body.now = STALE_S + 1
    body.vitals.beat()
    assert body.vitals.unready() == "no work could be read for 11 s"
    assert body.vitals.unhealthy() is None
    assert body.vitals.since_poll_s() == STALE_S + 1
    body.consumer.polled_at = body.now
    assert body.all_well


def test_an_event_loop_that_hangs_is_not_alive(body: Body) -> None:
    body.now = body.consumer.polled_at = STALE_S + 1
    assert body.vitals.unhealthy() == "the event loop has not moved for 11 s"
    assert body.vitals.unready() == body.vitals.unhealthy()
    body.vitals.beat()
    assert body.all_well


def test_one_step_may_take_long_but_not_for_ever(body: Body) -> None:
    body.engine.stepping = True
    body.engine.steps = 7
    body.vitals.beat()
    for body.now in (100.0, STEP_LIMIT_S - 1, STEP_LIMIT_S + 1):
        body.vitals.beat()
        assert (body.vitals.unhealthy() is None) == (body.now < STEP_LIMIT_S), body.now
    assert body.vitals.unhealthy() == "the engine has been in one step for 301 s"
    body.engine.steps = 8
    body.vitals.beat()
    assert body.vitals.unhealthy() is None


async def test_an_engine_that_hangs_ends_the_pulse(body: Body) -> None:
    body.engine.stepping = True
    pulse = asyncio.create_task(body.vitals.run())
    await eventually(lambda: body.moves == 1, "a beat")
    body.now = STEP_LIMIT_S + BEAT_S
    with pytest.raises(GenerationFailed, match="one step for over 300 s") as caught:
        await pulse
    assert caught.value.retryable
    assert body.moves == 2, "whoever watches the loop is told at each beat"


def test_one_step_may_take_exactly_its_limit(body: Body) -> None:
    body.engine.stepping = True
    body.vitals.beat()
    body.now = STEP_LIMIT_S
    assert not body.vitals.hung()
    body.now += 0.001
    assert body.vitals.hung()
    body.engine.stepping = False
    assert not body.vitals.hung(), "an idle engine does not hang"


def test_steps_that_follow_each_other_are_not_one(body: Body) -> None:
    body.engine.stepping = True
    for step in range(10):
        body.engine.steps = step
        body.now += STEP_LIMIT_S
        body.vitals.beat()
        assert body.vitals.unhealthy() is None


def test_death_is_told_by_its_reason(body: Body) -> None:
    body.engine.alive = False
    assert body.vitals.unhealthy() == "the engine's thread has ended"
    body.vitals.fault = GenerationFailed("the engine died (ValueError: odd)")
    assert body.vitals.unhealthy() == "the engine died (ValueError: odd)"


@pytest.mark.parametrize("state", ["starting", "stopped"])
def test_on_its_way_in_and_out_it_is_alive_and_not_ready(body: Body, state: str) -> None:
    body.engine.alive = False
    body.vitals.state = state
    body.now = 1e6
    assert body.vitals.unhealthy() is None
    assert body.vitals.unready() == state


async def test_readiness_follows_redis(hire: Hire) -> None:
    late_s = 0.0
    with EmbeddedBroker() as server:
        hired = await hire(url=server.url, clock=lambda: time.monotonic() + late_s, block_ms=500)
        vitals = hired.worker.vitals
        assert vitals.unready() is None
        with redis.Redis.from_url(server.url) as raw:
            await eventually(lambda: raw.info("clients")["blocked_clients"] == 1, "a read that waits")
        server.kill()
        await eventually(lambda: hired.worker._consumer._unsure, "a failed read")
        late_s = STALE_S + 1
        assert (vitals.unready() or "").startswith("no work could be read for 1")
        assert hired.metric("seconds_since_last_poll", worker="0") > STALE_S
        server.restart()
        await eventually(lambda: vitals.unready() is None, "readiness")
        await eventually(lambda: hired.metric("broker_reconnects_total") >= 1, "the news of it")
        await hired.dismiss()
