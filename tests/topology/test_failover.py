"""A primary that is lost, watched by three Sentinels: what is kept, what is not, and who notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker_parts import DONE, Recorder, begin, begin_waiting, card, delta, emission, finish, submission
from eventually import eventually
from streamfleet_common import codec, confirmation
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import End, GenerateRequest
from streamfleet_common.submissions import Submission
from streamfleet_common.subscriber import Subscriber
from streamfleet_producer import Client
from topology.nodes import Trio, trio, until
from topology.parts import outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def three(program: Path) -> Iterator[Trio]:
    with trio(program) as made:
        yield made


@pytest.fixture
async def connections(three: Trio) -> AsyncIterator[Connections]:
    opened = Connections.open(three.url)
    yield opened
    await opened.close()


async def kept(broker: Broker, submissions: list[Submission]) -> list[Submission]:
    """Those of which the primary knows."""
    records = await broker.status([one.envelope.rid for one in submissions], "default")
    return [one for one, record in zip(submissions, records, strict=True) if record is not None]


async def take(broker: Broker) -> Delivery:
    """Begin the one request that comes."""
    while True:
        for delivery in await begin_waiting(broker):
            return delivery


async def finish_all(broker: Broker) -> int:
    """Run all that waits, to its end; gives how many there were."""
    deliveries = await begin_waiting(broker)
    assert all(await broker.finish([finish(delivery) for delivery in deliveries]))
    return len(deliveries)


async def test_level_fast_loses_what_the_replica_had_not_and_takes_it_again(
    three: Trio, connections: Connections
) -> None:
    broker = Broker(connections, "q")
    await broker.create_groups()
    early = [submission() for _ in range(10)]
    assert {await outcome(broker, one) for one in early} == {"accepted"}
    until(lambda: three.first.raw.wait(1, 100) == 1, "an acknowledgement")
    three.fall_behind()
    late = [submission() for _ in range(20)]
    assert {await outcome(broker, one) for one in late} == {"accepted"}

    await asyncio.to_thread(three.promote)
    known = await kept(broker, early + late)
    assert known == early  # 20 accepted ones are lost
    assert [await outcome(broker, one) for one in early] == ["duplicate"] * 10
    assert [await outcome(broker, one) for one in late] == ["accepted"] * 20

    # The old primary is back, and for some seconds takes itself for one: nobody is sent there.
    returning = asyncio.create_task(asyncio.to_thread(three.bring_back))
    meanwhile = []
    while not returning.done():
        meanwhile.append(submission())
        assert await outcome(broker, meanwhile[-1]) == "accepted"
        await asyncio.wait([returning], timeout=0.2)
    await returning
    everything = early + late + meanwhile
    assert await kept(broker, everything) == everything
    assert await finish_all(broker) == len(everything)
    assert (await broker.depth()).open == 0


async def test_level_replicated_loses_nothing_that_was_accepted(
    three: Trio, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "CONFIRM_MS", 200)
    broker = Broker(connections, "q", durability="replicated")
    await broker.create_groups()
    outcomes: dict[str, str] = {}
    everything = [submission() for _ in range(30)]
    for one in everything[:15]:
        outcomes[one.envelope.rid] = await outcome(broker, one)
    three.fall_behind()
    for one in everything[15:]:
        outcomes[one.envelope.rid] = await outcome(broker, one)
    assert sorted(outcomes.values()) == ["accepted"] * 15 + ["not_durable"] * 15

    await asyncio.to_thread(three.promote)
    known = {one.envelope.rid for one in await kept(broker, everything)}
    assert {rid for rid, what in outcomes.items() if what == "accepted"} == known  # none is lost
    # There is no replica until the old primary has become one.
    assert await outcome(broker, everything[-1]) == "not_durable"
    await asyncio.to_thread(three.bring_back)
    until(lambda: three.second.raw.wait(1, 100) == 1, "an acknowledgement")
    monkeypatch.undo()
    patient = Broker(connections, "q", durability="replicated")
    assert {await outcome(patient, one) for one in everything} == {"accepted", "duplicate"}
    assert await kept(patient, everything) == everything


async def test_a_primary_that_was_cut_off_accepts_nothing_more(
    three: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "CONFIRM_MS", 200)
    loyal = Connections.open(three.first.url)  # one who asks no Sentinel
    broker = Broker(loyal, "q", durability="replicated")
    await broker.create_groups()
    assert await outcome(broker, submission()) == "accepted"
    three.first.freeze()
    await asyncio.to_thread(three.await_promotion)
    three.first.thaw()
    one = submission()
    assert await outcome(broker, one) in ("not_durable", "read_only")
    await loyal.close()


async def test_calls_and_subscriptions_ride_through_an_ordered_failover(
    three: Trio, connections: Connections
) -> None:
    broker, subscriber, ear = Broker(connections, "q"), Subscriber(connections), Recorder()
    await broker.create_groups()
    one = submission(stream=True)
    await subscriber.subscribe([(broker.keys.channel("default", one.envelope.rid), ear)], timeout_s=30)
    (delivery,) = await begin(broker, one)
    until(lambda: three.first.raw.wait(1, 100) == 1, "an acknowledgement")
    moving = asyncio.create_task(asyncio.to_thread(three.swap))
    while not moving.done():
        assert await outcome(broker, submission()) == "accepted"
        assert (await broker.renew("w1", [delivery])).ours == [True]
        await asyncio.wait([moving], timeout=0.05)
    await moving
    await eventually(lambda: ear.gaps >= 1)
    assert await broker.emit([emission(delivery, 1, codec.encode(delta("x")))]) == [True]
    assert await broker.finish([finish(delivery)]) == [True]
    await eventually(lambda: len(ear.messages) >= 3)
    frames = [Frame.parse(data) for data in ear.messages]
    assert [frame.id for frame in frames] == ["1-0", "1-1", "2-1"]
    # All of them are with the new primary.
    for client in (connections.commands, connections.leases, connections.reader):
        assert (await client.info("server"))["tcp_port"] == three.second.port
    assert three.second.raw.pubsub_numsub(broker.keys.channel("default", one.envelope.rid))[0][1] == 1
    await subscriber.close()


async def test_a_client_sees_one_end_though_the_failover_undid_it(
    three: Trio, connections: Connections
) -> None:
    worker = Broker(connections, "q")
    await worker.create_groups()
    await worker.announce(card(), life_ms=600_000)
    async with Client(three.url, queue="q") as fleet:
        ending = asyncio.create_task(fleet.run(GenerateRequest(prompt="ends before")))
        early = await take(worker)
        going = asyncio.create_task(fleet.run(GenerateRequest(prompt="ends after")))
        late = await take(worker)
        until(lambda: three.first.raw.wait(1, 100) == 1, "an acknowledgement")
        three.fall_behind()
        assert await worker.finish([finish(early)]) == [True]
        answer = await ending
        await asyncio.to_thread(three.promote)
        # Undone: it is still running there, and ends a second time, which nobody hears.
        again: End = DONE.model_copy(update={"choices": ()})
        assert await worker.finish([finish(early, again)]) == [True]
        assert await worker.finish([finish(late)]) == [True]
        assert (await going).text == answer.text == "ab"
