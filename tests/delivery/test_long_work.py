"""Requests that run for long, fail for a while, or were trimmed away: each has one owner and one end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, end, ends, eventually_so, record, submit
from hired_view import echo
from server_view import assert_drained, events_of, pending_in
from streamfleet_common.broker import Broker
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.keys import LETTERS, Keys
from streamfleet_common.schemas import Envelope, GenerateRequest, Retry
from streamfleet_common.submissions import Submission
from streamfleet_producer import Client

Hire = Callable[..., Awaitable[Hired]]


async def test_a_long_request_is_run_once_however_often_its_lease_would_have_run_out(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    # The proportion of a lease of 2 s and a job of 20 s.
    lease_s, leases = 0.4, 10
    crew = [await hire(lease_s=lease_s) for _ in range(2)]
    (rid,) = await submit(broker, [f"ECHO {leases * 10 + 1} TICK {lease_s * 100:.0f}"], stream=True)
    owners: set[str] = set()
    sweeps_at: set[object] = set()

    async def has_ended() -> bool:
        owners.update(entry["owner"] for entry in pending_in(raw, "normal"))
        sweeps_at.add(raw.hget(broker.keys.sweep, "last"))
        return (await record(broker, rid)).end is not None

    await eventually_so(has_ended, "its end")
    answer = await end(broker, rid)
    took_ms = answer.ended_at_ms - answer.started_at_ms
    assert took_ms >= leases * lease_s * 1000, "as long as it was to take"
    assert (answer.text, answer.attempt, answer.of) == (echo(101), 1, 1)
    assert owners == {answer.worker}
    assert len(sweeps_at) > leases, "others have looked for what was lost"
    assert sum(place.endswith("-0") for place in events_of(raw, rid)) == 1, "one start"
    assert sum(hired.engine.added.count(rid) for hired in crew) == 1


async def test_a_retry_waits_its_backoff_and_then_keeps_its_old_place(broker: Broker, hire: Hire) -> None:
    backoff_ms = 400
    hired = await hire(GatedEngine(max_batch_size=1), lease_s=2.0, block_ms=50)
    (retried,) = await submit(broker, ["ECHO 1 RETRY@0:1"], retry=Retry(backoff_ms=backoff_ms))

    async def has_failed() -> bool:
        return (await record(broker, retried)).state == "queued" and hired.engine.added == [retried]

    await eventually_so(has_failed, "its failure")
    later = await submit(broker, ["ECHO 3 TICK 50"] * 20)
    answers = await ends(broker, [retried, *later])
    assert {answer.state for answer in answers} == {"done"}
    order = hired.engine.added
    assert order[0] == retried
    again_at = order.index(retried, 1)
    # It let others go first while it waited, and none of those who came later once it had waited.
    assert 1 < again_at < len(later), "it held nobody up, and was not put at the end"
    assert [rid for rid in order if rid != retried] == later
    second = answers[0]
    assert second.attempt == 2
    assert second.started_at_ms - (await record(broker, retried)).accepted_at_ms >= backoff_ms
    assert (await record(broker, retried)).crashes == 0


async def test_trimmed_away_by_hand_each_request_ends_and_the_alarm_counts(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=10), lease_s=0.6)
    running = await submit(broker, ["ECHO 3"] * 10, stream=True, deadline_ms=20_000)
    await eventually(lambda: len(hired.engine.added) == 10, "a full batch")
    waiting = await submit(broker, ["ECHO 3"] * 10, deadline_ms=20_000)
    for stream in LETTERS:
        raw.xtrim(Keys("q").stream(stream), maxlen=0, approximate=False)
    # The sweep finds them, long before their deadlines.
    for answer in await ends(broker, waiting):
        assert (answer.state, answer.error and answer.error.error().retryable) == ("failed", True)
        assert "lost this request" in (answer.error.message if answer.error else "")
    hired.engine.is_open = True
    assert {(one.state, one.text) for one in await ends(broker, running)} == {("done", echo(3))}
    await eventually(lambda: hired.metric("swept_total", outcome="failed") == 10, "the alarm")
    assert hired.engine.added == running
    assert_drained(raw)


async def test_waiting_and_cancelled_it_costs_no_step_and_running_it_frees_its_row(
    broker: Broker, hire: Hire
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4), lease_s=2.0)
    (running,) = await submit(broker, ["ECHO 50"], n=4)
    await eventually(lambda: hired.engine.added == [running], "a full batch")
    waiting = await submit(broker, ["ECHO 3"] * 100)
    assert await broker.cancel(waiting[10:], "default") == ["cancelled"] * 90
    assert {one.state for one in await ends(broker, waiting[10:])} == {"cancelled"}
    assert (await broker.depth()).open == 11
    # All four answers at once, though nothing is emitted that would be refused.
    await broker.cancel([running], "default")
    await eventually(lambda: len(hired.engine.added) == 5, "four free rows")
    assert hired.engine.cancelled == [running]
    hired.engine.is_open = True
    assert {one.text for one in await ends(broker, waiting[:10])} == {echo(3)}
    assert hired.engine.added == [running, *waiting[:10]], "nothing else was begun"


async def test_a_request_that_fails_does_so_alone(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=8))
    good = await submit(broker, ["ECHO 12"] * 7, stream=True)
    (bad,) = await submit(broker, ["ECHO 12 RAISE@3"], stream=True)
    await eventually(lambda: len(hired.engine.added) == 8, "one batch of all")
    hired.engine.is_open = True
    answer = await end(broker, bad)
    assert (answer.state, answer.attempt) == ("failed", 1)
    assert answer.error is not None
    assert not answer.error.error().retryable
    assert {(one.state, one.text) for one in await ends(broker, good)} == {("done", echo(12))}
    assert hired.worker.vitals.unready() is None
    assert hired.metric("request_failure_total", error_type="generation_failed") == 1


async def test_when_an_engine_dies_nobody_waits_for_a_lease(
    broker: Broker, hire: Hire, redis_url: str
) -> None:
    dying = await hire(GatedEngine(is_open=False), lease_s=3600.0)
    async with Client(redis_url, queue="q") as client:
        once = asyncio.create_task(client.run(GenerateRequest(prompt="ECHO 5"), retry="never"))
        again = asyncio.create_task(client.run(GenerateRequest(prompt="ECHO 5")))
        await eventually(lambda: len(dying.engine.added) == 2, "their turn")
        heir = await hire(lease_s=3600.0)
        dying.engine.broken = RuntimeError("raised in the loop")
        # An error for whoever wants no other try, the answer for whoever does.
        with pytest.raises(GenerationFailed, match="its worker was lost") as caught:
            await once
        assert caught.value.retryable
        answer = await again
        assert (answer.text, answer.attempt, answer.worker) == (echo(5), 2, heir.worker.name)


class Punctual(GatedEngine):
    """Notes what it is asked to do too late."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.late = 0

    def add(self, arrivals: Any) -> None:
        self.late += sum(arrival.deadline_at <= self._clock() for arrival in arrivals.values())
        super().add(arrivals)

    def step(self) -> Any:
        now = self._clock()
        rows = {key: request.arrival.deadline_at for key, request in self._requests.items()}
        step = super().step()
        told = {output.key for output in step.outputs if type(output.event).__name__ == "Tokens"}
        self.late += sum(rows[key] <= now for key in told)
        return step


