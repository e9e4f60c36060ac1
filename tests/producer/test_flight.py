"""What `explain` finds out about requests on a real server, state by state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from broker_parts import retry
from gated_engine import GatedEngine
from hand_worker import HandWorker
from hired import Hired, eventually_so
from streamfleet_common.connections import Connections
from streamfleet_common.errors import GenerationFailed, RequestNotFound
from streamfleet_common.schemas import Batch, GenerateRequest, Retry
from streamfleet_producer import Client
from streamfleet_producer.operations.flight import Flight, Line, gather
from streamfleet_producer.operations.flight_story import story
from streamfleet_producer.operations.operator_broker import OperatorBroker

Ask = Callable[[str], Awaitable[Flight]]
REQUEST = GenerateRequest(prompt="Hi", max_tokens=8)


@pytest.fixture
async def operator(redis_url: str) -> AsyncIterator[OperatorBroker]:
    connections = Connections.open(redis_url)
    yield OperatorBroker(connections, "q")
    await connections.close()


@pytest.fixture
def ask(operator: OperatorBroker) -> Ask:
    return lambda rid: gather(operator, rid)


def said(flight: Flight) -> str:
    return " ".join(" ".join(story(flight)).split())


async def submit(fleet: Client, **options: Any) -> str:
    return (await fleet.submit(REQUEST, **options)).id


async def test_where_each_stands_in_its_lane(fleet: Client, ask: Ask) -> None:
    rids = [await submit(fleet) for _ in range(3)]
    await submit(fleet, lane="high")
    flight = await ask(rids[1])
    assert flight.line == Line("normal", 2, 3)
    assert flight.others == (("high", 1),)
    assert flight.ready == ("w1",)
    assert flight.record.lane == "normal"
    assert 0 < flight.record.deadline_at_ms - flight.now_ms <= 600_000


async def test_of_a_long_lane_the_first_are_looked_at(
    fleet: Client, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    rids = [await submit(fleet) for _ in range(4)]
    for module in ("streamfleet_common.backlog", "streamfleet_producer.operations.flight"):
        monkeypatch.setattr(f"{module}.MOST_SEEN", 3)
    monkeypatch.setattr(OperatorBroker.backlog, "__defaults__", (3,))
    first, last = await ask(rids[0]), await ask(rids[3])
    assert first.line == Line("normal", 1, 3, is_cut=True)
    assert (last.line, last.is_far) == (None, True)


async def test_nobody_serves_a_paused_queue(
    fleet: Client, worker: HandWorker, ask: Ask, operator: OperatorBroker
) -> None:
    rid = await submit(fleet)
    await operator.pause()
    await operator.mark_drain("w1")
    flight = await ask(rid)
    assert (flight.is_paused, flight.ready, flight.draining) == (True, (), ("w1",))
    await worker.announce(life_ms=0)
    flight = await ask(rid)
    assert (flight.ready, flight.draining) == ((), ())


async def test_one_that_runs_and_then_lost_its_worker(fleet: Client, worker: HandWorker, ask: Ask) -> None:
    rid = await submit(fleet, stream=True)
    (work,) = await worker.take()
    flight = await ask(rid)
    assert (flight.record.state, flight.record.owner, flight.line) == ("running", "w1", None)
    await worker.lose(work)
    flight = await ask(rid)
    assert flight.line == Line("normal", 1, 1)
    assert "It came back from a worker" in said(flight)
    assert "1 worker was lost with it" in said(flight)
    (again,) = await worker.take()
    await worker.finish(again, "ok", batch=Batch(id="w1/1", size=1, reason="delay"))
    flight = await ask(rid)
    assert flight.starts is not None
    assert [start.worker for start in flight.starts] == ["w1", "w1"]
    assert "2. 1 worker was lost with it." in said(flight)
    assert "Not known: the batch was not noted" in said(flight)


async def test_one_that_waits_for_its_next_try(fleet: Client, worker: HandWorker, ask: Ask) -> None:
    rid = await submit(fleet, retry=Retry(attempts=2))
    (work,) = await worker.take()
    assert await worker.broker.finish([retry(work.delivery, after_ms=3_000_000)]) == [True]
    flight = await ask(rid)
    assert (flight.record.state, flight.line) == ("queued", None)
    assert flight.next_try_at_ms is not None
    assert 0 < flight.next_try_at_ms - flight.now_ms <= 3_000_000
    assert "waits for its next try" in said(flight)


async def test_a_suspect_waits_alone(fleet: Client, worker: HandWorker, ask: Ask) -> None:
    rid = await submit(fleet)
    for _ in range(2):
        await worker.take()
        await worker.broker.hand_back("w1", crashed=True)
    assert (await ask(rid)).line == Line("solo", 1, 1)


async def test_ends_without_an_answer(fleet: Client, worker: HandWorker, ask: Ask) -> None:
    cancelled = await submit(fleet)
    await fleet.cancel(cancelled)
    assert "No worker ever began it." in said(await ask(cancelled))
    failed = await submit(fleet, retry="never")
    (work,) = await worker.take()
    await worker.fail(work, GenerationFailed("it is odd"))
    flight = await ask(failed)
    assert flight.end is not None
    assert "generation_failed: it is odd" in said(flight)
    expired = await submit(fleet, deadline_s=0.001)

    async def swept() -> bool:
        return (await worker.broker.sweep()).expired > 0

    await eventually_so(swept, "the end of what is overdue")
    assert "No worker began it in time." in said(await ask(expired))


async def test_it_is_anybodys_and_must_be_there(redis_url: str, worker: HandWorker, ask: Ask) -> None:
    async with Client(redis_url, "q", tenant="acme") as other:
        rid = await submit(other)
    assert (await ask(rid)).record.tenant == "acme"
    for nobody in ("00" + "f" * 32, "no id at all"):
        with pytest.raises(RequestNotFound):
            await ask(nobody)


async def test_who_was_in_its_batch(redis_url: str, ask: Ask) -> None:
    engine = GatedEngine(max_batch_size=3, max_delay_s=3600.0)
    hired = await Hired(redis_url, "w7", engine).start()
    async with Client(redis_url, "q") as fleet:
        rids = [(await fleet.submit(GenerateRequest(prompt="ECHO 2"))).id for _ in range(3)]
        await asyncio.gather(*(fleet.result(rid) for rid in rids))
    flights: list[Flight] = []

    async def noted() -> bool:
        flights[:] = [await ask(rids[0])]
        return flights[0].note is not None

    await eventually_so(noted, "the note of a batch")
    (flight,) = flights
    assert flight.end is not None
    assert flight.end.batch is not None
    assert (flight.end.batch.size, flight.end.batch.reason) == (3, "full")
    assert set(flight.neighbours) == set(rids[1:])
    assert flight.neighbour_count == 2
    assert "The newcomers were as many as the free rows, so they joined at once." in said(flight)
    await hired.dismiss()
