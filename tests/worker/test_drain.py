"""A worker that is told to go: it finishes what it can and hands back the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import redis

from eventually import eventually
from gated_engine import SLOW, GatedEngine
from hired import Hired, end, ends, eventually_so, record, submit
from hired_view import echo, has_text, states
from late_finishes import hold_finishes
from streamfleet_common.broker import Broker
from streamfleet_common.keys import Keys
from streamfleet_common.schemas import Start

Hire = Callable[..., Awaitable[Hired]]


async def test_an_idle_worker_drains_at_once_and_takes_its_card_down(broker: Broker, hire: Hire) -> None:
    hired = await hire(drain_timeout_s=3600.0)
    assert len(await broker.cards()) == 1
    await hired.drained()
    assert await broker.cards() == []
    assert hired.engine.closed.is_set()
    assert not hired.worker.abandoned
    assert hired.worker.vitals.unready() == "stopped"


async def test_a_busy_worker_finishes_what_it_runs_and_reads_no_more(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=2))
    running = await submit(broker, ["ECHO 30"] * 2, stream=True)
    await eventually(lambda: len(hired.engine.added) == 2, "their turn")
    waiting = await submit(broker, ["ECHO 30"] * 2)
    hired.worker.stop()
    await eventually_so(lambda: _is_draining(broker), "a card that says so")
    assert hired.worker.vitals.unready() == "draining"
    hired.engine.is_open = True
    await hired.ended()
    assert {answer.text for answer in await ends(broker, running)} == {echo(30)}
    assert await states(broker, waiting) == {"queued": 2}
    assert await broker.cards() == []
    # Another worker finds them.
    await hire()
    assert len(await ends(broker, waiting)) == 2


async def _is_draining(broker: Broker) -> bool:
    return [card.state for card in await broker.cards()] == ["draining"]


@pytest.mark.parametrize("second_stop", [False, True])
async def test_what_a_drain_has_no_time_for_goes_back_and_another_worker_answers_it(
    broker: Broker, hire: Hire, second_stop: bool
) -> None:
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=3600.0 if second_stop else 0.1)
    rids = await submit(broker, ["ECHO 50"] * 3, stream=True)
    hired.engine.allowed = 10
    await eventually(lambda: hired.engine.taken == 10, "some steps")
    hired.worker.stop()
    if second_stop:
        hired.worker.stop()
    await hired.ended()
    assert hired.engine.closed.is_set()
    for rid in rids:
        found = await record(broker, rid)
        # Released, in a new epoch, and nothing is counted against it. Twice, where a read of ours was still
        # open and was given it.
        assert (found.state, found.owner, found.epoch in (2, 3)) == ("queued", "", True)
        assert (found.attempts, found.crashes) == (1, 0)
    assert await broker.cards() == []
    await hire()
    for answer in await ends(broker, rids):
        assert (answer.state, answer.text, answer.attempt, answer.worker) == ("done", echo(50), 2, "w2")


async def test_what_has_not_begun_its_text_goes_back_though_it_may_not_be_begun_anew(
    broker: Broker, hire: Hire
) -> None:
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=0.0)
    shown, silent = await submit(broker, ["ECHO 500"] * 2, stream=True, on_restart="fail")
    hired.engine.allowed = 3
    await eventually_so(lambda: has_text(broker, shown), "some text")
    await broker.cancel([silent], "default")
    (silent,) = await submit(broker, [SLOW], stream=True, on_restart="fail")
    await eventually(hired.engine.preparing.is_set, "a prompt that is slow")
    hired.worker.stop()
    await eventually_so(lambda: _is_queued(broker, silent), "its release")
    answer = await end(broker, shown)
    assert (answer.state, answer.error and answer.error.error().retryable) == ("failed", True)


async def _is_queued(broker: Broker, rid: str) -> bool:
    return (await record(broker, rid)).state == "queued"


async def test_what_it_never_heard_of_goes_back_with_the_rest(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1))
    await submit(broker, ["ECHO 2"])
    await eventually(lambda: len(hired.engine.added) == 1, "a full batch")
    rids = await submit(broker, ["ECHO 2"] * 2)
    # Replies that were lost: one request was given to it, another one begun in its name.
    _, begun = await broker.read("w1", ["normal"], 2, block_ms=None)
    await broker.start("w1", [begun], Start(worker="w1", model="m"))
    # Or it would find them in time.
    hired.worker._consumer._audit_s = 3600.0
    hired.engine.is_open = True
    await hired.drained()
    for rid in rids:
        found = await record(broker, rid)
        assert (found.state, found.owner, found.crashes) == ("queued", "", 0)
    assert raw.xinfo_consumers(Keys("q").stream("normal"), "w") == [], "nobody remembers it"


async def test_answers_that_are_complete_are_told_though_the_drain_is_in_a_hurry(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hold_finishes(monkeypatch)
    hired = await hire(drain_timeout_s=3600.0)
    rids = await submit(broker, ["ECHO 2"] * 3)
    await eventually(lambda: hired.worker._publisher.held == 3, "their turn")
    await eventually(lambda: not hired.worker._publisher.unfinished(), "their ends")
    hired.worker.stop()
    hired.worker.stop()
    await eventually(lambda: hired.worker.vitals.state == "draining", "the drain")
    told.set()
    await hired.ended()
    assert {(answer.text, answer.attempt) for answer in await ends(broker, rids)} == {(echo(2), 1)}


async def test_a_drain_does_not_wait_for_a_prompt_that_never_comes_ready(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfleet_worker.worker.LAST_WORDS_S", 0.2)
    hired = await hire(drain_timeout_s=0.05)
    (rid,) = await submit(broker, [SLOW])
    await eventually(hired.engine.preparing.is_set, "a prompt that is slow")
    await hired.drained()
    found = await record(broker, rid)
    assert (found.state, found.crashes) == ("queued", 0)
    assert hired.worker.abandoned


async def test_asked_through_redis_it_drains(broker: Broker, hire: Hire, raw: redis.Redis) -> None:
    hired = await hire(GatedEngine(is_open=False), lease_s=2.0)
    (running,) = await submit(broker, ["ECHO 3"])
    await eventually(lambda: hired.engine.added == [running], "its turn")
    raw.hset(Keys("q").control, "drain:another", "1")
    raw.hset(Keys("q").control, "drain:w1", "1")
    await eventually(lambda: hired.worker.vitals.state == "draining", "the drain")
    (waiting,) = await submit(broker, ["ECHO 3"])
    hired.engine.is_open = True
    await hired.ended()
    assert (await end(broker, running)).text == echo(3)
    assert (await record(broker, waiting)).state == "queued"
    # The next one of this name would drain at once.
    assert raw.hgetall(Keys("q").control).keys() >= {b"drain:another"}
    assert not raw.hexists(Keys("q").control, "drain:w1")


async def test_idle_too_it_drains_when_asked_through_redis(hire: Hire, raw: redis.Redis) -> None:
    hired = await hire(lease_s=2.0)
    raw.hset(Keys("q").control, "drain:w1", "1")
    await hired.ended()
