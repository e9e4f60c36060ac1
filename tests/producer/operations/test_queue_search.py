"""In which queue a request is, found on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_common.schemas import Envelope, GenerateRequest, new_rid
from streamfleet_common.submissions import Submission
from streamfleet_producer.operations import queue_search
from streamfleet_producer.operations.operator_broker import OperatorBroker
from streamfleet_producer.operations.queue_search import queue_of

QUEUES = ("one", "three", "two")


@pytest.fixture
async def connections(redis_url: str) -> AsyncIterator[Connections]:
    opened = Connections.open(redis_url)
    yield opened
    await opened.close()


@pytest.fixture
def anybody(connections: Connections) -> OperatorBroker:
    return OperatorBroker(connections, "any")


async def submit(connections: Connections, queue: str, rid: str = "") -> str:
    """Submit to a queue that has room for it; gives the id."""
    await connections.commands.hset(Broker(connections, queue).keys.control, "max_queue_depth", 9)
    envelope = Envelope(request=GenerateRequest(prompt="Hi"), rid=rid or new_rid())
    (submitted,) = await Broker(connections, queue).submit([Submission.of(envelope)])
    assert submitted.outcome == "accepted"
    return envelope.rid


async def test_it_is_found_wherever_it_is(connections: Connections, anybody: OperatorBroker) -> None:
    rids = {queue: await submit(connections, queue) for queue in QUEUES}
    for queue, rid in rids.items():
        assert await queue_of(anybody, rid, QUEUES) == queue


async def test_of_several_one_has_to_be_named(connections: Connections, anybody: OperatorBroker) -> None:
    rid = await submit(connections, "two")
    await submit(connections, "one", rid)
    with pytest.raises(InvalidRequest, match=r"choose one with --queue \(one, two\)"):
        await queue_of(anybody, rid, QUEUES)


async def test_of_an_unknown_one_it_says_where_it_looked(anybody: OperatorBroker) -> None:
    with pytest.raises(RequestNotFound, match=r"none of 3 queues knows a request 00.{32}: .* expired$"):
        await queue_of(anybody, new_rid(), QUEUES)
    with pytest.raises(RequestNotFound, match="no such request"):
        await queue_of(anybody, "*", QUEUES)


async def test_it_looks_at_so_many_and_says_so(
    connections: Connections, anybody: OperatorBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_search, "MOST_QUEUES", 2)
    rid = await submit(connections, "two")
    with pytest.raises(RequestNotFound, match=r"none of 2 queues .*; 1 more were not looked at: name its"):
        await queue_of(anybody, rid, QUEUES)
    many = ["two", *map(str, range(5000))]
    assert await queue_of(anybody, rid, many) == "two"
