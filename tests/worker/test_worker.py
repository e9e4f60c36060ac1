"""Whole workers in this process, on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import redis

from eventually import PATIENCE_S, eventually
from gated_engine import SLOW, GatedEngine
from hired import Hired, end, ends, events, eventually_so, record, submit, text_of
from hired_view import echo, has_text, is_empty, polled_again, states
from streamfleet_common.broker import Broker
from streamfleet_common.errors import ModelLoadFailed
from streamfleet_common.keys import LETTERS, Keys
from streamfleet_common.schemas import Envelope, GenerateRequest, Start, new_rid
from streamfleet_common.submissions import Submission
from streamfleet_worker.worker import Worker

Hire = Callable[..., Awaitable[Hired]]


# --- start


async def test_nothing_is_shown_or_read_before_the_engine_is_built_but_the_queue_has_its_name(
    broker: Broker, redis_url: str, raw: redis.Redis
) -> None:
    (rid,) = await submit(broker, ["early"])
    assert await broker.queues() == []
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
    assert await broker.queues() == ["q"], "so callers wait"
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


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_worker_that_cannot_start_leaves_no_new_queue_unless_somebody_waits_there(
    broker: Broker, redis_url: str, raw: redis.Redis, waiting: int, is_stopped: bool
) -> None:
    hired = Hired(redis_url, "w1", GatedEngine())
    loop = asyncio.get_running_loop()

    def build() -> GatedEngine:
        names.append(asyncio.run_coroutine_threadsafe(broker.queues(), loop).result())
        if waiting:
            asyncio.run_coroutine_threadsafe(submit(broker, ["x"]), loop).result()
        if is_stopped:
            loop.call_soon_threadsafe(worker.stop)
            return hired.engine
        raise ValueError("no such file")

    names: list[list[str]] = []
    before = int(raw.time()[0]) * 1000
    worker = Worker(Broker(hired.connections, "q"), build, name="w1", max_queue_depth=7, version="0")
    if is_stopped:
        assert not await worker.start()
    else:
        with pytest.raises(ModelLoadFailed):
            await worker.start()
    assert names == [["q"]]
    left = raw.hgetall("streamfleet:queues")
    assert list(left) == ([b"q"] if waiting else [])
    assert all(before <= int(at) <= int(raw.time()[0]) * 1000 + 1000 for at in left.values())
    await hired.dismiss()


async def test_a_worker_that_cannot_start_leaves_the_name_of_a_queue_that_was_there(
    broker: Broker, redis_url: str, raw: redis.Redis
) -> None:
    raw.hset("streamfleet:queues", "q", "7")
    hired = Hired(redis_url, "w1", GatedEngine())

    def build() -> GatedEngine:
        raise ValueError("no such file")

    worker = Worker(Broker(hired.connections, "q"), build, name="w1", max_queue_depth=7, version="0")
    with pytest.raises(ModelLoadFailed):
        await worker.start()
    assert await broker.queues() == ["q"]
    await hired.dismiss()


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
    assert hired.metric("num_requests_running", worker="0") == 0


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


async def test_what_a_busy_event_loop_has_not_heard_of_waits_too(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False))
    (rid,) = await submit(broker, ["ECHO 1"])
    await eventually(lambda: hired.engine.added == [rid], "its turn")
    hired.engine.allowed = 1
    limit = time.monotonic() + PATIENCE_S
    while hired.worker._engine_thread.unheard_since is None and time.monotonic() < limit:
        time.sleep(0.001)  # noqa: ASYNC251 (holding the event loop up is the point)
    before = hired.metric("publisher_lag_seconds", worker="0")
    assert 0 < before < hired.metric("publisher_lag_seconds", worker="0")
    await eventually(lambda: hired.metric("publisher_lag_seconds", worker="0") == 0, "its end in Redis")
    assert (await end(broker, rid)).state == "done"


async def test_two_workers_share_a_queue_and_answer_each_request_once(broker: Broker, hire: Hire) -> None:
    first, second = await hire(), await hire()
    rids = await submit(broker, ["ECHO 20"] * 64, stream=True)
    answers = await ends(broker, rids)
    assert {answer.text for answer in answers} == {echo(20)}
    assert {answer.worker for answer in answers} == {"w1", "w2"}
    assert sorted(first.engine.added + second.engine.added) == sorted(rids)
    for rid in rids:
        assert text_of(await events(broker, rid)) == echo(20)
    await eventually_so(lambda: is_empty(broker), "an empty queue")


async def test_a_burst_does_not_land_on_one_of_two_idle_workers(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    size = 8
    crew = [await hire(GatedEngine(is_open=False, max_batch_size=size)) for _ in range(2)]
    least: list[int] = []
    # On a busy machine one may be held up until the other has come three times, and takes what is left.
    # Without shares, whoever comes first takes all that wakes nobody, every time.
    while max(least, default=0) < 3:
        assert len(least) < 20, least
        for hired in crew:
            hired.engine.is_open = False
            hired.worker._consumer.share_with(2)  # as they learn from the cards, every few seconds
            hired.engine.added.clear()
        await eventually(lambda: raw.info("clients")["blocked_clients"] == 2, "two idle workers")
        rids = await submit(broker, ["ECHO 2"] * size)
        await eventually(lambda: sum(len(hired.engine.added) for hired in crew) == size, "all taken")
        least.append(min(len(hired.engine.added) for hired in crew))
        for hired in crew:
            hired.engine.is_open = True
        await ends(broker, rids)
        await eventually(lambda: all(hired.worker._intake.room() == size for hired in crew), "room again")


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
    await eventually_so(lambda: has_text(broker, stream), "some text")
    assert await broker.cancel([stream], "default") == ["cancelled"]
    (following,) = await submit(broker, ["ECHO 2"])
    hired.engine.allowed += 1
    await eventually(lambda: hired.engine.cancelled == [stream], "the engine forgets it")
    hired.engine.is_open = True
    assert (await end(broker, following)).state == "done"
    assert len(text_of(await events(broker, stream)).split()) <= 3
    assert hired.metric("fenced_writes_total") == 1


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


async def test_when_all_are_cancelled_none_is_shown_as_running(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4), lease_s=2.0)
    rids = await submit(broker, ["ECHO 1000"] * 4)
    hired.engine.allowed = 1
    await eventually(lambda: hired.metric("num_requests_running", worker="0") == 4, "a full batch")
    await broker.cancel(rids, "default")
    # No step comes after it that would say so.
    await eventually(lambda: hired.metric("num_requests_running", worker="0") == 0, "an empty one")
    assert hired.engine.taken == 1


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
