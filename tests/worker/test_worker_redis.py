"""Workers whose Redis is away, slow, or not what it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest
import redis

from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, end, ends, events, eventually_so, submit, text_of
from hired_view import echo, is_empty, polled_again
from late_finishes import hold_finishes
from lossy_proxy import LossyProxy
from streamfleet_common.broker import Broker
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.keys import Keys
from streamfleet_common.scripts import Script, ScriptName

Hire = Callable[..., Awaitable[Hired]]


async def test_a_frozen_redis_does_not_stop_the_engine_and_nothing_is_lost(
    broker: Broker, hire: Hire, server: EmbeddedBroker
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4))

    def lag_s() -> float:
        return hired.metric("publisher_lag_seconds", worker="0")

    rids = await submit(broker, ["ECHO 400"] * 4, stream=True)
    hired.engine.allowed = 5
    await eventually(lambda: hired.engine.taken == 5, "some steps")
    await eventually(lambda: lag_s() == 0, "all of them in Redis")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        hired.engine.is_open = True
        await eventually(lambda: hired.engine.taken >= 400, "all steps, with Redis frozen")
        assert hired.worker._publisher.held == 4
        # What was brought forth by now waits from now on at least.
        now = time.perf_counter()
        await eventually(lambda: lag_s() > 0.2, "events that wait")
        assert time.perf_counter() - now <= lag_s()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    for rid, answer in zip(rids, await ends(broker, rids), strict=True):
        logged = await events(broker, rid)
        assert text_of(logged) == answer.text == echo(400)
        assert answer.last_seq == len(logged) - 2 < 30, "what waited was merged"
    await eventually(lambda: lag_s() == 0, "all of it in Redis")


async def test_answers_that_cannot_be_told_stop_the_reading(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hold_finishes(monkeypatch)
    hired = await hire(GatedEngine(max_batch_size=4), block_ms=50)
    rids = await submit(broker, ["ECHO 2"] * 30)
    await eventually(lambda: hired.worker._publisher.held == 8, "two batches")
    await polled_again(hired)
    assert len(hired.engine.added) == 8
    told.set()
    assert len(await ends(broker, rids)) == 30


@pytest.mark.parametrize("script", ["start", "emit", "finish"])
async def test_a_lost_reply_loses_and_doubles_nothing(
    broker: Broker, hire: Hire, redis_url: str, script: ScriptName
) -> None:
    async with LossyProxy(redis_url) as proxy:
        hired = await hire(url=proxy.url, block_ms=50, lease_s=2.0)
        await ends(broker, await submit(broker, ["ECHO 2"], stream=True))  # every script is known by its name
        hired.engine.added.clear()
        proxy.lose_reply(Script.load(script).sha.encode(), 2)
        rids = await submit(broker, ["ECHO 50"] * 6, stream=True)
        answers = await ends(broker, rids)
        assert proxy.lost.is_set()
        assert {answer.text for answer in answers} == {echo(50)}
        assert {answer.attempt for answer in answers} == {1}
        for rid in rids:
            assert text_of(await events(broker, rid)) == echo(50)
        assert sorted(hired.engine.added) == sorted(rids)
        await hired.dismiss()
        assert hired.metric("fenced_writes_total") == 0


async def test_a_read_whose_reply_was_lost_is_answered_all_the_same(
    broker: Broker, hire: Hire, redis_url: str
) -> None:
    async with LossyProxy(redis_url) as proxy:
        hired = await hire(url=proxy.url, block_ms=200)
        await polled_again(hired)
        proxy.lose_reply(b"XREADGROUP")
        rids = await submit(broker, ["ECHO 5"] * 8)
        assert {answer.attempt for answer in await ends(broker, rids)} == {1}
        assert sorted(hired.engine.added) == sorted(rids)
        await hired.dismiss()


async def test_all_connections_cut_again_and_again(broker: Broker, hire: Hire, redis_url: str) -> None:
    async with LossyProxy(redis_url) as proxy:
        crew = [await hire(GatedEngine(is_open=False), url=proxy.url) for _ in range(2)]
        rids = await submit(broker, ["ECHO 60"] * 24, stream=True)
        for cut in range(1, 8):
            for hired in crew:
                hired.engine.allowed += 10
            await eventually(lambda: any(h.engine.taken >= 10 * cut for h in crew), "some steps")  # noqa: B023
            proxy.cut()
        for hired in crew:
            hired.engine.is_open = True
        answers = await ends(broker, rids)
        assert {(answer.text, answer.attempt) for answer in answers} == {(echo(60), 1)}
        for rid in rids:
            assert text_of(await events(broker, rid)) == echo(60)
        for hired in crew:
            await hired.dismiss()


async def test_connections_killed_by_the_server(broker: Broker, hire: Hire, raw: redis.Redis) -> None:
    await hire()
    for _ in range(5):
        raw.client_kill_filter(_type="normal", skipme=True)
        (rid,) = await submit(broker, ["ECHO 40"], stream=True)
        raw.client_kill_filter(_type="normal", skipme=True)
        assert (await end(broker, rid)).text == echo(40)
        assert text_of(await events(broker, rid)) == echo(40)


async def test_everything_flushed_under_a_waiting_read(broker: Broker, hire: Hire, raw: redis.Redis) -> None:
    hired = await hire(GatedEngine(is_open=False), lease_s=2.0)
    (gone,) = await submit(broker, ["ECHO 1000"], stream=True)
    await eventually(lambda: hired.engine.added == [gone], "its turn")
    await eventually(lambda: raw.info("clients")["blocked_clients"] == 1, "a waiting read")
    raw.flushall()
    await eventually(lambda: hired.engine.cancelled == [gone], "the engine forgets what nobody knows")
    hired.engine.is_open = True
    (rid,) = await submit(broker, ["after"])
    assert (await end(broker, rid)).text == "after"
    assert hired.running is not None
    assert not hired.running.done()


async def test_a_lane_deleted_under_a_waiting_read(broker: Broker, hire: Hire, raw: redis.Redis) -> None:
    await hire()
    for _ in range(3):
        await eventually(lambda: raw.info("clients")["blocked_clients"] == 1, "a waiting read")
        raw.delete(Keys("q").stream("normal"))
        (rid,) = await submit(broker, ["after"])
        assert (await end(broker, rid)).text == "after"


async def test_a_server_killed_and_restarted(hire: Hire) -> None:
    with EmbeddedBroker(extra_args=("--appendonly", "yes", "--appendfsync", "always")) as server:
        hired = await hire(GatedEngine(is_open=False, max_batch_size=4), url=server.url)
        onlooker = Hired(server.url, "onlooker", GatedEngine())
        broker = Broker(onlooker.connections, "q")
        rids = await submit(broker, ["ECHO 100"] * 10, stream=True)
        hired.engine.allowed = 20
        await eventually(lambda: hired.engine.taken == 20, "some steps")
        server.kill()
        hired.engine.allowed = 60
        await eventually(lambda: hired.engine.taken == 60, "steps without a server")
        server.restart()
        hired.engine.is_open = True
        answers = await ends(broker, rids)
        assert {(answer.text, answer.attempt) for answer in answers} == {(echo(100), 1)}
        for rid in rids:
            assert text_of(await events(broker, rid)) == echo(100)
        await eventually_so(lambda: is_empty(broker), "an empty queue")
        await hired.dismiss()
        await onlooker.connections.close()
