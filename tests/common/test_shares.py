"""How much of a queue one tenant may have, and that what counts against it is always right."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from broker_parts import START, STREAMS, begin, card, finish, retry, submission, take_all
from server_view import OTHER, RID, T, now_ms
from silence import lose, sweep
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Finish
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, Usage
from streamfleet_common.shares import EVERYBODY, Share
from streamfleet_common.submissions import Submission, Submitted

COST = submission().tokens
HOUR_S, DAY_MS = 3600, 86_400_000


def of(tenant: str, count: int = 1, **fields: Any) -> list[Submission]:
    return [submission(tenant=tenant, **fields) for _ in range(count)]


def recount(raw: Any) -> dict[str, int]:
    """What the records of all open requests add up to."""
    counts: Counter[str] = Counter()
    for rid in raw.zrange(f"{T}:open", 0, -1):
        data = raw.get(f"{T}:r:{rid.decode()}")
        record = Record.parse(data)
        tokens = int(data.partition(b"\n")[0].split(b"|")[-3])
        counts.update({record.tenant: 1, f"{record.tenant}|t": tokens, "*": tokens})
        if record.state == "running":
            counts["*|r"] += tokens
    return dict(counts)


def counted(raw: Any) -> dict[str, int]:
    return {field.decode(): int(number) for field, number in raw.hgetall(f"{T}:tenants").items()}


async def outcomes(broker: Broker, batch: list[Submission]) -> list[str]:
    return [answer.reason or answer.outcome for answer in await broker.submit(batch)]


# --- what a share allows


async def test_open_requests_at_exactly_the_share(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(max_open_requests=2)})
    answers = await broker.submit(of("acme", 3))
    assert [answer.outcome for answer in answers] == ["accepted", "accepted", "full"]
    assert answers[2] == Submitted("full", depth=2, limit=2, reason="tenant_requests", retry_after_s=1.0)
    assert await broker.open_of("acme") == (2, 2 * COST)
    assert await broker.open_of("nobody") == (0, 0)


async def test_one_tenant_over_its_share_holds_up_nobody_else(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(max_open_requests=1)})
    batch = [*of("acme", 2), *of("beta", 2), *of("acme"), *of("globex")]
    assert await outcomes(broker, batch) == [
        *("accepted", "tenant_requests"),
        *("accepted", "accepted"),
        "tenant_requests",
        "accepted",
    ]


async def test_one_tenant_over_its_share_in_a_batch_of_two(broker: Broker) -> None:
    await broker.set_shares({EVERYBODY: Share(max_open_requests=1)})
    await broker.submit(of("acme"))
    assert await outcomes(broker, [*of("acme"), *of("beta")]) == ["tenant_requests", "accepted"]


async def test_open_tokens_at_exactly_the_share(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(max_open_tokens=2 * COST + 2)})
    small = of("acme", prompt="four", max_tokens=1)
    assert small[0].tokens == 2
    assert await outcomes(broker, [*of("acme", 3), *small, *small[:0], *of("beta")]) == [
        *("accepted", "accepted", "tenant_tokens"),
        "accepted",
        "accepted",
    ]
    (answer,) = await broker.submit(of("acme", prompt="four", max_tokens=1))
    assert (answer.reason, answer.limit) == ("tenant_tokens", 2 * COST + 2)


async def test_who_has_nothing_open_may_have_any_one_request(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(max_open_tokens=1)})
    large = submission("x" * 4000, rid=RID, tenant="acme")
    assert await outcomes(broker, [large, *of("acme")]) == ["accepted", "tenant_tokens"]
    await broker.cancel([RID], "acme")
    assert await outcomes(broker, of("acme")) == ["accepted"]


async def test_a_days_tokens_are_those_used_and_those_open(broker: Broker, raw: Any) -> None:
    await broker.set_shares({"acme": Share(tokens_per_day=500)})
    deliveries = await begin(broker, *of("acme", 2))
    await broker.finish([used(one, 100, 60) for one in deliveries])  # 320 are left to 180
    assert await outcomes(broker, [*of("acme", 2), *of("beta")]) == ["accepted", "tenant_budget", "accepted"]
    (answer,) = await broker.submit(of("acme"))
    left_s = (DAY_MS - now_ms(raw) % DAY_MS) / 1000
    assert (answer.reason, answer.limit) == ("tenant_budget", 500)
    assert answer.retry_after_s == pytest.approx(max(1.0, min(HOUR_S, left_s)), abs=5)
    # Never a request that is too large for the day, however little was used.
    await broker.set_shares({"acme": Share(tokens_per_day=100), "beta": Share(tokens_per_day=COST - 1)})
    assert await outcomes(broker, of("beta", 1, max_tokens=127)) == ["tenant_budget"]


def used(delivery: Delivery, prompt: int, completion: int, **fields: Any) -> Finish:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion)
    return finish(delivery, End(**{"state": "done", "of": delivery.epoch, "usage": usage, **fields}))


async def test_a_new_day_is_a_new_budget(broker: Broker, raw: Any) -> None:
    await broker.set_shares({"acme": Share(tokens_per_day=500)})
    (delivery,) = await begin(broker, *of("acme"))
    await broker.finish([used(delivery, 400, 100)])
    assert await outcomes(broker, of("acme")) == ["tenant_budget"]
    (today,) = raw.keys(f"{T}:usage:*")
    raw.rename(today, f"{T}:usage:20200101")
    assert await outcomes(broker, of("acme")) == ["accepted"]


async def test_the_share_of_everybody_is_for_each_who_has_none(broker: Broker) -> None:
    await broker.set_shares({EVERYBODY: Share(1), "acme": Share(2), "free": Share()})
    batch = [*of("beta", 2), *of("globex", 2), *of("acme", 3), *of("free", 4)]
    assert Counter(
        (one.envelope.tenant, answer.outcome)
        for one, answer in zip(batch, await broker.submit(batch), strict=True)
    ) == {
        ("beta", "accepted"): 1,
        ("beta", "full"): 1,
        ("globex", "accepted"): 1,
        ("globex", "full"): 1,
        ("acme", "accepted"): 2,
        ("acme", "full"): 1,
        ("free", "accepted"): 4,
    }


async def test_a_share_counts_what_was_open_before_it(broker: Broker) -> None:
    await broker.submit(of("acme", 3))
    await broker.set_shares({"acme": Share(3)})
    assert await outcomes(broker, of("acme")) == ["tenant_requests"]
    await broker.set_shares({})
    assert await outcomes(broker, of("acme")) == ["accepted"]


async def test_what_was_accepted_before_is_no_new_request(broker: Broker) -> None:
    await broker.set_shares({"acme": Share(1)})
    one = submission(rid=RID, tenant="acme")
    assert await outcomes(broker, [one, one]) == ["accepted", "duplicate"]
    assert await outcomes(broker, [one, submission("Bye", rid=RID, tenant="acme")]) == [
        "duplicate",
        "conflict",
    ]


async def test_a_full_queue_is_said_first(broker: Broker) -> None:
    await broker.announce(card(max_queue_depth=1))
    await broker.set_shares({"acme": Share(1)})
    assert await outcomes(broker, of("acme", 2)) == ["accepted", "requests"]


@pytest.mark.parametrize("written", ["", "1", "1|2", "a|b|c", "-1|0|0", "1|0|0|0", "1|0|0 "])
async def test_a_share_that_is_none_limits_nobody(broker: Broker, raw: Any, written: str) -> None:
    raw.hset(f"{T}:shares", mapping={"acme": written, "beta": "1|0|0"})
    assert await outcomes(broker, [*of("acme", 2), *of("beta", 2)]) == ["accepted"] * 3 + ["tenant_requests"]
    assert await broker.shares() == {"beta": Share(1)}


@pytest.mark.parametrize("key", ["tenants", "shares"])
async def test_keys_of_another_kind_lose_nothing(broker: Broker, raw: Any, key: str) -> None:
    raw.set(f"{T}:{key}", "x")
    assert await outcomes(broker, of("acme", 2)) == ["accepted"] * 2
    deliveries = await begin(broker, *of("acme"))
    assert await broker.finish([finish(one) for one in deliveries]) == [True]


async def test_shares_are_written_as_a_whole(broker: Broker, raw: Any) -> None:
    shares = {"acme": Share(1, 2, 3), EVERYBODY: Share(0, 10**12, 0)}
    await broker.set_shares(shares)
    assert raw.hgetall(f"{T}:shares") == {b"acme": b"1|2|3", b"*": b"0|1000000000000|0"}
    assert await broker.shares() == shares
    await broker.set_shares({"beta": Share(7)})
    assert await broker.shares() == {"beta": Share(7)}
    await broker.set_shares({})
    assert not raw.exists(f"{T}:shares")
    for name in ("", "a b", "a|t", "x" * 65, "**"):
        with pytest.raises(InvalidRequest, match="names no tenant"):
            await broker.set_shares({name: Share()})


@pytest.mark.parametrize("numbers", [(-1,), (0, 10**12 + 1), (0, 0, 1.5), (True,), ("3",)])
def test_a_share_has_bounds(numbers: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequest, match="take a whole number"):
        Share(*numbers)


@pytest.mark.parametrize("data", [b"", b"1|2", b"1|2|3\n", b"9999999999999|0|0", b"\xff|0|0"])
def test_what_is_no_share(data: bytes) -> None:
    with pytest.raises(Undecodable):
        Share.parse(data)
    assert Share.parse(b"1|2|3") == Share(1, 2, 3)


# --- the counts


@pytest.mark.parametrize("way", ["finish", "fail", "cancel", "expire", "expire late", "lost payload", "dead"])
@pytest.mark.parametrize("sub_lanes", [1, 8])
async def test_every_end_gives_back_what_it_counted_for(
    broker: Broker, raw: Any, way: str, sub_lanes: int
) -> None:
    await broker.announce(card("w9", max_queue_depth=100), sub_lanes=sub_lanes)
    deliveries: list[Delivery] = []
    if way == "expire late":
        await broker.submit([submission(rid=RID, tenant="acme", deadline_ms=1)])
        entries = await take_all(broker)
        while (await broker.start("w1", entries, START)) != ["expired"]:
            pass
    else:
        deliveries = await begin(broker, submission(rid=RID, tenant="acme"))
    await broker.submit([submission(rid=OTHER, tenant="acme"), *of("beta", 2)])
    key = broker.keys.stream("normal", 3 if sub_lanes > 1 else 0)
    if way == "finish":
        await broker.finish([finish(one) for one in deliveries * 2])
        await broker.finish([finish(one) for one in deliveries])
    elif way == "fail":
        await broker.finish([finish(one, End(state="failed")) for one in deliveries])
    elif way == "cancel":
        await broker.cancel([RID, RID], "acme")
    elif way == "expire":
        raw.zadd(f"{T}:open", {RID: 1})
        await broker.sweep()
        await broker.sweep()
    elif way == "lost payload":
        eid = deliveries[0].entry.eid
        raw.xdel(key, eid)
        record = raw.get(f"{T}:r:{RID}")
        raw.set(f"{T}:r:{RID}", record.replace(eid.encode(), b"1-1"))
        await sweep(broker, raw)
    elif way == "dead":
        for number in range(4):
            await broker.hand_back("w1" if number == 0 else f"w{number}", crashed=True)
            if number < 3:
                owner = f"w{number + 1}"
                await broker.start(owner, await broker.read(owner, STREAMS, 5, block_ms=None), START)
        assert [one.state for one in await broker.status([RID], "acme") if one] == ["dead"]
        assert counted(raw) == recount(raw)
        return
    assert (
        counted(raw)
        == recount(raw)
        == {"acme": 1, "acme|t": COST, "beta": 2, "beta|t": 2 * COST, "*": 3 * COST}
    )
    await broker.cancel([OTHER], "acme")
    assert counted(raw) == recount(raw) == {"beta": 2, "beta|t": 2 * COST, "*": 2 * COST}


async def test_what_goes_back_still_counts(broker: Broker, raw: Any) -> None:
    deliveries = await begin(broker, *of("acme", 2), *of("beta", 2))
    await broker.release(deliveries[:1])
    await broker.finish([retry(deliveries[1], after_ms=60_000)])
    await lose(broker, raw)
    assert (
        counted(raw)
        == recount(raw)
        == {"acme": 2, "acme|t": 2 * COST, "beta": 2, "beta|t": 2 * COST, "*": 4 * COST}
    )


async def test_counts_are_made_anew_where_records_were_deleted(broker: Broker, raw: Any) -> None:
    await broker.set_shares({"acme": Share(3)})
    await broker.submit([submission(rid=RID, tenant="acme"), *of("acme", 2), *of("beta")])
    assert await outcomes(broker, of("acme")) == ["tenant_requests"]
    raw.delete(f"{T}:r:{RID}")
    # Found by the audit: its deadline is far away.
    await sweep(broker, raw)
    assert (
        counted(raw)
        == recount(raw)
        == {"acme": 2, "acme|t": 2 * COST, "beta": 1, "beta|t": COST, "*": 3 * COST}
    )
    assert not raw.hexists(f"{T}:sweep", "recount")
    assert await outcomes(broker, of("acme", 2)) == ["accepted", "tenant_requests"]


async def test_many_are_not_counted_anew_at_one_go(broker: Broker, raw: Any) -> None:
    await broker.announce(card(max_queue_depth=5000))
    many = of("acme", 2001)
    await broker.submit([submission(rid=RID, tenant="acme"), *many])
    raw.delete(f"{T}:r:{RID}")
    raw.zadd(f"{T}:open", {RID: 1})
    await sweep(broker, raw)
    assert raw.zcard(f"{T}:open") == 2001
    assert counted(raw)["acme"] == 2002
    await broker.cancel([many[0].envelope.rid], "acme")
    await sweep(broker, raw)
    assert counted(raw) == recount(raw) == {"acme": 2000, "acme|t": 2000 * COST, "*": 2000 * COST}


async def test_counts_that_somebody_lost_are_made_anew(broker: Broker, raw: Any) -> None:
    """As after an upgrade, from a version that did not count tenants."""
    await broker.submit([submission(rid=RID, tenant="acme"), *of("acme", 2)])
    raw.hdel(f"{T}:tenants", "acme", "acme|t")
    await broker.cancel([RID], "acme")
    await sweep(broker, raw)
    assert counted(raw) == recount(raw) == {"acme": 2, "acme|t": 2 * COST, "*": 2 * COST}


@pytest.mark.parametrize("seed", range(4))
async def test_counts_at_rest_after_anything(broker: Broker, raw: Any, seed: int) -> None:
    """Ends of all kinds, changes of shares and sub-lanes, and keys that somebody deletes: then a sweep."""
    chance = random.Random(seed)
    tenants = ("default", "acme", "beta", "globex")
    await broker.announce(card(max_queue_depth=60), sub_lanes=1)
    rids: dict[str, str] = {}
    held: list[Delivery] = []
    for _ in range(120):
        step = chance.choice(
            ["submit"] * 4 + ["take"] * 3 + ["end"] * 3 + ["cancel", "share", "split", "harm", "lose"]
        )
        if step == "submit":
            many = [
                one for _ in range(5) for one in of(chance.choice(tenants), max_tokens=chance.randint(1, 9))
            ]
            await broker.submit(many)
            rids |= {one.envelope.rid: one.envelope.tenant for one in many}
        elif step == "take":
            taken = await broker.take("w1", START, streams=STREAMS, count=chance.randint(1, 9))
            held += [one for _, one in taken.started if isinstance(one, Delivery)]
        elif step == "end" and held:
            some = chance.sample(held, min(4, len(held)))
            await broker.finish([chance.choice([finish, retry])(one) for one in some])
        elif step == "cancel" and rids:
            rid = chance.choice(list(rids))
            await broker.cancel([rid], rids[rid])
        elif step == "share":
            await broker.set_shares(
                {chance.choice(tenants): Share(chance.randint(1, 9)), EVERYBODY: Share(20)}
            )
        elif step == "split":
            await broker.announce(card(max_queue_depth=60), sub_lanes=chance.choice([1, 2, 8]))
        elif step == "harm" and rids:
            raw.delete(f"{T}:r:{chance.choice(list(rids))}")
        elif step == "lose":
            await lose(broker, raw)
    for _ in range(2):  # the audit goes over all of them, then the count
        raw.hset(f"{T}:sweep", "audited", 0)
        await sweep(broker, raw)
    assert counted(raw) == recount(raw)
    assert raw.zcard(f"{T}:open") > 0
