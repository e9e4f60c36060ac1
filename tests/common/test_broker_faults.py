"""Lost replies, killed connections, full memory, vanished groups, refused users, no server at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from broker_parts import START, begin, emission, finish, submission, take_all
from eventually import eventually
from lossy_proxy import LossyProxy
from streamfleet_common import calls
from streamfleet_common.broker import Broker
from streamfleet_common.calls import ATTEMPTS
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery
from streamfleet_common.depth import Depth
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import LANES, End
from streamfleet_common.scripts import ScriptName

T = "{q:q:0}"
RID = "00" + "ab" * 16
CARD = Card(
    worker="w1",
    queue="q",
    model="m",
    limits=Limits(max_batch_size=1, max_seq_len=1, max_queue_depth=100, max_request_bytes=1),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BACKOFF_S", 0.001)


def everything(raw: Any) -> dict[bytes, bytes | None]:
    return {key: raw.dump(key) for key in raw.keys("*")}


def events_of(raw: Any, rid: str = RID) -> list[str]:
    return [id_.decode() for id_, _ in raw.xrange(f"{T}:ev:{rid}")]


# --- lost replies


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_url) as made:
        yield made


@pytest.fixture
async def lossy(proxy: LossyProxy, raw: Any) -> AsyncIterator[Broker]:
    """A broker behind the proxy, all of whose scripts the server knows already."""
    connections = Connections.open(proxy.url)
    made = Broker(connections, "q")
    for script in made._calls._scripts.values():
        raw.script_load(script.text)
    await made.create_groups()
    yield made
    await connections.close()


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
        channel.get_message(timeout=5)
        lose(proxy, lossy, "emit")
        assert await lossy.emit([emission(delivery, seq, b"x") for seq in (1, 2)]) == [True, True]
        assert proxy.lost.is_set()
        assert events_of(raw) == ["1-0", "1-1", "1-2"]
        assert [channel.get_message(timeout=5)["data"] for _ in range(2)] == [b"1-1 x", b"1-2 x"]
        channel.ping()
        assert channel.get_message(timeout=5)["type"] == "pong"


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
    marker = lose(proxy, lossy, "submit", ATTEMPTS)
    with pytest.raises(BrokerUnavailable) as caught:
        await lossy.submit([submission(rid=RID)])
    assert caught.value.reason == "unreachable"
    assert caught.value.retryable
    assert proxy.count(marker) == ATTEMPTS
    assert raw.zcard(f"{T}:open") == raw.xlen(f"{T}:s:normal") == 1
    assert (await lossy.submit([submission(rid=RID)]))[0].outcome == "duplicate"


async def test_a_cancelled_call_leaves_no_reply_for_the_next(lossy: Broker, proxy: LossyProxy) -> None:
    await asyncio.gather(*(lossy.ping() for _ in range(16)))  # all connections there are
    proxy.is_mute = True
    calls = [asyncio.create_task(lossy.submit([submission()])) for _ in range(20)]
    await eventually(lambda: proxy.count(b"EVALSHA") == 16)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    proxy.is_mute = False
    for _ in range(20):
        assert (await lossy.submit([submission()]))[0].outcome == "accepted"
        assert await lossy.status([RID], "default") == [None]


# --- killed connections


async def test_killed_connections(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    for seq in range(1, 4):
        raw.client_kill_filter(_type="normal", skipme=True)
        assert await broker.emit([emission(delivery, seq, b"x")]) == [True]
    raw.client_kill_filter(_type="normal", skipme=True)
    assert (await broker.depth()).open == 1
    raw.client_kill_filter(_type="normal", skipme=True)
    assert await broker.finish([finish(delivery)]) == [True]
    assert events_of(raw) == ["1-0", "1-1", "1-2", "1-3", "2-1"]


def blocked_clients(raw: Any) -> int:
    return int(raw.info("clients")["blocked_clients"])


async def test_a_kill_under_a_blocked_read(broker: Broker, raw: Any) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=10_000))
    await eventually(lambda: blocked_clients(raw) == 1)
    raw.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(BrokerUnavailable):
        await reading
    await broker.submit([submission(rid=RID)])
    assert [entry.rid for entry in await take_all(broker)] == [RID]


async def test_a_blocked_read_wakes_for_work(broker: Broker, raw: Any) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=500))
    await eventually(lambda: blocked_clients(raw) == 1)
    await broker.submit([submission(rid=RID, lane="bulk")])
    assert [entry.rid for entry in await reading] == [RID]


async def test_many_calls_on_few_connections(redis_url: str) -> None:
    connections = Connections.open(redis_url, max_connections=2)
    broker = Broker(connections, "q")
    answers = await asyncio.gather(*(broker.submit([submission()]) for _ in range(100)))
    assert sorted(answer.depth for (answer,) in answers) == list(range(1, 101))
    await connections.close()


# --- vanished keys


@pytest.mark.parametrize("harm", ["flushall", "delete", "destroy"])
async def test_groups_that_vanish_under_a_blocked_read(broker: Broker, raw: Any, harm: str) -> None:
    reading = asyncio.create_task(broker.read("w1", LANES, 1, block_ms=500))
    await eventually(lambda: blocked_clients(raw) == 1)
    if harm == "flushall":
        raw.flushall()
    elif harm == "delete":
        raw.delete(f"{T}:s:normal")
    else:
        raw.xgroup_destroy(f"{T}:s:normal", "w")
    await broker.submit([submission(rid=RID)])
    entries = await reading
    for _ in range(2):  # one read to find the group gone, one behind it
        entries += await take_all(broker)
    assert [entry.rid for entry in entries] == [RID]
    (delivery,) = await broker.start("w1", entries, START)
    assert isinstance(delivery, Delivery)
    assert await broker.finish([finish(delivery)]) == [True]


async def test_everything_lost_while_work_runs(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    raw.flushall()
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    assert (await broker.sweep()).expired == 0
    assert raw.keys("*") == [f"{T}:sweep".encode()]


async def test_a_lane_of_another_kind_is_told(broker: Broker, raw: Any) -> None:
    raw.delete(f"{T}:s:normal")
    raw.set(f"{T}:s:normal", "x")
    with pytest.raises(BrokerUnavailable) as caught:
        await take_all(broker)
    assert caught.value.reason == "refused"


async def test_flushed_scripts_are_sent_again(broker: Broker, raw: Any) -> None:
    raw.script_flush()
    await broker.submit([submission(rid=RID, stream=True), submission(deadline_ms=1)])
    entries = await take_all(broker)
    raw.script_flush()
    delivery, _ = await broker.start("w1", entries, START)
    assert isinstance(delivery, Delivery)
    raw.script_flush()
    assert await broker.emit([emission(delivery, 1, b"x")]) == [True]
    raw.script_flush()
    assert await broker.finish([finish(delivery)]) == [True]
    raw.script_flush()
    assert await broker.cancel([RID], "default") == ["done"]
    raw.script_flush()
    await broker.sweep()
    raw.script_flush()
    await broker.announce(CARD)
    assert await broker.cards() == [CARD]


# --- memory


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


# --- users


def url_for(redis_url: str, user: str, password: str) -> str:
    return redis_url.replace("redis://", f"redis://{user}:{password}@")


@pytest.fixture
def user(raw: Any) -> Iterator[Callable[[list[str]], None]]:
    """Makes the user `u` with the password `s3cret` and these commands."""

    def make(commands: list[str]) -> None:
        raw.acl_setuser(
            "u", enabled=True, passwords=["+s3cret"], keys=["{q:q:0}*"], reset=True, commands=commands
        )

    yield make
    raw.acl_deluser("u")


async def forbidden(url: str) -> None:
    connections = Connections.open(url)
    broker = Broker(connections, "q")
    calls: list[Callable[[], Awaitable[Any]]] = [
        broker.create_groups,
        broker.depth,
        broker.cards,
        broker.ping,
        lambda: broker.submit([submission()]),
        lambda: broker.read("w1", LANES, 1, block_ms=None),
    ]
    for call in calls:
        with pytest.raises(BrokerUnavailable) as caught:
            await call()
        assert caught.value.reason == "forbidden", caught.value
        assert "s3cret" not in str(caught.value)
        assert "wrong" not in str(caught.value)
    await connections.close()


async def test_a_wrong_password(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["+@all"])
    await forbidden(url_for(redis_url, "u", "wrong"))
    await forbidden(url_for(redis_url, "nobody", "wrong"))


async def test_a_user_who_may_nothing(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["-@all", "+hello", "+auth"])
    await forbidden(url_for(redis_url, "u", "s3cret"))


async def test_a_server_that_wants_a_password(redis_url: str, raw: Any) -> None:
    raw.config_set("requirepass", "s3cret")
    try:
        await forbidden(redis_url)
    finally:
        raw.config_set("requirepass", "")


async def test_keys_of_another_queue(redis_url: str, user: Callable[[list[str]], None]) -> None:
    user(["+@all"])
    connections = Connections.open(url_for(redis_url, "u", "s3cret"))
    assert (await Broker(connections, "q").submit([submission()]))[0].outcome == "accepted"
    with pytest.raises(BrokerUnavailable) as caught:
        await Broker(connections, "other").submit([submission()])
    assert caught.value.reason == "forbidden"
    await connections.close()


# --- servers


async def test_no_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    connections = Connections.open(f"redis://:s3cret@127.0.0.1:{port}/0")
    broker = Broker(connections, "q")
    calls: list[Callable[[], Awaitable[Any]]] = [
        broker.create_groups,
        broker.depth,
        broker.cards,
        broker.queues,
        broker.ping,
        lambda: broker.submit([submission()]),
        lambda: broker.read("w1", LANES, 1, block_ms=None),
        lambda: broker.status([RID], "default"),
        lambda: broker.events(RID),
    ]
    for call in calls:
        with pytest.raises(BrokerUnavailable, match="is it running") as caught:
            await call()
        assert caught.value.reason == "unreachable"
        assert "s3cret" not in str(caught.value)
    await connections.close()


async def test_a_server_that_died_and_is_back(server: EmbeddedBroker, broker: Broker) -> None:
    await broker.submit([submission(rid=RID)])
    server.kill()
    with pytest.raises(BrokerUnavailable):
        await broker.submit([submission()])
    with pytest.raises(BrokerUnavailable):
        await take_all(broker)
    server.restart()
    # Whether the data came back is the server's business; all steps work again, without being told.
    await take_all(broker)
    one = submission()
    assert (await broker.submit([one]))[0].outcome == "accepted"
    assert one.envelope.rid in [entry.rid for entry in await take_all(broker)]


async def test_a_replica(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    raw.replicaof("127.0.0.1", 1)
    try:
        for call in (
            lambda: broker.submit([submission()]),
            lambda: broker.finish([finish(delivery, End(state="done"))]),
        ):
            with pytest.raises(BrokerUnavailable, match="primary") as caught:
                await call()
            assert caught.value.reason == "read_only"
    finally:
        raw.replicaof("NO", "ONE")
    assert await broker.finish([finish(delivery)]) == [True]
