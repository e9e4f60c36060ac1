"""What a worker had computed of a request that somebody else ended is charged to its tenant: once."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import begin, begin_waiting, finish, retry, submission
from lossy_proxy import LossyProxy
from server_view import OTHER, RID, T, everything, record_of
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Bill, Delivery
from streamfleet_common.schemas import End, EndState
from streamfleet_common.schemas import Usage as Spent
from streamfleet_common.shares import Share


def bill(delivery: Delivery, prompt: int = 5, completion: int = 7) -> Bill:
    return Bill(delivery.entry.rid, delivery.fence, prompt, completion)


def too_late(delivery: Delivery, state: EndState = "done") -> Any:
    return finish(delivery, End(state=state, usage=Spent(prompt_tokens=5, completion_tokens=7)))


async def end_it(broker: Broker, raw: Any, way: str, tenant: str = "acme") -> None:
    """Somebody who does not run it ends the request `RID`."""
    if way == "cancelled":
        assert await broker.cancel([RID], tenant) == ["cancelled"]
    else:
        raw.zadd(f"{T}:open", {RID: 1})
        assert (await broker.sweep()).expired == 1


async def used(broker: Broker) -> list[tuple[str, int, int, int]]:
    """Tenant, requests, tokens of prompts and of answers."""
    return [
        (one.tenant, one.requests, one.prompt_tokens, one.completion_tokens) for one in await broker.usage()
    ]


@pytest.mark.parametrize("way", ["cancelled", "expired"])
@pytest.mark.parametrize("teller", ["a bill", "a finish", "another try"])
async def test_what_it_took_is_charged_once(broker: Broker, raw: Any, way: str, teller: str) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", stream=True))
    await end_it(broker, raw, way)
    assert await used(broker) == [("acme", 1, 0, 0)]
    end = record_of(raw).end
    for _ in range(2):
        if teller == "a bill":
            assert await broker.finish([], [bill(delivery), bill(delivery)]) == []
        elif teller == "a finish":
            assert await broker.finish([too_late(delivery)] * 2) == [False, False]
        else:
            assert await broker.finish([retry(delivery, too_late(delivery).end)]) == [False]
        assert await used(broker) == [("acme", 1, 5, 7)]
    # One after the other, whoever was first.
    await broker.finish([too_late(delivery)], [bill(delivery, 50, 70)])
    assert await used(broker) == [("acme", 1, 5, 7)]
    found = record_of(raw)
    assert (found.state, found.end, found.tenant) == (way, end, "acme")


async def test_a_bill_whose_reply_was_lost_counts_once(lossy: Broker, proxy: LossyProxy) -> None:
    first, second = await begin(lossy, submission(rid=RID, tenant="acme"), submission(tenant="beta"))
    await lossy.cancel([RID], "acme")
    proxy.lose_reply(lossy._calls._scripts["finish"].sha.encode())
    assert await lossy.finish([too_late(second)], [bill(first)]) == [True]
    assert proxy.lost.is_set()
    assert sorted(await used(lossy)) == [("acme", 1, 5, 7), ("beta", 1, 5, 7)]


async def test_each_tenant_of_a_batch_pays_its_own(broker: Broker, raw: Any) -> None:
    tenants = ("acme", "beta", "acme")
    deliveries = await begin(broker, *(submission(tenant=tenant) for tenant in tenants))
    for tenant in set(tenants):
        await broker.cancel([one.entry.rid for one in deliveries], tenant)
    bills = [bill(one, 10**at, 2 * 10**at) for at, one in enumerate(deliveries)]
    bills += [Bill(OTHER, "|1|n1-1|w1|", 9, 9)]  # a record that is gone, or never was
    assert await broker.finish([], bills) == []
    assert await used(broker) == [("acme", 2, 101, 202), ("beta", 1, 10, 20)]


@pytest.mark.parametrize("state", ["done", "failed", "expired", "cancelled"])
async def test_an_end_of_the_worker_s_own_is_charged_by_that_alone(
    broker: Broker, raw: Any, state: EndState
) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme"))
    assert await broker.finish([too_late(delivery, state)]) == [True]
    # A renewal has told that it is no longer held, before the answer to the finish was there.
    await broker.finish([], [bill(delivery)])
    assert await broker.finish([too_late(delivery, state)]) == [True]
    assert await used(broker) == [("acme", 1, 5, 7)]


@pytest.mark.parametrize("state", ["waiting", "running"])
async def test_a_bill_ends_nothing(broker: Broker, raw: Any, state: str) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    if state == "waiting":
        assert await broker.release([delivery]) == [True]
    before = everything(raw)
    await broker.finish([], [bill(delivery)])
    assert everything(raw) == before


async def test_an_attempt_that_was_over_before_is_not_charged(broker: Broker) -> None:
    (first,) = await begin(broker, submission(rid=RID, tenant="acme"))
    await broker.hand_back("w1", crashed=True)
    (second,) = await begin_waiting(broker, "w2")
    await broker.cancel([RID], "acme")
    await broker.finish([too_late(first)], [bill(first)])
    assert await used(broker) == [("acme", 1, 0, 0)]
    await broker.finish([], [bill(second, 3, 4)])
    assert await used(broker) == [("acme", 1, 3, 4)]


async def test_a_worker_that_has_nothing_to_tell_changes_nothing(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    await broker.cancel([RID], "default")
    before = everything(raw)
    await broker.finish([finish(delivery, End(state="failed"))], [bill(delivery, 0, 0)])
    assert everything(raw) == before


async def test_its_record_waits_for_the_bill_however_short_its_life(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", result_ttl_ms=1000))
    await broker.cancel([RID], "acme")
    assert 30_000 < raw.pttl(f"{T}:r:{RID}") <= 60_000
    raw.pexpire(f"{T}:r:{RID}", 50_000)
    await broker.finish([], [bill(delivery)])
    assert 20_000 < raw.pttl(f"{T}:r:{RID}") <= 50_000


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_record_with_nothing_to_wait_for_lives_as_long_as_it_was_asked_to(
    broker: Broker, raw: Any, is_begun: bool
) -> None:
    one = submission(rid=RID, result_ttl_ms=1000)
    if is_begun:
        (delivery,) = await begin(broker, one)
        await broker.release([delivery])
    else:
        await broker.submit([one])
    await broker.cancel([RID], "default")
    assert raw.pttl(f"{T}:r:{RID}") <= 1000


async def test_a_record_of_an_older_client_s_cancel_is_left_alone(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme"))
    await broker.cancel([RID], "acme")
    written = raw.get(f"{T}:r:{RID}")
    assert written.startswith(b"EC|+0|0|acme|")
    raw.set(f"{T}:r:{RID}", written.replace(b"+", b"", 1), keepttl=True)
    before = everything(raw)
    await broker.finish([], [bill(delivery)])
    assert everything(raw) == before


async def test_a_bill_of_the_next_day_gives_its_ledger_a_life(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme"))
    await broker.cancel([RID], "acme")
    (ledger,) = raw.keys(f"{T}:usage:*")
    raw.rename(ledger, f"{T}:usage:19700101")
    await broker.finish([], [bill(delivery)])
    assert raw.hgetall(ledger) == {b"acme|prompt_tokens": b"5", b"acme|completion_tokens": b"7"}
    assert raw.pttl(ledger) > 399 * 86_400_000


async def test_a_budget_counts_what_was_cancelled(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(tokens_per_day=200)})
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", max_tokens=100))
    await broker.cancel([RID], "acme")
    await broker.finish([], [bill(delivery, 1, 99)])
    tight, fitting = submission(tenant="acme", max_tokens=100), submission(tenant="acme", max_tokens=90)
    outcomes = await broker.submit([tight, fitting])
    assert [(one.outcome, one.reason) for one in outcomes] == [("full", "tenant_budget"), ("accepted", "")]


async def test_a_ledger_of_another_kind_stops_nothing(broker: Broker, raw: Any) -> None:
    first, second = await begin(broker, submission(rid=RID), submission(rid=OTHER))
    await broker.cancel([RID], "default")
    (ledger,) = raw.keys(f"{T}:usage:*")
    raw.set(ledger, "x")
    assert await broker.finish([too_late(second)], [bill(first)]) == [True]
