"""What a worker had computed of a request that others ended is charged, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import redis

from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, end, events, eventually_so, submit, text_of
from hired_view import echo
from late_finishes import hold_finishes
from lossy_proxy import LossyProxy
from server_view import T
from streamfleet_common.broker import Broker
from streamfleet_common.scripts import Script

Hire = Callable[..., Awaitable[Hired]]
PROMPT = "ECHO 1000"
"""Two tokens to the scripted engine."""


async def used(broker: Broker) -> list[tuple[str, int, int, int]]:
    """Tenant, requests, tokens of prompts and of answers."""
    return [
        (one.tenant, one.requests, one.prompt_tokens, one.completion_tokens) for one in await broker.usage()
    ]


async def charged(broker: Broker, *wanted: tuple[str, int, int, int]) -> None:
    async def is_so() -> bool:
        return await used(broker) == [*wanted]

    await eventually_so(is_so, f"a ledger of {wanted}")


async def end_it(broker: Broker, raw: redis.Redis, rid: str, way: str) -> None:
    if way == "cancelled":
        assert await broker.cancel([rid], "default") == ["cancelled"]
    else:
        raw.zadd(f"{T}:open", {rid: 1})
        assert (await broker.sweep()).expired == 1


@pytest.mark.parametrize("way", ["cancelled", "expired"])
@pytest.mark.parametrize("kind", ["a stream", "two answers", "one shot"])
async def test_a_text_that_is_ended_after_ten_tokens(
    broker: Broker, hire: Hire, raw: redis.Redis, way: str, kind: str
) -> None:
    n = 1 + (kind == "two answers")
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4), lease_s=2.0)
    (rid,) = await submit(broker, [PROMPT], stream=kind != "one shot", n=n)
    hired.engine.allowed = 10
    publisher = hired.worker._publisher
    await eventually(lambda: sum(held.generated_tokens for held in publisher._held.values()) == 10 * n, "ten")
    await end_it(broker, raw, rid, way)
    await charged(broker, ("default", 1, 2, 10 * n))
    await eventually(lambda: hired.engine.cancelled == [rid], "the engine forgets it")
    # The engine has forgotten it: what comes later is another's.
    hired.engine.is_open = True
    (following,) = await submit(broker, ["ECHO 3"])
    assert (await end(broker, following)).state == "done"
    await charged(broker, ("default", 2, 4, 10 * n + 3))
    await eventually(lambda: publisher.held == 0, "nothing is held")


async def test_who_has_read_ten_tokens_pays_for_them(broker: Broker, hire: Hire) -> None:
    await hire(lease_s=2.0)
    (rid,) = await submit(broker, ["ECHO 2000 TICK 20"], stream=True)
    shown: list[str] = []

    async def has_shown_ten() -> bool:
        shown[:] = text_of(await events(broker, rid)).split()
        return len(shown) >= 10

    await eventually_so(has_shown_ten, "ten tokens")
    await broker.cancel([rid], "default")

    async def is_charged() -> bool:
        ((_, _, _, completion),) = await used(broker)
        return completion > 0

    await eventually_so(is_charged, "the charge")
    ((tenant, requests, prompt, completion),) = await used(broker)
    assert (tenant, requests, prompt) == ("default", 1, 4)
    assert len(shown) <= completion < 2000


async def test_a_bill_whose_reply_was_lost_is_told_again_and_counts_once(
    broker: Broker, hire: Hire, redis_url: str, raw: redis.Redis
) -> None:
    sha = Script.load("finish").sha.encode()
    raw.script_load(Script.load("finish").text)
    async with LossyProxy(redis_url) as proxy:
        hired = await hire(GatedEngine(is_open=False), url=proxy.url, lease_s=2.0)
        (rid,) = await submit(broker, [PROMPT], stream=True)
        hired.engine.allowed = 10
        await eventually(lambda: hired.engine.taken == 10, "ten steps")

        async def has_shown_ten() -> bool:
            return text_of(await events(broker, rid)) == echo(10)

        await eventually_so(has_shown_ten, "ten tokens")
        proxy.lose_reply(sha, 2)
        await broker.cancel([rid], "default")
        await eventually(lambda: hired.worker._publisher.held == 0, "an answer at last")
        assert proxy.lost.is_set()
        assert await used(broker) == [("default", 1, 2, 10)]
        await hired.dismiss()


async def test_an_answer_that_comes_too_late_is_charged_whole_by_its_own_finish(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hold_finishes(monkeypatch)
    hired = await hire(lease_s=2.0)
    (rid,) = await submit(broker, ["ECHO 3"])
    publisher = hired.worker._publisher
    await eventually(lambda: any(held.is_told for held in publisher._held.values()), "an end on its way")
    await broker.cancel([rid], "default")
    await eventually(lambda: publisher.held == 0, "the renewal that tells of it")
    assert await used(broker) == [("default", 1, 0, 0)]
    told.set()
    await charged(broker, ("default", 1, 2, 3))


async def test_a_worker_that_drains_tells_its_bills_first(
    broker: Broker, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = hold_finishes(monkeypatch)
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1), lease_s=2.0)
    rids = await submit(broker, [PROMPT] * 2)
    hired.engine.allowed = 5
    publisher = hired.worker._publisher
    await eventually(lambda: sum(held.generated_tokens for held in publisher._held.values()) == 5, "five")
    await broker.cancel(rids, "default")
    await eventually(lambda: bool(publisher._bills), "the bill")
    hired.worker.stop()
    await eventually(lambda: hired.worker.vitals.state == "draining", "the drain")
    assert hired.running is not None
    assert not hired.running.done()
    told.set()
    async with asyncio.timeout(60):
        await hired.running
    # Of the second nothing had begun.
    assert await used(broker) == [("default", 2, 2, 5)]
