"""A worker of which a part dies or hangs: its requests are handed back, and that counts."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable

import pytest
import structlog

import gated_engine
from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, end, ends, record, submit
from hired_view import echo
from late_finishes import hold_finishes
from streamfleet_common.broker import Broker
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Retry

Hire = Callable[..., Awaitable[Hired]]


async def test_an_engine_that_dies_gives_back_what_it_ran_and_its_death_counts(
    broker: Broker, hire: Hire
) -> None:
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=3600.0)
    rids = await submit(broker, ["ECHO 50"] * 5, stream=True) + await submit(broker, ["ECHO 50"] * 3)
    await eventually(lambda: len(hired.engine.added) == 8, "a full batch")
    later = await submit(broker, ["ECHO 50"])
    hired.engine.broken = MemoryError("out of cache")
    with pytest.raises(GenerationFailed, match=r"engine died .*out of cache"):
        await hired.ended()
    for rid in rids:
        found = await record(broker, rid)
        assert (found.state, found.crashes, found.solo_losses, found.attempts) == ("queued", 1, 0, 1)
    (waiting,) = later
    assert (await record(broker, waiting)).crashes == 0
    assert await broker.cards() == []
    assert not hired.worker.abandoned
    await hire()
    assert {answer.text for answer in await ends(broker, rids + later)} == {echo(50)}


async def test_what_is_complete_when_the_engine_dies_is_told(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hold_finishes(monkeypatch)
    hired = await hire(GatedEngine(), drain_timeout_s=3600.0)
    (complete,) = await submit(broker, ["ECHO 1"])
    publisher = hired.worker._publisher
    await eventually(lambda: publisher.held == 1 and not publisher.unfinished(), "its answer")
    hired.engine.is_open = False
    (running,) = await submit(broker, ["ECHO 50"])
    await eventually(lambda: len(hired.engine.added) == 2, "its turn")
    hired.engine.broken = MemoryError("out of cache")
    await eventually(lambda: hired.worker.vitals.fault is not None, "the fault")
    told.set()
    with pytest.raises(GenerationFailed, match="engine died"):
        await hired.ended()
    assert (await end(broker, complete)).text == echo(1)
    assert (await record(broker, complete)).crashes == 0
    assert (await record(broker, running)).crashes == 1


async def test_an_engine_that_dies_in_a_drain_ends_the_drain(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=3600.0)
    (rid,) = await submit(broker, ["ECHO 50"])
    await eventually(lambda: len(hired.engine.added) == 1, "its turn")
    hired.worker.stop()
    await eventually(lambda: hired.worker.vitals.state == "draining", "the drain")
    hired.engine.broken = ValueError("odd")
    with pytest.raises(GenerationFailed, match="engine died"):
        await hired.ended()
    found = await record(broker, rid)
    assert (found.state, found.crashes) == ("queued", 1)


async def test_an_engine_that_hangs_gives_back_what_it_ran_and_its_death_counts(
    broker: Broker, hire: Hire
) -> None:
    engine = GatedEngine()
    hired = await hire(engine, step_limit_s=0.2, drain_timeout_s=3600.0)
    (rid,) = await submit(broker, ["ECHO 3"])
    await end(broker, rid)
    engine.hang()
    (rid,) = await submit(broker, ["ECHO 3"])
    with pytest.raises(GenerationFailed, match=r"pulse died .*one step for over 0\.2 s"):
        await hired.ended()
    found = await record(broker, rid)
    assert (found.state, found.crashes) == ("queued", 1)
    assert hired.worker.abandoned
    assert await broker.cards() == []
    engine.freed.set()


async def test_requests_fail_for_now_and_are_tried_again(broker: Broker, hire: Hire) -> None:
    await hire(lease_s=2.0)
    once, always = await submit(broker, ["ECHO 3 RETRY@1:1", "ECHO 3 RETRY@1"], retry=Retry(backoff_ms=0))
    answer = await end(broker, once)
    assert (answer.state, answer.text, answer.attempt) == ("done", echo(3), 2)
    answer = await end(broker, always)
    assert (answer.state, answer.attempt) == ("failed", 3)


@pytest.mark.parametrize("part", ["publisher", "consumer", "sweeps", "leases"])
async def test_a_part_that_dies_ends_the_worker(
    broker: Broker, hire: Hire, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfleet_worker.worker.LAST_WORDS_S", 0.1)
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=3600.0, lease_s=2.0)
    (rid,) = await submit(broker, ["ECHO 5"], stream=True)
    await eventually(lambda: len(hired.engine.added) == 1, "its turn")

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    name = {"publisher": "emit", "consumer": "read", "sweeps": "sweep", "leases": "renew"}[part]
    monkeypatch.setattr(Broker, name, broken)
    hired.engine.is_open = True
    await eventually(lambda: hired.worker.vitals.fault is not None, "the fault")
    assert "ZeroDivisionError" in (hired.worker.vitals.unhealthy() or "")
    with pytest.raises(GenerationFailed, match=f"the {part} died"):
        await hired.ended()
    if part == "publisher":
        found = await record(broker, rid)
        assert (found.state, found.crashes) == ("queued", 1), "what could not be told is somebody else's"
    else:
        assert (await end(broker, rid)).text == echo(5), "what ran was finished"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("canary-91"), "KeyError"),
        (ValueError("canary-91 is no token"), "ValueError"),
        (RuntimeError("device-side assert"), "RuntimeError: device-side assert"),
    ],
)
async def test_the_log_of_a_death_names_the_place_and_quotes_only_the_machine(
    hire: Hire, error: Exception, said: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        hired = await hire(GatedEngine(), drain_timeout_s=3600.0)
        hired.engine.broken = error
        await submit(hired.worker._broker, ["ECHO 50"])
        with pytest.raises(GenerationFailed) as caught:
            await hired.ended()
    (died,) = [line for line in lines if line["event"] == "a part of the worker died"]
    assert died["error"] == said
    assert died["at"][-1].startswith(gated_engine.__file__)
    assert said in str(caught.value)
    assert "canary" not in repr(lines) + "".join(traceback.format_exception(caught.value))
