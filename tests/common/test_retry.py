"""Failures that are tried again: after a pause, in the old place, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import (
    DONE,
    START,
    altered,
    begin,
    begin_waiting,
    emission,
    finish,
    retry,
    submission,
)
from server_view import (
    OTHER,
    RID,
    Channel,
    T,
    assert_drained,
    events_of,
    everything,
    fields_of,
    now_ms,
    record_of,
    waiting_in,
)
from silence import lose, sweep, wake
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery
from streamfleet_common.schemas import End, Failure, Lane, Retry

MINUTE_MS = 60_000
FAILURE = End(state="failed", error=Failure(code="generation_failed", message="a bad moment"))


def due_at(raw: Any, rid: str = RID) -> int:
    """When a request waits to be tried again."""
    return int(raw.zscore(f"{T}:later", rid))


@pytest.mark.parametrize("lane", ["high", "normal", "bulk"])
async def test_without_a_pause_it_goes_back_at_once(broker: Broker, raw: Any, lane: Lane) -> None:
    one = submission(rid=RID, lane=lane, stream=True)
    (old,) = await begin(broker, one)
    channel = Channel(raw, RID)
    assert await broker.finish([retry(old, FAILURE)]) == [True]
    record = record_of(raw)
    assert (record.state, record.epoch, record.owner) == ("queued", 2, "")
    assert (record.attempts, record.crashes) == (1, 0)
    assert waiting_in(raw, lane) == []
    assert waiting_in(raw, f"{lane}:again") == [RID]
    assert channel.messages() == []
    assert await broker.finish([finish(old)]) == [False]
    (new,) = await begin_waiting(broker, "w2")
    assert (new.epoch, new.attempts, new.entry.payload) == (3, 2, one.payload)
    assert await broker.finish([finish(new)]) == [True]
    assert events_of(raw) == ["1-0", "3-0", "4-1"]
    assert_drained(raw)


async def test_it_goes_before_the_newcomers(broker: Broker) -> None:
    first, second = await begin(broker, submission(), submission())
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    await broker.finish([retry(first), retry(second)])
    taken = await broker.take("w2", START, streams=["normal:again", "normal"], count=4)
    assert [entry.rid for entry, _ in taken.started] == [first.entry.rid, second.entry.rid, RID, OTHER]


async def test_it_waits_for_its_pause_outside_of_the_streams(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, retry=Retry(backoff_ms=MINUTE_MS))
    (delivery,) = await begin(broker, one)
    meta = fields_of(raw, RID)[8:]
    before = now_ms(raw)
    assert await broker.finish([retry(delivery)]) == [True]
    after = now_ms(raw)
    assert before + MINUTE_MS <= due_at(raw) <= after + MINUTE_MS
    head, _, payload = raw.get(f"{T}:r:{RID}").partition(b"\n")
    assert payload == one.payload
    started = str(delivery.now_ms)
    deadline = delivery.deadline_at_ms
    assert head.decode().split("|") == [f"Q{deadline}", "2", "", "", started, "1", "0", "0", *meta]
    # It is still open, and has its place in the queue.
    assert raw.zrange(f"{T}:open", 0, -1) == [RID.encode()]
    assert raw.hget(f"{T}:tenants", "*") == str(one.tokens).encode()
    assert [raw.xlen(f"{T}:s:{stream}") for stream in ("normal", "normal:again")] == [0, 0]
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert (record.state, record.end) == ("queued", None)
    assert (await broker.submit([one]))[0].outcome == "duplicate"
    assert (await broker.submit([submission("Bye", rid=RID)]))[0].outcome == "conflict"

    # Nobody gets it before its time, and nobody else's time changes that.
    assert await begin_waiting(broker, "w2") == []
    await sweep(broker, raw)
    assert (await broker.take("w2", START, streams=["normal:again", "normal"], count=4)).started == []
    assert raw.zcard(f"{T}:later") == 1


@pytest.mark.parametrize("by", ["sweep", "take"])
async def test_it_comes_back_after_its_pause(broker: Broker, raw: Any, by: str) -> None:
    one = submission(rid=RID, retry=Retry(backoff_ms=MINUTE_MS))
    (delivery,) = await begin(broker, one)
    await broker.finish([retry(delivery)])
    await broker.submit([submission(rid=OTHER)])
    wake(raw)
    if by == "sweep":
        # Also in times of grace: it is nobody's, so nobody is robbed.
        assert (await broker.sweep()).grace
        assert waiting_in(raw, "normal:again") == [RID]
        assert raw.zcard(f"{T}:later") == 0
    taken = await broker.take("w2", START, streams=["normal:again", "normal"], count=4)
    assert [entry.rid for entry, _ in taken.started] == [RID, OTHER]
    again = taken.started[0][1]
    assert isinstance(again, Delivery)
    assert (again.epoch, again.attempts, again.entry.payload) == (4, 2, one.payload)
    assert raw.zcard(f"{T}:later") == 0
    assert b"\n" not in raw.get(f"{T}:r:{RID}")
    assert await broker.finish([finish(again)]) == [True]


async def test_the_pause_doubles(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(attempts=100, backoff_ms=1000))])
    pauses: list[int] = []
    for _ in range(15):
        (delivery,) = await begin_waiting(broker)
        before = now_ms(raw)
        await broker.finish([retry(delivery)])
        took = now_ms(raw) - before
        pause = due_at(raw) - before
        expected = min(1000 * 2 ** len(pauses), 3_600_000)
        assert expected <= pause <= expected + took
        pauses.append(pause)
        wake(raw)
        await sweep(broker, raw)


@pytest.mark.parametrize("backoff_ms", [0, 3 * MINUTE_MS])
@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_it_waits_as_long_as_its_worker_says(
    broker: Broker, raw: Any, backoff_ms: int, attempts: int
) -> None:
    """And not as its own policy does; at each try the same."""
    policy = Retry(attempts=100, backoff_ms=backoff_ms)
    await broker.submit([submission(rid=RID, retry=policy)])
    for attempt in range(1, attempts + 1):
        (delivery,) = await begin_waiting(broker)
        assert delivery.attempts == attempt
        before = now_ms(raw)
        assert await broker.finish([retry(delivery, after_ms=MINUTE_MS)]) == [True]
        assert before + MINUTE_MS <= due_at(raw) <= now_ms(raw) + MINUTE_MS
        # Nobody gets it before.
        await sweep(broker, raw)
        assert await begin_waiting(broker, "w2") == []
        wake(raw)
        await sweep(broker, raw)
    assert record_of(raw).state == "queued"


async def test_it_may_come_again_at_once_whatever_its_policy(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, retry=Retry(backoff_ms=MINUTE_MS)))
    assert await broker.finish([retry(delivery, after_ms=0)]) == [True]
    assert waiting_in(raw, "normal:again") == [RID]
    assert raw.zcard(f"{T}:later") == 0


async def test_it_waits_an_hour_at_most(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    before = now_ms(raw)
    await broker.finish([retry(delivery, after_ms=10**12)])
    assert before + 3_600_000 <= due_at(raw) <= now_ms(raw) + 3_600_000


async def test_each_of_a_batch_waits_as_its_own_worker_says(broker: Broker, raw: Any) -> None:
    first, second, third = await begin(broker, *(submission() for _ in range(3)))
    before = now_ms(raw)
    ends = [retry(first, after_ms=MINUTE_MS), retry(second), retry(third, after_ms=2 * MINUTE_MS)]
    assert await broker.finish(ends) == [True] * 3
    after = now_ms(raw)
    assert waiting_in(raw, "normal:again") == [second.entry.rid]
    for one, pause in ((first, MINUTE_MS), (third, 2 * MINUTE_MS)):
        assert before + pause <= due_at(raw, one.entry.rid) <= after + pause


@pytest.mark.parametrize("attempts", [1, 2, 4])
async def test_a_pause_that_is_said_is_a_try_as_well(broker: Broker, raw: Any, attempts: int) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(attempts=attempts))])
    tries = 0
    while record_of(raw).state == "queued":
        assert tries < 9
        (delivery,) = await begin_waiting(broker)
        tries += 1
        await broker.finish([retry(delivery, FAILURE, after_ms=MINUTE_MS)])
        if raw.zcard(f"{T}:later"):
            wake(raw)
            await sweep(broker, raw)
    assert (tries, record_of(raw).state) == (attempts, "failed")
    assert_drained(raw)


async def test_what_was_shown_and_may_not_begin_anew_fails_whatever_is_said(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True, on_restart="fail"))
    await broker.emit([emission(delivery, 1, b"x")])
    assert await broker.finish([retry(delivery, FAILURE, after_ms=MINUTE_MS)]) == [True]
    assert record_of(raw).state == "failed"
    assert_drained(raw)


async def test_the_last_try_with_a_pause_may_be_told_twice(broker: Broker, raw: Any) -> None:
    """As after a lost reply."""
    (delivery,) = await begin(broker, submission(rid=RID, retry=Retry(attempts=1)))
    for _ in range(2):
        assert await broker.finish([retry(delivery, FAILURE, after_ms=MINUTE_MS)]) == [True]
    assert record_of(raw).state == "failed"
    assert await broker.finish([retry(delivery, DONE, after_ms=MINUTE_MS)]) == [False]


async def test_three_tries_where_the_request_says_nothing(broker: Broker, raw: Any) -> None:
    channel = Channel(raw, RID)
    await broker.submit([submission(rid=RID)])
    for _ in range(2):
        (delivery,) = await begin_waiting(broker)
        assert await broker.finish([retry(delivery, FAILURE)]) == [True]
        assert record_of(raw).state == "queued"
    (delivery,) = await begin_waiting(broker)
    assert await broker.finish([retry(delivery, FAILURE)]) == [True]
    record = record_of(raw)
    assert (record.state, record.attempts, record.crashes) == ("failed", 3, 0)
    assert record.end is not None
    event: Any = record.end.event()
    assert event.error == FAILURE.error
    assert len(channel.messages()) == 1
    assert_drained(raw)
    # The call that ended it, once more after a lost reply.
    assert await broker.finish([retry(delivery, FAILURE)]) == [True]
    assert await broker.finish([retry(delivery, DONE)]) == [False]


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_as_many_tries_as_the_request_allows(broker: Broker, raw: Any, attempts: int) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(attempts=attempts))])
    tries = 0
    while record_of(raw).state == "queued":
        (delivery,) = await begin_waiting(broker)
        tries += 1
        await broker.finish([retry(delivery)])
    assert (tries, record_of(raw).state) == (attempts, "failed")
    assert_drained(raw)


async def test_lost_workers_are_tries_too(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(attempts=2))])
    for owner in ("w1", "w2"):
        await begin_waiting(broker, owner)
        await lose(broker, raw, owner)
    record = record_of(raw)
    assert (record.state, record.attempts, record.crashes) == ("failed", 2, 2)
    assert record.end is not None
    event: Any = record.end.event()
    assert event.error.error().retryable
    assert_drained(raw)


async def test_a_lost_worker_makes_the_pause_too(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(backoff_ms=MINUTE_MS))])
    await begin_waiting(broker)
    before = now_ms(raw)
    await lose(broker, raw)
    assert before + MINUTE_MS <= due_at(raw) <= now_ms(raw) + MINUTE_MS
    assert record_of(raw).crashes == 1
    wake(raw)
    (again,) = (await broker.take("w2", START, streams=["normal:again"], count=1)).started
    assert isinstance(again[1], Delivery)
    assert (again[1].attempts, again[1].crashes) == (2, 1)


async def test_a_suspect_that_waited_runs_alone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, retry=Retry(backoff_ms=MINUTE_MS))])
    for owner in ("w1", "w2"):
        await begin_waiting(broker, owner)
        await lose(broker, raw, owner)
        wake(raw)
        await sweep(broker, raw)
    assert waiting_in(raw, "solo") == [RID]


@pytest.mark.parametrize("backoff_ms", [0, MINUTE_MS])
@pytest.mark.parametrize("is_shown", [True, False])
async def test_one_that_would_rather_fail_than_begin_anew(
    broker: Broker, raw: Any, is_shown: bool, backoff_ms: int
) -> None:
    policy = Retry(backoff_ms=backoff_ms)
    (delivery,) = await begin(broker, submission(rid=RID, stream=True, on_restart="fail", retry=policy))
    if is_shown:
        await broker.emit([emission(delivery, 1, b"x")])
    told = retry(delivery, FAILURE)
    assert await broker.finish([told]) == [True]
    assert record_of(raw).state == ("failed" if is_shown else "queued")
    assert told.went_back is not is_shown


async def test_without_a_stream_nothing_was_shown(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, on_restart="fail"))
    assert await broker.finish([retry(delivery)]) == [True]
    assert record_of(raw).state == "queued"


# --- fences


async def test_only_the_owner_may_try_again(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    before = everything(raw)
    strangers = [altered(delivery, **change) for change in ({"owner": "w2"}, {"epoch": 2}, {"eid": "1-1"})]
    assert await broker.finish([retry(one) for one in strangers]) == [False] * 3
    assert everything(raw) == before


async def test_twice_is_once(broker: Broker, raw: Any) -> None:
    first, second = await begin(broker, submission(rid=RID), submission(rid=OTHER))
    ends = [retry(first), retry(first), finish(second), retry(second)]
    assert await broker.finish(ends) == [True, False, True, False]
    assert waiting_in(raw, "normal:again") == [RID]
    assert record_of(raw).epoch == 2
    assert record_of(raw, OTHER).state == "done"


async def test_what_was_trimmed_fails(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    raw.xtrim(f"{T}:s:normal", maxlen=0, approximate=False)
    assert await broker.finish([retry(delivery, FAILURE)]) == [True]
    assert record_of(raw).state == "failed"
    assert_drained(raw)


async def test_ends_and_retries_in_one_batch(broker: Broker, raw: Any) -> None:
    batch = await begin(broker, *(submission() for _ in range(6)))
    ends = [(retry if number % 2 else finish)(one) for number, one in enumerate(batch)]
    assert await broker.finish(ends) == [True] * 6
    assert waiting_in(raw, "normal:again") == [one.entry.rid for one in batch[1::2]]
    assert raw.zcard(f"{T}:open") == 3
    assert raw.xlen(f"{T}:s:normal") == 0
