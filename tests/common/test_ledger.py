"""What each tenant has used, by day: every end once, and nothing twice."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from broker_parts import begin, finish, retry, submission
from lossy_proxy import LossyProxy
from script_changes import change
from server_view import OTHER, RID, T, now_ms
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Finish
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import End, Retry
from streamfleet_common.schemas import Usage as Spent
from streamfleet_common.usage import KEPT_DAYS, Usage


def done(delivery: Delivery, prompt: int, completion: int, **fields: Any) -> Finish:
    usage = Spent(prompt_tokens=prompt, completion_tokens=completion)
    return finish(delivery, End(**{"state": "done", "of": delivery.epoch, "usage": usage, **fields}))


def today(raw: Any) -> date:
    return datetime.fromtimestamp(now_ms(raw) / 1000, UTC).date()


async def test_a_batch_is_added_up_by_tenant(broker: Broker, raw: Any) -> None:
    deliveries = await begin(broker, *(submission(tenant=name) for name in ("acme", "beta", "acme")))
    ends = [
        done(deliveries[0], 5, 7),
        done(deliveries[1], 11, 13, state="failed"),
        done(deliveries[2], 100, 0),
    ]
    assert await broker.finish(ends) == [True] * 3
    day = today(raw)
    assert await broker.usage() == [
        Usage("q", day, "acme", requests=2, failed=0, prompt_tokens=105, completion_tokens=7),
        Usage("q", day, "beta", requests=1, failed=1, prompt_tokens=11, completion_tokens=13),
    ]
    assert raw.hgetall(f"{T}:usage:{day:%Y%m%d}") == {
        b"acme|requests": b"2",
        b"acme|prompt_tokens": b"105",
        b"acme|completion_tokens": b"7",
        b"beta|requests": b"1",
        b"beta|failed": b"1",
        b"beta|prompt_tokens": b"11",
        b"beta|completion_tokens": b"13",
    }


async def test_a_finish_that_is_repeated_counts_once(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(tenant="acme"))
    proxy.lose_reply(lossy._calls._scripts["finish"].sha.encode())
    assert await lossy.finish([done(delivery, 5, 7)]) == [True]
    assert await lossy.finish([done(delivery, 5, 7)] * 2) == [True] * 2
    assert await lossy.finish([done(delivery, 6, 7)]) == [False]
    assert await lossy.usage() == [Usage("q", today(raw), "acme", 1, 0, 5, 7)]


async def test_a_finish_that_is_said_again_counts_once(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(tenant="acme"))
    for _ in range(2):
        assert await broker.finish([done(delivery, 5, 7)]) == [True]
    assert await broker.usage() == [Usage("q", today(raw), "acme", 1, 0, 5, 7)]


async def test_an_end_of_several_takes_all_of_them_off(broker: Broker, raw: Any) -> None:
    many = [submission(tenant="acme") for _ in range(3)]
    await broker.submit(many)
    await broker.cancel([one.envelope.rid for one in many[:2]], "acme")
    assert await broker.open_of("acme") == (1, many[0].tokens)
    assert await broker.usage() == [Usage("q", today(raw), "acme", 2)]


async def test_an_end_of_what_was_deleted_is_in_no_ledger(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme"))
    raw.delete(f"{T}:r:{RID}")
    raw.zadd(f"{T}:open", {RID: 1})
    await broker.sweep()
    assert await broker.finish([done(delivery, 5, 7)]) == [False]
    # Nobody knows any more whose it was.
    assert await broker.usage() == []


async def test_a_worker_that_ends_a_late_request_tells_its_tokens(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(tenant="acme"))
    await broker.finish([done(delivery, 5, 3, state="expired")])
    assert await broker.usage() == [Usage("q", today(raw), "acme", 1, 0, 5, 3)]


async def test_a_try_that_is_repeated_is_no_end(broker: Broker, raw: Any) -> None:
    (first, second) = await begin(
        broker,
        submission(rid=RID, tenant="acme"),
        submission(rid=OTHER, tenant="acme", retry=Retry(attempts=1)),
    )
    end = End(state="failed", usage=Spent(prompt_tokens=5, completion_tokens=1))
    assert await broker.finish([retry(first, end), retry(second, end)]) == [True, True]
    # The second may not be tried again, so this was its end.
    assert await broker.usage() == [Usage("q", today(raw), "acme", 1, 1, 5, 1)]


async def test_a_day_is_kept_for_so_long(broker: Broker, raw: Any) -> None:
    for _ in range(2):
        (delivery,) = await begin(broker, submission(tenant="acme"))
        await broker.finish([done(delivery, 1, 1)])
    life_ms = raw.pttl(f"{T}:usage:{today(raw):%Y%m%d}")
    assert KEPT_DAYS * 86_400_000 - 60_000 < life_ms <= KEPT_DAYS * 86_400_000


@pytest.mark.parametrize(
    "day",
    [
        date(1970, 1, 1),
        date(2000, 2, 29),
        date(2024, 2, 29),
        date(2024, 3, 1),
        date(2026, 12, 31),
        date(2027, 1, 1),
        date(2100, 2, 28),
        date(2100, 3, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", ["first", "last"])
async def test_the_day_is_that_of_the_end_in_utc(broker: Broker, raw: Any, day: date, at: str) -> None:
    start_ms = (day - date(1970, 1, 1)).days * 86_400_000
    ms = start_ms if at == "first" else start_ms + 86_400_000 - 1
    await broker.submit([submission(rid=RID, tenant="acme")])
    change(
        broker, "cancel", ("local time = call('TIME')", f"local time = {{{ms // 1000}, {ms % 1000 * 1000}}}")
    )
    await broker.cancel([RID], "acme")
    (key,) = raw.keys(f"{T}:usage:*")
    assert key.decode() == f"{T}:usage:{day:%Y%m%d}"


async def test_several_days_and_one_tenant(broker: Broker, raw: Any) -> None:
    day = today(raw)
    for back, numbers in ((0, 5), (2, 7), (KEPT_DAYS, 9)):
        raw.hset(
            f"{T}:usage:{day - timedelta(back):%Y%m%d}",
            mapping={
                "acme|requests": numbers,
                "beta|requests": 1,
                "acme|junk": 1,
                "x": 1,
                "beta|failed": "junk",
            },
        )
    assert [(one.day, one.tenant) for one in await broker.usage(since=day - timedelta(2))] == [
        (day - timedelta(2), "acme"),
        (day - timedelta(2), "beta"),
        (day, "acme"),
        (day, "beta"),
    ]
    of_one = await broker.usage(since=day - timedelta(KEPT_DAYS), tenant="acme")
    assert [one.requests for one in of_one] == [9, 7, 5]
    assert await broker.usage(tenant="nobody") == []
    assert await broker.usage(since=day + timedelta(1)) == []
    with pytest.raises(InvalidRequest, match="usage is kept for 400 days"):
        await broker.usage(since=day - timedelta(KEPT_DAYS + 1))
    with pytest.raises(InvalidRequest, match="names no tenant"):
        await broker.usage(tenant="a|b")


async def test_a_ledger_of_another_kind_loses_no_end(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    raw.set(f"{T}:usage:{today(raw):%Y%m%d}", "x")
    assert await broker.finish([done(delivery, 1, 1)]) == [True]
    assert [one.state for one in await broker.status([RID], "default") if one] == ["done"]


def test_a_sum() -> None:
    day = date(2026, 5, 1)
    assert Usage("q", day, "a", 1, 2, 3, 4) + Usage("r", day, "b", 10, 20, 30, 40) == Usage(
        "q", day, "a", 11, 22, 33, 44
    )
    assert Usage("q", day, "a", 1, 0, 3, 4).tokens == 7
