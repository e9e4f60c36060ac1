"""What a request may say about how often it is tried, and what a queue says that takes no more."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hand_worker import HandWorker
from streamfleet_common.settings import Durability
from streamfleet_producer import BrokerUnavailable, Client, GenerateRequest, InvalidRequest, QueueFull, Retry

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


# --- tries


@pytest.mark.parametrize(
    ("wish", "sent"),
    [
        ("never", Retry(attempts=1)),
        (Retry(attempts=5, backoff_ms=100), Retry(attempts=5, backoff_ms=100)),
        (Retry(), Retry()),
    ],
)
async def test_how_often_to_try_is_sent_along(
    worker: HandWorker, fleet: Client, wish: Retry, sent: Retry
) -> None:
    await fleet.submit(REQUEST, retry=wish)
    await fleet.submit(REQUEST, retry=wish, idempotency_key="k")
    async with fleet.stream(REQUEST, retry=wish):
        works = await worker.take(3)
    assert [work.envelope.retry for work in works] == [sent] * 3


async def test_nothing_said_leaves_it_to_the_fleet(worker: HandWorker, fleet: Client) -> None:
    await fleet.submit(REQUEST)
    [work] = await worker.take()
    assert work.envelope.retry == Retry()


async def test_a_request_that_may_be_tried_once_is_not_tried_again(worker: HandWorker, fleet: Client) -> None:
    once = await fleet.submit(REQUEST, retry="never")
    [work] = await worker.take()
    await worker.lose(work)
    status = await fleet.status(once.id)
    assert (status.state, status.attempt) == ("failed", 1)


@pytest.mark.parametrize("wish", ["always", 3, None, {"attempts": 0}])
async def test_no_such_policy(worker: HandWorker, fleet: Client, wish: object) -> None:
    with pytest.raises(InvalidRequest, match=r'retry(: "never" or a Retry is wanted|\.attempts)'):
        await fleet.submit(REQUEST, retry=wish)  # type: ignore[arg-type]


async def test_options_do_not_leak_from_one_request_into_the_next(worker: HandWorker, fleet: Client) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await fleet.submit(REQUEST, lane="high", deadline_s=5)
    await fleet.submit(REQUEST, lane="bulk", traceparent=trace)
    await fleet.submit(REQUEST, idempotency_key="k", lane="bulk")
    await fleet.submit(REQUEST, lane="bulk")
    works = sorted(await worker.take(4), key=lambda work: work.delivery.accepted_at_ms)
    sent = [
        (envelope.lane, envelope.deadline_ms, envelope.traceparent, envelope.idempotency_key)
        for envelope in (work.envelope for work in works)
    ]
    assert sorted(sent, key=str) == sorted(
        [
            ("high", 5000, None, None),
            ("bulk", 600_000, trace, None),
            ("bulk", 600_000, None, "k"),
            ("bulk", 600_000, None, None),
        ],
        key=str,
    )
    assert len({work.rid for work in works}) == 4


# --- a queue that takes no more


@pytest.mark.parametrize(
    ("control", "reason", "words"),
    [
        ({"max_queue_depth": "1"}, "requests", "the limit is 1"),
        ({"max_queue_tokens": "19"}, "tokens", "max_queue_tokens"),
        ({"paused": "1"}, "paused", "resume"),
        ({"crowded_until": "99999999999999"}, "memory", "memory"),
    ],
)
async def test_a_queue_that_takes_no_more_says_why_where_and_for_how_long(
    worker: HandWorker, fleet: Client, control: dict[str, str], reason: str, words: str
) -> None:
    await fleet.submit(REQUEST)
    for name, value in control.items():
        await worker.redis.hset(worker.broker.keys.control, name, value)
    for attempt in (
        fleet.submit(REQUEST),
        fleet.run(REQUEST),
        fleet.run_many([REQUEST]),
        fleet.stream(REQUEST).__aenter__(),
    ):
        with pytest.raises(QueueFull, match=words) as caught:
            await attempt
        error = caught.value
        assert (error.reason, error.position, error.depth) == (reason, 1, 1)
        assert 0.1 <= error.retry_after <= 30
        assert error.retryable
    assert (await fleet.depth()).open == 1


# --- durability


def test_no_such_level_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidRequest, match="durability: one of fast, safe, replicated"):
        Client(durability="sure")  # type: ignore[arg-type]


@pytest.fixture
async def unsynced(worker: HandWorker) -> AsyncIterator[None]:
    """A server without a replica, and without an append-only file."""
    await worker.redis.config_set("appendonly", "no")
    yield
    await worker.redis.config_set("appendonly", "yes")


@pytest.fixture
async def synced(worker: HandWorker) -> AsyncIterator[None]:
    """A server that syncs its append-only file with each write."""
    await worker.redis.config_set("appendfsync", "always")
    yield
    await worker.redis.config_set("appendfsync", "everysec")


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("durability", ["safe", "replicated"])
async def test_an_accept_that_nobody_confirms_is_none(redis_url: str, durability: Durability) -> None:
    async with Client(redis_url, queue="q", durability=durability) as fleet:
        with pytest.raises(BrokerUnavailable, match="may have been accepted") as caught:
            await fleet.submit(REQUEST, idempotency_key="k")
    assert caught.value.reason == "not_durable"


@pytest.mark.usefixtures("synced")
async def test_a_file_that_is_synced_confirms(redis_url: str) -> None:
    async with Client(redis_url, queue="q", durability="safe") as fleet:
        assert (await fleet.submit(REQUEST)).state == "queued"
