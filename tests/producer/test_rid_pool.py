"""Ids that are listened to before they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from eventually import eventually
from hand_worker import HandWorker
from lossy_proxy import LossyProxy
from streamfleet_producer import Client, GenerateRequest, Undecodable
from streamfleet_producer import rid_pool as rid_pool_module

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


async def serve(worker: HandWorker, count: int = 1) -> None:
    for work in await worker.take(count):
        await worker.finish(work, "abc")


async def run(worker: HandWorker, fleet: Client) -> None:
    answer, _ = await asyncio.gather(fleet.run(REQUEST), serve(worker))
    assert answer.text == "abc"


async def filled(fleet: Client, count: int = rid_pool_module.LEAST) -> None:
    await eventually(lambda: len(fleet._open_link().rids) == count, "a full pool")


async def subscribes(worker: HandWorker) -> int:
    """How many commands have subscribed to something so far."""
    calls: int = (await worker.redis.info("commandstats"))["cmdstat_subscribe"]["calls"]
    return calls


async def test_nothing_is_subscribed_before_it_is_needed(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST)
    await fleet.status(ticket.id)
    assert await worker.channels() == []


async def test_most_requests_subscribe_nothing(worker: HandWorker, fleet: Client) -> None:
    await run(worker, fleet)
    await filled(fleet)
    before = await subscribes(worker)
    for _ in range(rid_pool_module.LEAST // 2 - 1):
        await run(worker, fleet)
    assert await subscribes(worker) == before
    for _ in range(3):
        await run(worker, fleet)
    await filled(fleet, rid_pool_module.LEAST - 2)
    assert await subscribes(worker) == before + 1


async def test_a_burst_makes_the_pool_larger_up_to_a_bound(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rid_pool_module, "MOST", 64)
    answers = asyncio.gather(*(fleet.run(REQUEST) for _ in range(100)))
    await serve(worker, 100)
    assert len(await answers) == 100
    await filled(fleet, 64)


async def test_an_id_that_was_not_used_is_used_later(redis_url: str, worker: HandWorker) -> None:
    async with Client(redis_url, queue="q", max_request_bytes=1000) as fleet:
        await run(worker, fleet)
        await filled(fleet)
        pool = fleet._open_link().rids
        before = set(pool._rids)
        for _ in range(5):
            with pytest.raises(Undecodable):
                await fleet.run(GenerateRequest(prompt="x" * 2000))
        assert set(pool._rids) == before


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_url) as made:
        yield made


async def test_an_id_on_a_line_that_was_cut_is_subscribed_anew(worker: HandWorker, proxy: LossyProxy) -> None:
    async with Client(proxy.url, queue="q", silence_s=60) as fleet:
        await run(worker, fleet)
        await filled(fleet)
        for _ in range(3):
            await worker.cut_subscribers()
            await run(worker, fleet)


async def test_a_request_whose_channel_was_ready_is_told_of_a_cut(worker: HandWorker, fleet: Client) -> None:
    await run(worker, fleet)
    await filled(fleet)
    running = asyncio.create_task(fleet.run(REQUEST))
    [work] = await worker.take()
    await worker.cut_subscribers()
    await worker.finish(work, "abc")  # told to nobody: the record has it
    assert (await running).text == "abc"


async def test_a_client_may_close_while_its_pool_fills(redis_url: str, worker: HandWorker) -> None:
    others = len(asyncio.all_tasks())
    for turns in range(10):
        fleet = await Client(redis_url, queue="q").open()
        await fleet.models()
        running = asyncio.create_task(fleet.run(REQUEST))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        await fleet.close()
    await eventually(lambda: len(asyncio.all_tasks()) == others, "the end of all tasks")
