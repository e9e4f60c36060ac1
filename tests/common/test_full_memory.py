"""A server out of memory: nothing new comes in, and all that is in comes to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from redis.exceptions import OutOfMemoryError

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
from server_view import OTHER, RID, T, everything, record_of
from silence import LEASE_MS, calm, lose_often
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery
from streamfleet_common.depth import Depth
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import Retry
from streamfleet_common.scripts import Script, ScriptName

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def full_memory(raw: Any) -> Iterator[Callable[[], None]]:
    """A switch: from then on the server is over its memory."""
    yield lambda: raw.config_set("maxmemory", 1)
    raw.config_set("maxmemory", 0)


async def test_full_memory(broker: Broker, raw: Any, full_memory: Callable[[], None]) -> None:
    assert raw.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    running, second = await begin(broker, submission(rid=RID, stream=True), submission())
    third, fourth = submission(stream=True), submission(deadline_ms=1)
    await broker.submit([third, fourth])
    full_memory()

    before = everything(raw)
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.submit([submission(), submission()])
    assert caught.value.reason == "out_of_memory"
    assert caught.value.retryable
    assert "maxmemory" in str(caught.value)
    assert everything(raw) == before

    # All else goes on, so that memory can become free again.
    assert await broker.emit([emission(running, 1, b"x" * 1000)]) == [True]
    assert await broker.finish([finish(running)]) == [True]
    assert await broker.cancel([second.entry.rid], "default") == ["cancelled"]
    entries = await take_all(broker)
    started = await broker.start("w1", entries, START)
    assert isinstance(started[0], Delivery)
    if started[1] != "expired":
        deadline = raw.zscore(f"{T}:open", fourth.envelope.rid)
        await eventually(lambda: raw.time()[0] * 1000 + raw.time()[1] // 1000 > deadline)
        assert (await broker.sweep()).expired == 1
    assert await broker.finish([finish(started[0])]) == [True]
    await broker.announce(CARD)
    assert await broker.cards() == [CARD]
    assert (await broker.status([RID], "default"))[0] is not None
    assert await broker.depth() == Depth(0, 0, 100, 0)

    raw.config_set("maxmemory", 0)
    assert (await broker.submit([submission()]))[0].outcome == "accepted"


async def test_full_memory_buries_garbage(broker: Broker, raw: Any, full_memory: Callable[[], None]) -> None:
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    entries = await take_all(broker)
    full_memory()
    assert await broker.start("w1", entries, START) == ["stray"]
    assert raw.xlen(f"{T}:dead") == 1


async def test_full_memory_gives_work_back_and_takes_it(
    broker: Broker, raw: Any, full_memory: Callable[[], None]
) -> None:
    released, retried, waiting, lost, kept = await begin(
        broker,
        submission(rid=RID),
        submission(),
        submission(retry=Retry(backoff_ms=60_000)),
        submission(),
        submission(rid=OTHER),
    )
    calm(raw)
    full_memory()
    assert await broker.release([released]) == [True]
    assert await broker.finish([retry(retried), retry(waiting)]) == [True, True]
    assert (await broker.renew("w1", [lost, kept])).ours == [True, True]
    raw.xclaim(f"{T}:s:normal", "w", "w1", 0, [lost.entry.eid], idle=LEASE_MS + 1, justid=True)
    assert (await broker.sweep(lease_ms=LEASE_MS)).requeued == 1
    taken = await broker.take("w2", START, streams=["normal:again"], count=9)
    rids = [entry.rid for entry, _ in taken.started]
    assert rids == [released.entry.rid, retried.entry.rid, lost.entry.rid]
    assert (await broker.hand_back("w2", crashed=True)).requests == 3
    assert await broker.cancel([waiting.entry.rid], "default") == ["cancelled"]
    assert await broker.finish([finish(kept)]) == [True]
    assert raw.zcard(f"{T}:open") == 3


async def test_full_memory_buries_the_dead(broker: Broker, raw: Any, full_memory: Callable[[], None]) -> None:
    await broker.announce(CARD, keep_payload=True)
    await broker.submit([submission(rid=RID)])
    await lose_often(broker, raw, 3)
    full_memory()
    await begin_waiting(broker)
    await broker.hand_back("w1", crashed=True)
    assert record_of(raw).state == "dead"
    assert b"payload" in raw.xrange(f"{T}:dead")[0][1]


async def test_full_memory_refuses_plain_writes_and_lets_plain_reads_pass(
    broker: Broker, raw: Any, full_memory: Callable[[], None]
) -> None:
    """What the scripts' flags rest on: where Redis changes its mind about this, we want to know."""
    await broker.submit([submission(rid=RID)])
    full_memory()
    with pytest.raises(OutOfMemoryError):
        raw.xadd("s", {"a": "b"})
    with pytest.raises(OutOfMemoryError):
        raw.hset("h", "a", "b")
    with pytest.raises(OutOfMemoryError):
        raw.eval("return redis.call('HSET', KEYS[1], 'a', 'b')", 1, "h")
    (entry,) = await take_all(broker)
    assert raw.xclaim(f"{T}:s:normal", "w", "w1", 0, [entry.eid], justid=True) == [entry.eid.encode()]
    assert raw.publish("c", "x") == 0
    assert raw.eval("#!lua flags=allow-oom\nreturn redis.call('HSET', KEYS[1], 'a', 'b')", 1, "h") == 1
    # Without flags a script is judged by its first write only: one that frees first gets through. `submit`
    # writes to streams first, and says `#!lua`, so that the whole of it is refused.
    text = "redis.call('DEL', KEYS[1]) return redis.call('HSET', KEYS[2], 'a', 'b')"
    assert raw.eval(text, 2, "h", "i") == 1
    with pytest.raises(OutOfMemoryError):
        raw.eval(f"#!lua\n{text}", 2, "h", "j")
    assert not raw.exists("j")


@pytest.mark.parametrize("name", get_args(ScriptName))
def test_only_submit_and_move_are_refused(name: ScriptName) -> None:
    first = Script.load(name).text.partition("\n")[0]
    # One that writes nothing is never refused, and may run on a replica, too.
    others = {"submit": "#!lua", "move": "#!lua", "backlog": "#!lua flags=no-writes"}
    assert first == others.get(name, "#!lua flags=allow-oom")
