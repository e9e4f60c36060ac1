"""Streams whose server came back without what it had last said, and counts the epochs anew."""

from __future__ import annotations

import asyncio

import pytest

from hand_worker import HandWorker, Work, delta
from streamfleet_producer import Client, Delta, GenerateRequest, IncompleteGeneration, Restart

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


async def record_of(worker: HandWorker, rid: str) -> bytes:
    record = await worker.redis.get(worker.broker.keys.record(rid))
    assert isinstance(record, bytes)
    return record


async def roll_back(worker: HandWorker, work: Work, record: bytes) -> None:
    """Put the request's first record back, its entry undelivered and its log empty."""
    keys = worker.broker.keys
    await worker.redis.delete(keys.log(work.rid), keys.stream("normal"), keys.stream("normal:again"))
    await worker.broker.create_groups()
    payload = work.delivery.entry.payload
    eid = await worker.redis.xadd(keys.stream("normal"), {"r": work.rid, "p": payload})
    assert isinstance(eid, bytes)
    head = record.split(b"|")
    await worker.redis.set(keys.record(work.rid), b"|".join([*head[:2], b"n" + eid, *head[3:]]))


async def test_an_end_of_a_lower_epoch_ends_the_stream(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        first = await record_of(worker, tokens.id)
        [work] = await worker.take()
        await worker.broker.release([work.delivery])
        [work] = await worker.take()
        assert work.delivery.epoch == 3
        await worker.emit(work, delta("he"))
        assert (await anext(tokens)).text == "he"
        await roll_back(worker, work, first)
        [work] = await worker.take()
        assert work.delivery.epoch == 1
        await worker.emit(work, delta("hey"))
        await worker.finish(work, "hey")
        async with asyncio.timeout(60):
            restart, rest = [event async for event in tokens.events()]
    assert isinstance(restart, Restart)
    assert isinstance(rest, Delta)
    assert rest.text == tokens.result.text == "hey"


async def test_another_attempt_of_the_same_number_is_not_spliced(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        first = await record_of(worker, tokens.id)
        [work] = await worker.take()
        await worker.emit(work, delta("he", 100))
        assert (await anext(tokens)).text == "he"
        await roll_back(worker, work, first)
        [work] = await worker.take()
        assert work.delivery.epoch == 1
        await worker.emit(work, delta("ab"))
        await worker.emit(work, delta("c", 2))
        await worker.finish(work, "abc")
        with pytest.raises(IncompleteGeneration):
            await tokens.wait()
