"""Whole workers in this process, on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from eventually import eventually
from gated_engine import SLOW, GatedEngine
from hired import Hired, end, ends, events, eventually_so, record, submit, text_of
from lossy_proxy import LossyProxy
from streamfleet_common.broker import Broker
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.keys import LETTERS, Keys
from streamfleet_common.schemas import Envelope, GenerateRequest, Retry, Start, new_rid
from streamfleet_common.scripts import Script, ScriptName
from streamfleet_common.submissions import Submission
from streamfleet_worker.worker import Worker

Hire = Callable[..., Awaitable[Hired]]


def echo(count: int) -> str:
    return " ".join(f"tok{i}" for i in range(count))


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client, to see what is really there."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


async def polled_again(hired: Hired) -> None:
    """Wait until the worker has looked for work, or found no room for it, twice more."""
    consumer = hired.worker._consumer
    for _ in range(2):
        last = consumer.polled_at
        await eventually(lambda: consumer.polled_at != last, "a poll")  # noqa: B023


async def states(broker: Broker, rids: list[str]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for found in await broker.status(rids, "default"):
        assert found is not None
        counted[found.state] = counted.get(found.state, 0) + 1
    return counted


# --- serving


async def test_answers_streams_and_one_shots(broker: Broker, hire: Hire) -> None:
    hired = await hire()
    (stream,) = await submit(broker, ["ECHO 20"], stream=True)
    (one_shot,) = await submit(broker, ["just this"])
    answers = await ends(broker, [stream, one_shot])
    assert [answer.text for answer in answers] == [echo(20), "just this"]
    assert {(answer.worker, answer.model, answer.attempt) for answer in answers} == {("w1", "scripted", 1)}
    logged = await events(broker, stream)
    assert isinstance(logged[0], Start)
    assert text_of(logged) == echo(20)
    assert answers[0].last_seq == len(logged) - 2
    await hired.drained()
    assert hired.metric("request_success_total", finished_reason="eos") == 2
    assert hired.metric("generation_tokens_total") == 21
    # A one-shot request has a first token too, though nobody is told of it.
    assert hired.metric("time_to_first_token_seconds_count") == 2
    assert hired.metric("request_queue_time_seconds_count") == 2
    assert hired.metric("num_requests_running") == 0


async def test_nothing_is_held_beyond_free_capacity(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4), block_ms=50)
    rids = await submit(broker, ["ECHO 3"] * 20)
    await eventually(lambda: len(hired.engine.added) == 4, "a full batch")
    await polled_again(hired)
    assert await states(broker, rids) == {"running": 4, "queued": 16}
    depth = await broker.depth()
    assert (depth.queued, depth.running) == (16, 4)
    hired.engine.is_open = True
    assert {answer.text for answer in await ends(broker, rids)} == {echo(3)}
    assert hired.engine.most_held <= 4
    assert sorted(hired.engine.added) == sorted(rids)


async def test_nor_while_prompts_are_slow_to_prepare(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=4))
    slow = await submit(broker, [SLOW] * 4)
    rest = await submit(broker, ["ECHO 3"] * 12)
    await eventually(hired.engine.preparing.is_set, "a prompt that is slow")
    await eventually_so(lambda: _has_no_running(broker, rest), "all the rest waits")
    assert hired.worker._intake.room() <= 3
    assert (await broker.depth()).running <= 4
    hired.engine.prepared.set()
    assert len(await ends(broker, slow + rest)) == 16
    assert hired.engine.most_held <= 4


async def _has_no_running(broker: Broker, rids: list[str]) -> bool:
    return await states(broker, rids) == {"queued": len(rids)}


async def test_two_workers_share_a_queue_and_answer_each_request_once(broker: Broker, hire: Hire) -> None:
    first, second = await hire(), await hire()
    rids = await submit(broker, ["ECHO 20"] * 64, stream=True)
    answers = await ends(broker, rids)
    assert {answer.text for answer in answers} == {echo(20)}
    assert {answer.worker for answer in answers} == {"w1", "w2"}
    assert sorted(first.engine.added + second.engine.added) == sorted(rids)
    for rid in rids:
        assert text_of(await events(broker, rid)) == echo(20)
    await eventually_so(lambda: _is_empty(broker), "an empty queue")


async def _is_empty(broker: Broker) -> bool:
    depth = await broker.depth()
    return (depth.queued, depth.running) == (0, 0)


async def test_a_burst_does_not_land_on_one_of_two_idle_workers(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    crew = [await hire(GatedEngine(is_open=False)) for _ in range(2)]
    for hired in crew:
        hired.worker._consumer.share_with(2)  # as they learn from the cards, every few seconds
    await eventually(lambda: raw.info("clients")["blocked_clients"] == 2, "two idle workers")
    await submit(broker, ["ECHO 2"] * 8)
    await eventually(lambda: sum(len(hired.engine.added) for hired in crew) == 8, "all taken")
    assert min(len(hired.engine.added) for hired in crew) >= 3


async def test_workers_learn_from_the_cards_how_many_they_are(hire: Hire) -> None:
    await hire()
    second = await hire()
    await eventually(lambda: second.worker._consumer._peers == 2, "the second knows the first")


async def test_an_idle_worker_asks_redis_little(hire: Hire, raw: redis.Redis) -> None:
    hired = await hire(block_ms=100)
    await polled_again(hired)
    raw.config_resetstat()
    polls = 4
    for _ in range(polls // 2):
        await polled_again(hired)
    calls = {name: stats["calls"] for name, stats in raw.info("commandstats").items()}
    # A poll is a look, which asks each stream but that of suspects or all, and a wait.
    assert calls["cmdstat_xreadgroup"] <= (polls + 1) * (len(LETTERS) + 1)
    assert calls["cmdstat_evalsha"] <= polls + 4, (
        "an announcement, a renewal or a sweep may fall into the time"
    )


# --- faults of single requests


async def test_requests_fail_alone(broker: Broker, hire: Hire) -> None:
    await hire(GatedEngine(max_batch_size=16, max_seq_len=2100))
    prompts = {
        "FAIL": "generation_failed",
        "BREAK": "generation_failed",
        "ODD": "generation_failed",
        "word " * 200: "too_long",
    }
    rids = await submit(broker, list(prompts))
    streams = await submit(broker, list(prompts), stream=True)
    good = await submit(broker, ["ECHO 30"] * 4, stream=True)
    for answer, code in zip(await ends(broker, rids + streams), [*prompts.values()] * 2, strict=True):
        assert (answer.state, answer.error and answer.error.code) == ("failed", code)
    for rid, answer in zip(good, await ends(broker, good), strict=True):
        assert (answer.state, answer.text) == ("done", echo(30))
        assert text_of(await events(broker, rid)) == echo(30)


async def test_the_prompt_is_never_logged(
    broker: Broker, hire: Hire, capsys: pytest.CaptureFixture[str]
) -> None:
    await hire()
    (rid,) = await submit(broker, ["BREAK"])
    answer = await end(broker, rid)
    assert answer.error is not None
    assert "KeyError" in answer.error.message
    said = capsys.readouterr().out
    assert rid in said
    assert "BREAK" not in said


async def test_a_payload_that_is_none_fails_with_a_reason(broker: Broker, hire: Hire) -> None:
    hired = await hire()
    for payload, code in ((b"garbage", "undecodable"), (b"\x82\xa1v\x01\xa3rid\x07", "invalid_request")):
        envelope = Envelope(request=GenerateRequest(prompt="x"), stream=True)
        await broker.submit([Submission(envelope, payload, "digest", 1)])
        answer = await end(broker, envelope.rid)
        assert (answer.state, answer.error and answer.error.code) == ("failed", code)
        assert hired.metric("request_failure_total", error_type=code) == 1
    assert (await end(broker, (await submit(broker, ["still here"]))[0])).text == "still here"


async def test_entries_that_no_record_knows_go_to_the_dead_letter(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    hired = await hire()
    keys = Keys("q")
    raw.xadd(keys.stream("high"), {"anything": b"\xff\x00"})
    raw.xadd(keys.stream("normal"), {"r": "0" * 34, "p": "x"})
    raw.xadd(keys.stream("bulk"), {"r": b"\xff" * 34})
    await eventually_so(lambda: _dead(broker, 3), "three dead letters")
    assert (await end(broker, (await submit(broker, ["still here"]))[0])).text == "still here"
    assert hired.metric("dead_letters_total") == 3
    assert raw.xlen(keys.stream("high")) == 0


async def _dead(broker: Broker, count: int) -> bool:
    return (await broker.depth()).dead == count


async def test_what_expired_in_the_queue_costs_no_engine_time(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    (late,) = await submit(broker, ["ECHO 3"], deadline_ms=1)
    accepted_at_ms = (await record(broker, late)).accepted_at_ms
    await eventually(
        lambda: raw.time()[0] * 1000 + raw.time()[1] // 1000 > accepted_at_ms + 1, "its deadline"
    )
    hired = await hire()
    (good,) = await submit(broker, ["ECHO 3"])
    assert [answer.state for answer in await ends(broker, [late, good])] == ["expired", "done"]
    assert hired.engine.added == [good]
    assert hired.metric("request_failure_total", error_type="deadline_exceeded") == 1


# --- cancellation


async def test_cancelling_a_running_stream_frees_its_row_at_the_next_emit(broker: Broker, hire: Hire) -> None:
    # No renewal helps here.
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1))
    hired.worker._leases._moving = lambda: False
    (stream,) = await submit(broker, ["ECHO 1000"], stream=True)
    hired.engine.allowed = 3
    await eventually_so(lambda: _has_text(broker, stream), "some text")
    assert await broker.cancel([stream], "default") == ["cancelled"]
    (following,) = await submit(broker, ["ECHO 2"])
    hired.engine.allowed += 1
    await eventually(lambda: hired.engine.cancelled == [stream], "the engine forgets it")
    hired.engine.is_open = True
    assert (await end(broker, following)).state == "done"
    assert len(text_of(await events(broker, stream)).split()) <= 3
    assert hired.metric("fenced_writes_total") == 1


async def _has_text(broker: Broker, rid: str) -> bool:
    return bool(text_of(await events(broker, rid)))


async def test_cancelling_a_running_one_shot_frees_its_row_at_the_next_renewal(
    broker: Broker, hire: Hire
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1), lease_s=2.0)
    (one_shot,) = await submit(broker, ["ECHO 1000"])
    await eventually(lambda: hired.engine.added == [one_shot], "its turn")
    await broker.cancel([one_shot], "default")
    (following,) = await submit(broker, ["ECHO 2"])
    await eventually(lambda: hired.engine.added == [one_shot, following], "the next one's turn")
    assert hired.engine.cancelled == [one_shot]
    hired.engine.is_open = True
    assert (await end(broker, following)).state == "done"
    assert (await end(broker, one_shot)).state == "cancelled"


async def test_cancelled_while_being_prepared_it_never_reaches_the_engine(broker: Broker, hire: Hire) -> None:
    hired = await hire(lease_s=2.0)
    (slow,) = await submit(broker, [SLOW])
    await eventually(hired.engine.preparing.is_set, "a prompt that is slow")
    await broker.cancel([slow], "default")
    await eventually(lambda: hired.worker._publisher.held == 0, "the loss")
    hired.engine.prepared.set()
    (following,) = await submit(broker, ["ECHO 2"])
    assert (await end(broker, following)).state == "done"
    assert hired.engine.added == [following]


# --- Redis away, slow, or not what it was


async def test_a_frozen_redis_does_not_stop_the_engine_and_nothing_is_lost(
    broker: Broker, hire: Hire, server: EmbeddedBroker
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4))
    rids = await submit(broker, ["ECHO 400"] * 4, stream=True)
    hired.engine.allowed = 5
    await eventually(lambda: hired.engine.taken == 5, "some steps")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        hired.engine.is_open = True
        await eventually(lambda: hired.engine.taken >= 400, "all steps, with Redis frozen")
        assert hired.worker._publisher.held == 4
    finally:
        os.kill(server.pid, signal.SIGCONT)
    for rid, answer in zip(rids, await ends(broker, rids), strict=True):
        logged = await events(broker, rid)
        assert text_of(logged) == answer.text == echo(400)
        assert answer.last_seq == len(logged) - 2 < 30, "what waited was merged"


async def test_answers_that_cannot_be_told_stop_the_reading(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()
    plain = Broker.finish

    async def finish(self: Broker, *calls: object) -> list[bool]:
        await told.wait()
        return await plain(self, *calls)  # type: ignore[arg-type]

    monkeypatch.setattr(Broker, "finish", finish)
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
        await eventually_so(lambda: _is_empty(broker), "an empty queue")
        await hired.dismiss()
        await onlooker.connections.close()


# --- start and end


async def test_nothing_is_shown_or_read_before_the_engine_is_built(
    broker: Broker, redis_url: str, raw: redis.Redis
) -> None:
    (rid,) = await submit(broker, ["early"])
    hired = Hired(redis_url, "w1", GatedEngine())
    built = asyncio.Event()
    loop = asyncio.get_running_loop()

    def build() -> GatedEngine:
        asyncio.run_coroutine_threadsafe(built.wait(), loop).result()
        return hired.engine

    hired.worker = Worker(Broker(hired.connections, "q"), build, name="w1", max_queue_depth=77, version="0")
    starting = asyncio.create_task(hired.worker.start())
    await eventually(lambda: hired.worker._engine_thread.alive, "the building")
    assert await broker.cards() == []
    assert (await record(broker, rid)).state == "queued"
    assert raw.xinfo_groups(Keys("q").stream("normal")) == []
    assert hired.worker.vitals.unready() == "starting"
    assert hired.worker.vitals.unhealthy() is None
    built.set()
    assert await starting
    hired.running = asyncio.create_task(hired.worker.run())
    (card,) = await broker.cards()
    assert (card.worker, card.model, card.state) == ("w1", "scripted", "ready")
    assert (card.limits.max_queue_depth, card.limits.max_batch_size) == (77, 8)
    assert (await end(broker, rid)).text == "early"
    await hired.dismiss()


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
    await eventually_so(lambda: _has_text(broker, shown), "some text")
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
    hired.worker._intake.room = lambda: 0  # type: ignore[method-assign]
    hired.engine.is_open = True
    await hired.drained()
    for rid in rids:
        found = await record(broker, rid)
        assert (found.state, found.owner, found.crashes) == ("queued", "", 0)
    assert raw.xinfo_consumers(Keys("q").stream("normal"), "w") == [], "nobody remembers it"


async def test_answers_that_are_complete_are_told_though_the_drain_is_in_a_hurry(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()
    plain = Broker.finish

    async def finish(self: Broker, *calls: object) -> list[bool]:
        await told.wait()
        return await plain(self, *calls)  # type: ignore[arg-type]

    monkeypatch.setattr(Broker, "finish", finish)
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


async def test_with_redis_nearly_full_it_lets_nobody_in(
    broker: Broker, hire: Hire, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfleet_worker.presence.ANNOUNCE_S", 0.05)
    hired = await hire()
    used = raw.info("memory")["used_memory"]
    try:
        raw.config_set("maxmemory", used * 10 // 9)
        envelope = Envelope(request=GenerateRequest(prompt="x"))

        async def refused() -> bool:
            (submitted,) = await broker.submit(
                [Submission.of(envelope.model_copy(update={"rid": new_rid()}))]
            )
            return (submitted.outcome, submitted.reason) == ("full", "memory")

        await eventually_so(refused, "a refusal")
    finally:
        raw.config_set("maxmemory", 0)
    assert hired.worker.vitals.unready() is None


# --- the engine dies, or hangs


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
    hired = await hire(GatedEngine(is_open=False), drain_timeout_s=3600.0, lease_s=0.4)
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
