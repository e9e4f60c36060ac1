"""How much a queue takes in: in requests, in tokens, in Redis's memory, and by the word of an operator."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import START, STREAMS, begin, card, finish, retry, submission
from server_view import OTHER, RID, T, everything, now_ms
from silence import lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.submissions import Submitted

COST = submission().tokens


def tokens(raw: Any) -> int:
    return int(raw.hget(f"{T}:tenants", "*") or 0)


async def limit_tokens(broker: Broker, limit: int) -> None:
    await broker.announce(card(max_queue_depth=100, max_queue_tokens=limit))


async def test_tokens_at_exactly_the_limit(broker: Broker, raw: Any) -> None:
    await limit_tokens(broker, 3 * COST)
    answers = await broker.submit([submission() for _ in range(5)])
    assert [answer.outcome for answer in answers] == ["accepted"] * 3 + ["full"] * 2
    assert answers[3] == Submitted("full", depth=3, limit=100, reason="tokens", retry_after_s=1.0)
    assert tokens(raw) == 3 * COST
    # One that takes less does not fit either, unless its tokens do.
    await limit_tokens(broker, 3 * COST + 2)
    small = submission("four", max_tokens=1)
    assert small.tokens == 2
    answers = await broker.submit([submission(), small])
    assert [answer.outcome for answer in answers] == ["full", "accepted"]


async def test_no_limit_of_tokens(broker: Broker, raw: Any) -> None:
    await broker.announce(card(max_queue_depth=100))
    answers = await broker.submit([submission("x" * 4000) for _ in range(20)])
    assert {answer.outcome for answer in answers} == {"accepted"}
    # They are counted all the same, for the day a limit is set.
    assert tokens(raw) == 20 * (1000 + 128)


async def test_an_empty_queue_takes_any_one_request(broker: Broker, raw: Any) -> None:
    await limit_tokens(broker, 1)
    large, next_ = submission("x" * 4000, rid=RID), submission()
    assert [one.outcome for one in await broker.submit([large, next_])] == ["accepted", "full"]
    await broker.cancel([RID], "default")
    assert tokens(raw) == 0
    assert (await broker.submit([next_]))[0].outcome == "accepted"


@pytest.mark.parametrize("way", ["finish", "cancel", "expire", "dead"])
async def test_every_end_gives_its_tokens_back(broker: Broker, raw: Any, way: str) -> None:
    await limit_tokens(broker, 1000)
    (delivery,) = await begin(broker, submission(rid=RID))
    await broker.submit([submission(rid=OTHER)])
    assert tokens(raw) == 2 * COST
    if way == "finish":
        await broker.finish([finish(delivery)])
    elif way == "cancel":
        await broker.cancel([RID], "default")
    elif way == "expire":
        raw.zadd(f"{T}:open", {RID: 1})
        await broker.sweep()
    else:
        await broker.cancel([OTHER], "default")
        await lose(broker, raw)
        for number in range(2, 5):
            await broker.start(
                f"w{number}", await broker.read(f"w{number}", STREAMS, 5, block_ms=None), START
            )
            await lose(broker, raw, f"w{number}")
    assert tokens(raw) == (0 if way == "dead" else COST)


async def test_a_second_end_gives_nothing_back(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    await broker.submit([submission(rid=OTHER)])
    await broker.finish([finish(delivery), finish(delivery)])
    await broker.finish([finish(delivery)])
    await broker.cancel([RID, RID], "default")
    raw.zadd(f"{T}:open", {RID: 1})
    await broker.sweep()
    assert tokens(raw) == COST


async def test_what_goes_back_keeps_its_tokens(broker: Broker, raw: Any) -> None:
    (first, second, _) = await begin(broker, *(submission() for _ in range(3)))
    await broker.release([first])
    await broker.finish([retry(second)])
    await lose(broker, raw)
    assert tokens(raw) == 3 * COST


async def test_duplicates_cost_nothing(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID)
    await broker.submit([one, one])
    await broker.submit([one, submission("Bye", rid=RID)])
    assert tokens(raw) == COST


async def test_deleted_records_do_not_keep_their_tokens(broker: Broker, raw: Any) -> None:
    await limit_tokens(broker, 2 * COST)
    await broker.submit([submission(rid=RID), submission(rid=OTHER)])
    raw.delete(f"{T}:r:{RID}", f"{T}:r:{OTHER}")
    raw.zadd(f"{T}:open", {RID: 1, OTHER: 1})
    await sweep(broker, raw)
    assert tokens(raw) == 0
    assert [one.outcome for one in await broker.submit([submission(), submission()])] == ["accepted"] * 2


async def test_a_paused_queue_takes_nothing_new(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID)
    await broker.submit([one])
    raw.hset(f"{T}:control", "paused", "1")
    before = everything(raw)
    answers = await broker.submit([one, submission("Bye", rid=RID), submission()])
    assert [answer.outcome for answer in answers] == ["duplicate", "conflict", "full"]
    assert answers[2] == Submitted("full", depth=1, limit=1024, reason="paused", retry_after_s=1.0)
    assert everything(raw) == before
    raw.hdel(f"{T}:control", "paused")
    assert (await broker.submit([submission()]))[0].outcome == "accepted"


async def test_a_crowded_server_takes_nothing_new(broker: Broker, raw: Any) -> None:
    await broker.announce(card(), life_ms=60_000, crowded=True)
    (answer,) = await broker.submit([submission()])
    assert (answer.outcome, answer.reason) == ("full", "memory")
    # A worker that sees room does not overrule the one that saw none; time does.
    await broker.announce(card("w2"), life_ms=60_000)
    assert (await broker.submit([submission()]))[0].reason == "memory"
    until = int(raw.hget(f"{T}:control", "crowded_until"))
    assert until - 30_000 <= now_ms(raw) < until
    raw.hset(f"{T}:control", "crowded_until", now_ms(raw))
    assert (await broker.submit([submission()]))[0].outcome == "accepted"


@pytest.mark.parametrize(
    ("depth", "rate", "seconds"),
    [
        (40, "8.000", 0.5),  # a tenth of the queue, 4 requests, at 8 a second
        (40, "0.500", 8.0),
        (40, "1000.000", 0.1),
        (40, "0.001", 30.0),
        (40, "0.000", 1.0),
        (40, None, 1.0),
        (7, "3.000", 0.234),
    ],
)
async def test_when_to_come_again(
    broker: Broker, raw: Any, depth: int, rate: str | None, seconds: float
) -> None:
    await broker.submit([submission() for _ in range(depth)])
    if rate is not None:
        raw.hset(f"{T}:sweep", "rate", rate)
    (answer,) = await broker.submit([submission()], max_queue_depth=depth)
    assert answer == Submitted("full", depth=depth, limit=depth, reason="requests", retry_after_s=seconds)


async def test_requests_are_counted_before_tokens(broker: Broker) -> None:
    await broker.announce(card(max_queue_depth=1, max_queue_tokens=COST))
    answers = await broker.submit([submission(), submission()])
    assert answers[1].reason == "requests"


async def test_a_fast_queue_that_is_paused_is_not_asked_every_moment(broker: Broker, raw: Any) -> None:
    raw.hset(f"{T}:sweep", "rate", "100000")
    raw.hset(f"{T}:control", "paused", "1")
    (answer,) = await broker.submit([submission()])
    assert (answer.reason, answer.retry_after_s) == ("paused", 1.0)