async def test_a_full_queue_refuses_and_nothing_is_computed_for_nobody(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    engine = Punctual(max_batch_size=1)
    await hire(engine, max_queue_depth=8, lease_s=2.0)
    accepted: list[str] = []
    done = 0
    # 0.16 s each, one at a time: of eight at once, the last cannot be begun in the second that they have.
    for _ in range(2):
        rids, refused = await flood(broker, 100, "ECHO 5 TICK 40", deadline_ms=1000)
        assert (len(rids), refused) == (8, 92)
        assert raw.zcard(broker.keys.open) <= 8
        accepted += rids
        answers = await ends(broker, rids)
        assert {one.state for one in answers} == {"done", "expired"}
        done += sum(one.state == "done" for one in answers)
    assert done >= 2
    assert engine.late == 0, "nothing is begun, and no token made, after a deadline"
    assert set(engine.added) < set(accepted), "some have waited in vain, and cost nothing"
    assert_drained(raw)


async def flood(broker: Broker, count: int, prompt: str, **fields: Any) -> tuple[list[str], int]:
    """Submit many at once; gives the ids of those that came in, and how many did not."""
    submissions = [
        Submission.of(Envelope(request=GenerateRequest(prompt=prompt), **fields)) for _ in range(count)
    ]
    rids, refused = [], 0
    for submission, outcome in zip(submissions, await broker.submit(submissions), strict=True):
        if outcome.outcome == "accepted":
            assert outcome.depth <= 8
            rids.append(submission.envelope.rid)
        else:
            assert (outcome.outcome, outcome.reason, outcome.limit) == ("full", "requests", 8)
            assert outcome.retry_after_s > 0
            refused += 1
    return rids, refused


async def test_readers_that_are_slow_hold_nobody_up(broker: Broker, hire: Hire, redis_url: str) -> None:
    streams = 64
    hired = await hire(GatedEngine(is_open=False, max_batch_size=streams + 1))
    async with Client(redis_url, queue="q") as slow, Client(redis_url, queue="q") as quick:
        requests = [GenerateRequest(prompt="ECHO 100")] * streams
        readers = [slow.stream(request, max_buffered_frames=4) for request in requests]
        for reader in readers:
            await reader.__aenter__()
        await eventually(lambda: len(hired.engine.added) == streams, "all of them")
        running = asyncio.create_task(quick.run(GenerateRequest(prompt="ECHO 100")))
        await eventually(lambda: len(hired.engine.added) == streams + 1, "one more")
        taken = hired.engine.taken
        hired.engine.is_open = True
        # Everything is brought forth and told while they have read nothing yet.
        assert (await running).text == echo(100)
        rids = [reader.id for reader in readers]
        assert {one.text for one in await ends(broker, rids)} == {echo(100)}
        assert hired.engine.taken - taken <= 101, "a token of each in every step"
        for reader in readers:
            text = "".join([delta.text async for delta in reader])
            assert text == echo(100)
            await reader.__aexit__(None, None, None)
