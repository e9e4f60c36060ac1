"""What a key or an id stands for, now and later: always a definite answer."""

from __future__ import annotations

import asyncio

import pytest

from eventually import eventually
from hand_worker import HandWorker
from streamfleet_producer import Client, Conflict, GenerateRequest, RequestNotFound

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)
OTHER = GenerateRequest(prompt="good bye", max_tokens=8)


async def ended(worker: HandWorker, fleet: Client) -> str:
    """A request with the key "k" that has just ended."""
    ticket = await fleet.submit(REQUEST, idempotency_key="k")
    [work] = await worker.take()
    await worker.finish(work, "abc")
    return ticket.id


async def forget(worker: HandWorker, rid: str) -> None:
    """Let the time run out for which its answer is kept."""
    key = worker.broker.keys.record(rid)
    ttl_ms = await worker.redis.pttl(key)
    assert 0 < ttl_ms <= 600_000
    await worker.redis.pexpire(key, 1)
    async with asyncio.timeout(60):
        while await worker.redis.exists(key):  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0.001)


async def test_a_key_stands_for_a_request_as_long_as_its_answer_is_kept(
    worker: HandWorker, fleet: Client
) -> None:
    rid = await ended(worker, fleet)
    again = await fleet.submit(REQUEST, idempotency_key="k")
    assert (again.id, again.duplicate, again.state) == (rid, True, "done")
    assert (await fleet.run(REQUEST, idempotency_key="k")).text == "abc"
    with pytest.raises(Conflict):
        await fleet.submit(OTHER, idempotency_key="k")
    assert (await fleet.depth()).open == 0


async def test_after_that_the_key_is_free(worker: HandWorker, fleet: Client) -> None:
    rid = await ended(worker, fleet)
    await forget(worker, rid)
    ticket = await fleet.submit(OTHER, idempotency_key="k")
    assert (ticket.id, ticket.duplicate, ticket.state) == (rid, False, "queued")
    [work] = await worker.take()
    assert work.envelope.request == OTHER


@pytest.mark.parametrize("what", ["unknown", "forgotten"])
async def test_nobody_waits_for_what_will_never_come(worker: HandWorker, fleet: Client, what: str) -> None:
    rid = "00" + "0" * 32
    if what == "forgotten":
        rid = await ended(worker, fleet)
        await forget(worker, rid)
    async with asyncio.timeout(60):  # a deadline that nobody set would be ten minutes
        for ask in (fleet.result, fleet.cancel, fleet.status, lambda rid: fleet.attach(rid).__aenter__()):
            with pytest.raises(RequestNotFound):
                await ask(rid)


async def test_what_has_just_ended_is_told_at_once(worker: HandWorker, fleet: Client) -> None:
    rid = await ended(worker, fleet)
    async with asyncio.timeout(60):
        assert (await fleet.result(rid)).text == "abc"
        assert await fleet.cancel(rid) == "done"
        assert (await fleet.status(rid)).state == "done"
        async with fleet.attach(rid) as tokens:
            assert [delta.text async for delta in tokens] == ["abc"]


async def test_an_answer_that_is_forgotten_while_it_is_waited_for_is_told(
    redis_url: str, worker: HandWorker
) -> None:
    async with Client(redis_url, queue="q", silence_s=0.02) as fleet:
        ticket = await fleet.submit(REQUEST)
        waiting = asyncio.create_task(fleet.result(ticket.id))
        await eventually(lambda: len(fleet._open_link().watch) == 1, "the wait")
        await worker.redis.delete(worker.broker.keys.record(ticket.id))
        async with asyncio.timeout(60):
            with pytest.raises(Exception, match="no longer knows"):
                await waiting
