"""Subscriptions on the real server: confirmed, shared, cancelled, cut and silent ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from broker_parts import Recorder
from eventually import eventually
from lossy_proxy import LossyProxy
from streamfleet_common import subscriber as subscriber_module
from streamfleet_common.connections import Connections
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.subscriber import Subscriber


@pytest.fixture
async def subscriber(connections: Connections) -> AsyncIterator[Subscriber]:
    made = Subscriber(connections)
    yield made
    await made.close()


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_url) as made:
        yield made


@pytest.fixture
async def behind(proxy: LossyProxy) -> AsyncIterator[Subscriber]:
    """A subscriber behind the proxy."""
    connections = Connections.open(proxy.url)
    made = Subscriber(connections)
    yield made
    await made.close()
    await connections.close()


def lines(raw: Any) -> list[str]:
    """The ids of the pub/sub connections that the server has."""
    return [client["id"] for client in raw.client_list(_type="pubsub")]


def channels(raw: Any) -> set[str]:
    return {name.decode() for name in raw.pubsub_channels()}


async def heard(*ears: Recorder, messages: int) -> None:
    await eventually(lambda: all(len(ear.messages) >= messages for ear in ears), "a message")


async def test_whoever_returned_from_subscribe_is_subscribed(subscriber: Subscriber, raw: Any) -> None:
    for number in range(50):
        ear = Recorder()
        await subscriber.subscribe([(f"c{number}", ear)])
        assert raw.publish(f"c{number}", b"\x00\xff") == 1
        await heard(ear, messages=1)
        assert ear.messages == [b"\x00\xff"]
    assert len(lines(raw)) == 1


async def test_messages_keep_their_order_and_their_channel(subscriber: Subscriber, raw: Any) -> None:
    ears = [Recorder(), Recorder()]
    await subscriber.subscribe([("a", ears[0]), ("b", ears[1])])
    for number in range(100):
        raw.publish("ab"[number % 2], str(number))
    await heard(*ears, messages=50)
    assert ears[0].messages == [str(number).encode() for number in range(0, 100, 2)]
    assert ears[1].messages == [str(number).encode() for number in range(1, 100, 2)]


async def test_a_large_message(subscriber: Subscriber, raw: Any) -> None:
    ear = Recorder()
    await subscriber.subscribe([("c", ear)])
    raw.publish("c", b"x" * 1_000_000)
    await heard(ear, messages=1)
    assert ear.messages == [b"x" * 1_000_000]


async def test_nothing_is_nothing(subscriber: Subscriber, raw: Any) -> None:
    ear = Recorder()
    await subscriber.subscribe([])
    subscriber.unsubscribe([])
    subscriber.unsubscribe(["never heard of"])
    await subscriber.subscribe([("c", ear)])
    await subscriber.subscribe([])
    assert raw.publish("c", "x") == 1
    await heard(ear, messages=1)
    assert ear.gaps == 0


async def test_what_is_wanted_at_once_goes_out_in_one_command(
    behind: Subscriber, proxy: LossyProxy, raw: Any
) -> None:
    await behind.subscribe([("first", Recorder())])
    sent = proxy.count(b"SUBSCRIBE")
    ears = {f"c{number}": Recorder() for number in range(200)}
    await asyncio.gather(*(behind.subscribe([item]) for item in ears.items()))
    assert proxy.count(b"SUBSCRIBE") == sent + 1
    assert channels(raw) == {"first", *ears}
    behind.unsubscribe(ears)
    await eventually(lambda: channels(raw) == {"first"})
    assert proxy.count(b"UNSUBSCRIBE") == 1


async def test_unsubscribing_leaves_nothing_behind(subscriber: Subscriber, raw: Any) -> None:
    for round_ in range(20):
        names = [f"c{round_}-{number}" for number in range(50)]
        await subscriber.subscribe([(name, Recorder()) for name in names])
        subscriber.unsubscribe(names)
    await eventually(lambda: channels(raw) == set())
    for left in (
        subscriber._ears,
        subscriber._known.asked,
        subscriber._known.owed,
        subscriber._known.live,
        subscriber._changed,
    ):
        assert not left


# --- several on one channel


async def test_two_listeners_of_one_channel(behind: Subscriber, proxy: LossyProxy, raw: Any) -> None:
    first, second = Recorder(), Recorder()
    await asyncio.gather(behind.subscribe([("c", first)]), behind.subscribe([("c", second)]))
    assert proxy.count(b"SUBSCRIBE") == 1
    raw.publish("c", "1")
    await heard(first, second, messages=1)
    third = Recorder()
    await behind.subscribe([("c", third)])
    behind.unsubscribe(["c"], first)
    raw.publish("c", "2")
    await heard(second, third, messages=1)
    await heard(second, messages=2)
    assert (first.messages, second.messages, third.messages) == ([b"1"], [b"1", b"2"], [b"2"])
    assert first.gaps == second.gaps == third.gaps == 0
    behind.unsubscribe(["c"])
    await eventually(lambda: channels(raw) == set())


async def test_a_listener_may_leave_while_it_hears(subscriber: Subscriber, raw: Any) -> None:
    class Once(Recorder):
        def heard(self, data: bytes) -> None:
            super().heard(data)
            subscriber.unsubscribe(["c"], self)

    once, always = Once(), Recorder()
    await subscriber.subscribe([("c", once), ("c", always)])
    raw.publish("c", "1")
    await heard(once, always, messages=1)
    raw.publish("c", "2")
    await heard(always, messages=2)
    assert once.messages == [b"1"]


async def test_leaving_and_coming_back_is_no_gap(subscriber: Subscriber, raw: Any) -> None:
    for round_ in range(20):
        ear = Recorder()
        await subscriber.subscribe([("c", ear)])
        assert raw.publish("c", str(round_)) == 1
        await heard(ear, messages=1)
        assert ear.messages == [str(round_).encode()]
        assert ear.gaps == 0
        subscriber.unsubscribe(["c"])


async def test_a_confirmation_of_an_earlier_subscription_does_not_count(
    behind: Subscriber, proxy: LossyProxy, raw: Any
) -> None:
    await behind.subscribe([("other", Recorder())])
    proxy.is_mute = True
    with pytest.raises(BrokerUnavailable):
        await behind.subscribe([("c", Recorder())], timeout_s=0.02)
    await eventually(lambda: proxy.count(b"UNSUBSCRIBE") == 1)
    ear = Recorder()
    again = asyncio.create_task(behind.subscribe([("c", ear)]))
    await eventually(lambda: proxy.count(b"SUBSCRIBE") == 4)  # other, c, its UNSUBSCRIBE, and c again
    assert not again.done()
    # The replies of the first two came while nobody could hear; the last two are the ones that count.
    await eventually(lambda: channels(raw) == {"other", "c"})
    proxy.is_mute = False
    proxy.cut()
    await again
    assert raw.publish("c", "x") == 1
    await heard(ear, messages=1)
    assert ear.gaps == 0


async def test_the_last_confirmation_counts(subscriber: Subscriber) -> None:
    ear = Recorder()
    subscriber._known.owed["c"] = 2  # asked, left, and asked again
    subscriber._known.asked.add("c")
    waiting = asyncio.create_task(subscriber.subscribe([("c", ear)]))
    await asyncio.sleep(0)
    subscriber._take([b"subscribe", b"c", 1])
    assert not subscriber._ears.of("c")[0].ready.done()
    subscriber._take([b"unsubscribe", b"c", 0])
    subscriber._take([b"subscribe", b"c", 1])
    assert subscriber._ears.of("c")[0].ready.done()
    await waiting
    assert ear.gaps == 0


# --- cancelled and late


async def test_a_cancelled_subscribe_disturbs_nobody(behind: Subscriber, proxy: LossyProxy, raw: Any) -> None:
    ear = Recorder()
    await behind.subscribe([("c", ear)])
    line = lines(raw)
    proxy.is_mute = True
    waiting = [asyncio.create_task(behind.subscribe([(f"d{number}", Recorder())])) for number in range(10)]
    await eventually(lambda: len(channels(raw)) == 11)
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await eventually(lambda: channels(raw) == {"c"})
    proxy.is_mute = False
    assert raw.publish("c", "x") == 1
    await heard(ear, messages=1)
    assert lines(raw) == line
    assert ear.gaps == 0


async def test_cancelled_before_it_began(subscriber: Subscriber, raw: Any) -> None:
    task = asyncio.create_task(subscriber.subscribe([("c", Recorder())]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subscriber.subscribe([("d", Recorder())])
    await eventually(lambda: channels(raw) == {"d"})


async def test_one_of_two_is_cancelled(behind: Subscriber, proxy: LossyProxy, raw: Any) -> None:
    await behind.subscribe([("other", Recorder())])
    ear = Recorder()
    hasty = asyncio.create_task(behind.subscribe([("c", Recorder())]))
    patient = asyncio.create_task(behind.subscribe([("c", ear)]))
    await asyncio.sleep(0)
    hasty.cancel()
    await patient
    assert raw.publish("c", "x") == 1
    await heard(ear, messages=1)
    with contextlib.suppress(asyncio.CancelledError):
        await hasty


async def test_a_late_confirmation(behind: Subscriber, proxy: LossyProxy, raw: Any) -> None:
    await behind.subscribe([("c", Recorder())])
    proxy.is_mute = True
    late = Recorder()
    with pytest.raises(BrokerUnavailable, match="subscriptions") as caught:
        await behind.subscribe([("c", late), ("d", late), ("e", late)], timeout_s=0.02)
    assert caught.value.reason == "unreachable"
    proxy.is_mute = False
    await eventually(lambda: channels(raw) == {"c"})
    raw.publish("c", "x")
    raw.publish("d", "x")
    await behind.subscribe([("f", Recorder())])
    assert late.messages == []


async def test_taken_down_while_it_is_made(behind: Subscriber, proxy: LossyProxy) -> None:
    await behind.subscribe([("c", Recorder())])
    proxy.is_mute = True
    waiting = asyncio.create_task(behind.subscribe([("d", Recorder())]))
    await asyncio.sleep(0)
    behind.unsubscribe(["d"])
    await waiting  # neither an error nor a wait: somebody wanted it so


# --- cut lines


async def test_a_channel_that_was_just_left_is_heard_again_at_once(
    behind: Subscriber, proxy: LossyProxy, raw: Any
) -> None:
    await behind.subscribe([("c", Recorder())])
    behind.unsubscribe(["c"])
    ear = Recorder()
    await behind.subscribe([("c", ear)])
    assert proxy.count(b"SUBSCRIBE") == 1
    raw.publish("c", "x")
    await heard(ear, messages=1)
    behind.unsubscribe(["c"])
    await eventually(lambda: channels(raw) == set())


async def test_a_listener_may_take_another_s_place(subscriber: Subscriber, raw: Any) -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    assert not subscriber.hand_over("c", first, second)
    await subscriber.subscribe([("c", first), ("d", first)])
    assert subscriber.hand_over("c", first, second)
    assert not subscriber.hand_over("c", first, third)  # it is not his any more
    raw.publish("c", "x")
    raw.publish("d", "y")
    await heard(first, second, messages=1)
    assert (first.messages, second.messages) == ([b"y"], [b"x"])
    subscriber.unsubscribe(["c"], second)
    await eventually(lambda: channels(raw) == {"d"})


async def test_nobody_takes_a_place_on_a_line_that_is_cut(
    server: EmbeddedBroker, subscriber: Subscriber
) -> None:
    first, second = Recorder(), Recorder()
    await subscriber.subscribe([("c", first)])
    server.kill()
    await eventually(lambda: not subscriber._known.live)
    assert not subscriber.hand_over("c", first, second)
    server.restart()
    await eventually(lambda: first.gaps == 1)
    assert subscriber.hand_over("c", first, second)


async def test_replies_that_came_together_are_all_taken(subscriber: Subscriber, raw: Any) -> None:
    # In one piece, so that most of them never pass through the library's own reading.
    ear = Recorder()
    await subscriber.subscribe([("c", ear)])
    pipe = raw.pipeline(transaction=False)
    for number in range(5000):
        pipe.publish("c", str(number))
    pipe.execute()
    await heard(ear, messages=5000)
    assert ear.messages == [str(number).encode() for number in range(5000)]


async def test_a_killed_connection_is_made_anew_and_all_are_told(subscriber: Subscriber, raw: Any) -> None:
    ears = {f"c{number}": Recorder() for number in range(10)}
    await subscriber.subscribe(ears.items())
    twin = Recorder()
    await subscriber.subscribe([("c0", twin)])
    for round_ in range(1, 4):
        raw.client_kill_filter(_type="pubsub")
        await eventually(lambda: all(ear.gaps == round_ for ear in (*ears.values(), twin)))  # noqa: B023
        for channel in ears:
            assert raw.publish(channel, "x") == 1
        await heard(*ears.values(), twin, messages=round_)
    assert channels(raw) == set(ears)


async def test_changes_while_the_line_is_cut(server: EmbeddedBroker, subscriber: Subscriber) -> None:
    staying, leaving, coming, passing = (Recorder() for _ in range(4))
    await subscriber.subscribe([("stays", staying), ("leaves", leaving)])
    server.kill()
    subscriber.unsubscribe(["leaves"])
    waiting = asyncio.create_task(subscriber.subscribe([("comes", coming)], timeout_s=60))
    with pytest.raises(BrokerUnavailable) as caught:
        await subscriber.subscribe([("passes", passing)], timeout_s=0.05)
    assert caught.value.reason == "unreachable"
    server.restart()
    await waiting
    await eventually(lambda: staying.gaps == 1)
    with redis.Redis.from_url(server.url) as client:
        assert channels(client) == {"stays", "comes"}
        for channel in ("stays", "leaves", "comes", "passes"):
            client.publish(channel, channel)
    await heard(staying, coming, messages=1)
    assert (coming.gaps, leaving.gaps, passing.gaps) == (0, 0, 0)
    assert (leaving.messages, passing.messages) == ([], [])


async def test_no_server() -> None:
    connections = Connections.open("redis://user:s3cret@127.0.0.1:1/0")
    subscriber = Subscriber(connections)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="is it running") as caught:
            await subscriber.subscribe([("c", Recorder())], timeout_s=0.1)
        assert "s3cret" not in str(caught.value)
    assert not subscriber._changed, "nothing piles up while there is no server"
    await subscriber.close()
    await connections.close()


async def test_a_cut_in_the_middle_of_a_subscribe(behind: Subscriber, proxy: LossyProxy, raw: Any) -> None:
    first = Recorder()
    await behind.subscribe([("a", first)])
    proxy.lose_reply(b"SUBSCRIBE")
    second = Recorder()
    await behind.subscribe([("b", second)])
    assert proxy.lost.is_set()
    await eventually(lambda: first.gaps == 1)
    assert second.gaps == 0
    raw.publish("a", "x")
    raw.publish("b", "x")
    await heard(first, second, messages=1)


# --- silence


async def test_a_silent_line_is_given_up(
    behind: Subscriber, proxy: LossyProxy, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SILENCE_S", 0.05)
    ear = Recorder()
    await behind.subscribe([("c", ear)])
    (line,) = lines(raw)
    proxy.is_mute = True
    raw.publish("c", "lost")
    await eventually(lambda: line not in lines(raw))
    proxy.is_mute = False
    proxy.cut()  # the next line was mute as well
    await eventually(lambda: ear.gaps == 1)
    raw.publish("c", "x")
    await heard(ear, messages=1)
    assert ear.messages == [b"x"]


async def test_a_line_that_is_never_greeted_is_given_up(
    behind: Subscriber, proxy: LossyProxy, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "CONNECT_S", 0.05)
    proxy.is_mute = True
    with pytest.raises(BrokerUnavailable, match="no answer"):
        await behind.subscribe([("c", Recorder())], timeout_s=0.2)
    proxy.is_mute = False
    ear = Recorder()
    await behind.subscribe([("c", ear)])
    raw.publish("c", "x")
    await heard(ear, messages=1)


async def test_a_line_that_tcp_gave_up(subscriber: Subscriber, connections: Connections, raw: Any) -> None:
    ear = Recorder()
    await subscriber.subscribe([("c", ear)])
    pool: Any = connections.pubsub.connection_pool
    (connection,) = pool._in_use_connections
    # What asyncio does when keepalive finds the peer dead. Every further read raises it again, at once.
    connection._reader.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
    await eventually(lambda: ear.gaps == 1)
    raw.publish("c", "x")
    await heard(ear, messages=1)


async def test_an_idle_line_is_asked_and_kept(
    behind: Subscriber, proxy: LossyProxy, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "SILENCE_S", 0.2)
    ear = Recorder()
    await behind.subscribe([("c", ear)])
    line = lines(raw)
    await eventually(lambda: proxy.count(b"PING") >= 5)
    assert lines(raw) == line
    assert ear.gaps == 0
    # Without any channel the answer looks different.
    behind.unsubscribe(["c"])
    await eventually(lambda: proxy.count(b"PING") >= 10)
    await behind.subscribe([("c", ear)])
    assert lines(raw) == line
    assert ear.gaps == 0


# --- listeners and users


async def test_a_listener_that_fails_harms_nobody(subscriber: Subscriber, raw: Any) -> None:
    class Broken(Recorder):
        def heard(self, data: bytes) -> None:
            raise ValueError(data)

        def missed(self) -> None:
            raise KeyError("missed")

    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    ear = Recorder()
    await subscriber.subscribe([("c", Broken()), ("c", ear), ("d", ear)])
    raw.publish("c", "1")
    raw.publish("d", "2")
    await heard(ear, messages=2)
    raw.client_kill_filter(_type="pubsub")
    await eventually(lambda: ear.gaps == 2)
    assert [type(context["exception"]) for context in told] == [ValueError, KeyError]


async def test_a_wrong_password(redis_url: str) -> None:
    connections = Connections.open(redis_url.replace("redis://", "redis://nobody:s3cret@"))
    subscriber = Subscriber(connections)
    with pytest.raises(BrokerUnavailable) as caught:
        await subscriber.subscribe([("c", Recorder())], timeout_s=60)
    assert caught.value.reason == "forbidden"
    assert "refuses the name or the password" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    await subscriber.close()
    await connections.close()


async def test_a_channel_that_is_not_granted(redis_url: str, raw: Any) -> None:
    raw.acl_setuser("u", enabled=True, passwords=["+p"], channels=["ours:*"], commands=["+@all"], reset=True)
    connections = Connections.open(redis_url.replace("redis://", "redis://u:p@"))
    subscriber = Subscriber(connections)
    try:
        ear = Recorder()
        await subscriber.subscribe([("ours:1", ear)])
        with pytest.raises(BrokerUnavailable) as caught:
            await subscriber.subscribe([("theirs", Recorder())], timeout_s=60)
        assert caught.value.reason == "forbidden"
        assert "refuses this user a channel: its ACL must be" in str(caught.value)
        # The rest goes on.
        await eventually(lambda: raw.publish("ours:1", "x") == 1)
        await heard(ear, messages=1)
    finally:
        await subscriber.close()
        await connections.close()
        raw.acl_deluser("u")


# --- the end


async def test_close(connections: Connections, raw: Any) -> None:
    subscriber = Subscriber(connections)
    await subscriber.close()
    ear = Recorder()
    await subscriber.subscribe([("c", ear)])
    await subscriber.close()
    await eventually(lambda: lines(raw) == [])
    # It can be used again, and knows nothing of before.
    await subscriber.subscribe([("d", ear)])
    assert channels(raw) == {"d"}
    await subscriber.close()
    await subscriber.close()
    assert ear.gaps == 0


async def test_close_while_somebody_waits(behind: Subscriber, proxy: LossyProxy) -> None:
    await behind.subscribe([("c", Recorder())])
    proxy.is_mute = True
    waiting = asyncio.create_task(behind.subscribe([("d", Recorder())]))
    await asyncio.sleep(0)
    await behind.close()
    with pytest.raises(BrokerUnavailable) as caught:
        await waiting
    assert caught.value.reason == "closed"


async def test_a_storm(subscriber: Subscriber, raw: Any) -> None:
    """Comers, goers and kills at once: whoever stays is subscribed in the end, and only who stays."""
    staying = {f"stays{number}": Recorder() for number in range(20)}

    async def come_and_go(number: int) -> None:
        for round_ in range(10):
            name = f"goes{number % 5}"
            ear = Recorder()
            await subscriber.subscribe([(name, ear)], timeout_s=60)
            if round_ % 3 == number % 3:
                raw.client_kill_filter(_type="pubsub")
            subscriber.unsubscribe([name], ear)

    await asyncio.gather(
        *(subscriber.subscribe([item], timeout_s=60) for item in staying.items()),
        *(come_and_go(number) for number in range(10)),
    )
    await eventually(lambda: channels(raw) == set(staying))
    for channel in staying:
        raw.publish(channel, "x")
    await heard(*staying.values(), messages=1)
