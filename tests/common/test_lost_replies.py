"""Calls that the server ran, and whose replies nobody heard."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker_parts import (
    CARD,
    START,
    begin,
    begin_waiting,
    emission,
    finish,
    retry,
    submission,
    take_all,
)
from eventually import eventually
from lossy_proxy import LossyProxy
from server_view import OTHER, RID, T, dead_of, events_of, record_of, waiting_in
from silence import LEASE_MS, age, calm, lose_often
from streamfleet_common.broker import Broker
from streamfleet_common.calls import ATTEMPTS
from streamfleet_common.deliveries import Delivery
from streamfleet_common.depth import Depth
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, Retry
from streamfleet_common.scripts import ScriptName

pytestmark = pytest.mark.usefixtures("impatient")


def lose(proxy: LossyProxy, broker: Broker, name: ScriptName, count: int = 1) -> bytes:
    marker = broker._calls._scripts[name].sha.encode()
    proxy.lose_reply(marker, count)
    return marker


async def test_a_lost_reply_of_submit(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    marker = lose(proxy, lossy, "submit")
    (answer,) = await lossy.submit([submission(rid=RID)])
    assert proxy.lost.is_set()
    assert proxy.count(marker) == 2
    assert (answer.outcome, answer.state) == ("duplicate", "queued")
    assert raw.xlen(f"{T}:s:normal") == raw.zcard(f"{T}:open") == 1


async def test_a_lost_reply_of_submit_at_the_limit(lossy: Broker, proxy: LossyProxy) -> None:
    lose(proxy, lossy, "submit")
    batch = [submission(), submission(), submission()]
    answers = await lossy.submit(batch, max_queue_depth=2)
    assert [answer.outcome for answer in answers] == ["duplicate", "duplicate", "full"]


async def test_a_lost_reply_of_start(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    await lossy.submit([submission(rid=RID, stream=True)])
    entries = await take_all(lossy)
    lose(proxy, lossy, "start")
    (delivery,) = await lossy.start("w1", entries, START)
    assert proxy.lost.is_set()
    assert isinstance(delivery, Delivery)
    assert (delivery.epoch, delivery.attempts) == (1, 1)
    assert events_of(raw) == ["1-0"]


async def test_a_lost_reply_of_a_start_that_met_garbage(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    lose(proxy, lossy, "start")
    assert await lossy.start("w1", await take_all(lossy), START) == ["stray"]
    assert proxy.lost.is_set()
    assert raw.xlen(f"{T}:dead") == 1


async def test_a_lost_reply_of_emit(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID, stream=True))
    with raw.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"{T}:c:default:{RID}")
        channel.get_message(timeout=60)
        lose(proxy, lossy, "emit")
        assert await lossy.emit([emission(delivery, seq, b"x") for seq in (1, 2)]) == [True, True]
        assert proxy.lost.is_set()
        assert events_of(raw) == ["1-0", "1-1", "1-2"]
        assert [channel.get_message(timeout=60)["data"] for _ in range(2)] == [b"1-1 x", b"1-2 x"]
        channel.ping()
        assert channel.get_message(timeout=60)["type"] == "pong"


async def test_a_lost_reply_of_finish(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID, stream=True))
    lose(proxy, lossy, "finish")
    assert await lossy.finish([finish(delivery)]) == [True]
    assert proxy.lost.is_set()
    assert events_of(raw) == ["1-0", "2-1"]
    assert raw.zcard(f"{T}:open") == raw.xlen(f"{T}:s:normal") == 0


async def test_lost_replies_of_cancel_and_sweep(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    await lossy.submit([submission(rid=RID, stream=True), submission(deadline_ms=1)])
    lose(proxy, lossy, "cancel")
    assert await lossy.cancel([RID], "default") == ["cancelled"]
    assert proxy.lost.is_set()
    assert events_of(raw) == ["1-1"]
    deadline = raw.zrange(f"{T}:open", 0, -1, withscores=True)[0][1]
    await eventually(lambda: raw.time()[0] * 1000 + raw.time()[1] // 1000 > deadline)
    lose(proxy, lossy, "sweep")
    assert (await lossy.sweep()).expired == 0  # the one that did it was not heard
    assert proxy.lost.is_set()
    assert raw.zcard(f"{T}:open") == 0


async def test_a_lost_reply_of_announce(lossy: Broker, proxy: LossyProxy) -> None:
    lose(proxy, lossy, "announce")
    await lossy.announce(CARD)
    assert proxy.lost.is_set()
    assert await lossy.cards() == [CARD]
    assert await lossy.queues() == ["q"]


async def test_lost_replies_of_questions(lossy: Broker, proxy: LossyProxy) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID, stream=True))
    await lossy.announce(CARD)

    async def after_a_loss(marker: bytes, ask: Callable[[], Awaitable[Any]]) -> Any:
        proxy.lose_reply(marker)
        answer = await ask()
        assert proxy.lost.is_set(), marker
        return answer

    assert await after_a_loss(b"HGETALL", lossy.cards) == [CARD]
    assert await after_a_loss(b"XPENDING", lossy.depth) == Depth(0, 1, 100, 0)
    assert await after_a_loss(b"HKEYS", lossy.queues) == ["q"]
    (record,) = await after_a_loss(b"MGET", lambda: lossy.status([RID], "default"))
    assert record.owner == delivery.owner
    (frame,) = await after_a_loss(b"XRANGE", lambda: lossy.events(RID))
    assert frame.id == "1-0"
    await after_a_loss(b"PING", lossy.ping)


async def test_a_lost_reply_of_read_is_an_error_and_never_repeated(
    lossy: Broker, proxy: LossyProxy, raw: Any
) -> None:
    batch = [submission(), submission()]
    await lossy.submit(batch)
    proxy.lose_reply(b"XREADGROUP")
    with pytest.raises(BrokerUnavailable) as caught:
        await lossy.read("w1", LANES, 1, block_ms=None)
    assert caught.value.reason == "unreachable"
    assert proxy.count(b"XREADGROUP") == 1
    assert raw.xpending(f"{T}:s:normal", "w")["pending"] == 1
    # The next read goes on behind it; what was given out unheard is still to be found.
    assert [entry.rid for entry in await take_all(lossy)] == [batch[1].envelope.rid]
    assert [entry.rid for entry in await lossy.given("w1")] == [one.envelope.rid for one in batch]


async def test_replies_that_are_lost_again_and_again(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    marker = lose(proxy, lossy, "submit", count=1000)
    with pytest.raises(BrokerUnavailable) as caught:
        await lossy.submit([submission(rid=RID)])
    assert caught.value.reason == "unreachable"
    assert caught.value.retryable
    assert ATTEMPTS <= proxy.count(marker) < 1000
    proxy.lose_reply(marker, 0)
    assert raw.zcard(f"{T}:open") == raw.xlen(f"{T}:s:normal") == 1
    assert (await lossy.submit([submission(rid=RID)]))[0].outcome == "duplicate"


async def test_a_cancelled_call_leaves_no_reply_for_the_next(lossy: Broker, proxy: LossyProxy) -> None:
    await lossy.submit([submission()])  # connects
    before = proxy.count(b"EVALSHA")
    proxy.is_mute = True
    calls = [asyncio.create_task(lossy.submit([submission()])) for _ in range(20)]
    await eventually(lambda: proxy.count(b"EVALSHA") == before + 20)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    proxy.is_mute = False
    # The first shows that answers are missing, unless that was noticed before: it is repeated over a new
    # connection then.
    assert (await lossy.submit([submission()]))[0].outcome in ("duplicate", "accepted")
    for _ in range(20):
        assert (await lossy.submit([submission()]))[0].outcome == "accepted"
        assert await lossy.status([RID], "default") == [None]


async def test_a_lost_reply_of_take(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    """What was taken unheard is not lost: the repetition takes more, and `given` knows it all."""
    batch = [submission(stream=True) for _ in range(3)]
    await lossy.submit(batch)
    lose(proxy, lossy, "start")
    taken = await lossy.take("w1", START, streams=["normal"], count=1)
    assert proxy.lost.is_set()
    rids = [one.envelope.rid for one in batch]
    assert [entry.rid for entry, _ in taken.started] == [rids[1]]
    given = await lossy.given("w1")
    assert [entry.rid for entry in given] == rids[:2]
    again = await lossy.start("w1", given, START)
    assert [(one.epoch, one.attempts) for one in again if isinstance(one, Delivery)] == [(1, 1), (1, 1)]
    assert [events_of(raw, rid) for rid in rids] == [["1-0"], ["1-0"], []]


async def test_a_lost_reply_of_renew(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID))
    lose(proxy, lossy, "renew")
    assert (await lossy.renew("w1", [delivery])).ours == [True]
    assert proxy.lost.is_set()
    (entry,) = raw.xpending_range(f"{T}:s:normal", "w", "-", "+", 9)
    assert (entry["times_delivered"], entry["consumer"]) == (1, b"w1")


async def test_a_lost_reply_of_release(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID))
    lose(proxy, lossy, "release")
    # It is nobody's any more when the repetition comes; what counts is that it went back once.
    assert await lossy.release([delivery]) == [False]
    assert proxy.lost.is_set()
    assert waiting_in(raw, "normal:again") == [RID]
    assert (record_of(raw).epoch, record_of(raw).attempts) == (2, 1)
    assert raw.xlen(f"{T}:s:normal") == 0


async def test_a_lost_reply_of_a_retry(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID))
    lose(proxy, lossy, "finish")
    assert await lossy.finish([retry(delivery)]) == [False]
    assert proxy.lost.is_set()
    assert waiting_in(raw, "normal:again") == [RID]
    assert (record_of(raw).epoch, record_of(raw).attempts) == (2, 1)


async def test_a_lost_reply_of_a_last_retry(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    (delivery,) = await begin(lossy, submission(rid=RID, stream=True, retry=Retry(attempts=1)))
    lose(proxy, lossy, "finish")
    assert await lossy.finish([retry(delivery)]) == [True]
    assert proxy.lost.is_set()
    assert events_of(raw) == ["1-0", "2-1"]
    assert record_of(raw).state == "failed"


async def test_a_lost_reply_of_a_sweep_that_took(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    await begin(lossy, submission(rid=RID))
    age(raw)
    calm(raw)
    lose(proxy, lossy, "sweep")
    assert (await lossy.sweep(lease_ms=LEASE_MS)).requeued == 0  # the one that took it was not heard
    assert proxy.lost.is_set()
    record = record_of(raw)
    assert (record.epoch, record.crashes) == (2, 1)
    assert waiting_in(raw, "normal:again") == [RID]


async def test_a_lost_reply_of_a_sweep_that_buried(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    await lossy.submit([submission(rid=RID)])
    await lose_often(lossy, raw, 3)
    await begin_waiting(lossy)
    age(raw)
    calm(raw)
    lose(proxy, lossy, "sweep")
    await lossy.sweep(lease_ms=LEASE_MS)
    assert proxy.lost.is_set()
    assert len(dead_of(raw)) == 1
    assert record_of(raw).state == "dead"


async def test_a_lost_reply_of_hand_back(lossy: Broker, proxy: LossyProxy, raw: Any) -> None:
    await begin(lossy, submission(rid=RID), submission(rid=OTHER))
    lose(proxy, lossy, "handback")
    assert (await lossy.hand_back("w1", crashed=True)).requests == 0  # nothing was left to take
    assert proxy.lost.is_set()
    assert waiting_in(raw, "normal:again") == [RID, OTHER]
    assert [record_of(raw, rid).crashes for rid in (RID, OTHER)] == [1, 1]
