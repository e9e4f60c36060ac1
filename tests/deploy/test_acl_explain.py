"""An operator explains requests with the rights of the role, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from deploy.guarded import Guarded
from hand_worker import HandWorker
from streamfleet_common.batch_notes import BatchNote
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, RequestNotFound
from streamfleet_common.schemas import Batch, Envelope, GenerateRequest
from streamfleet_common.submissions import Submission
from streamfleet_producer.operations.flight import gather
from streamfleet_producer.operations.operator_broker import OperatorBroker
from streamfleet_producer.operations.queue_search import queue_of


@pytest.fixture
async def operator(guarded: Guarded) -> AsyncIterator[OperatorBroker]:
    connections = Connections.open(guarded.url("operator"))
    yield OperatorBroker(connections, "q")
    await connections.close()


@pytest.fixture
async def worker(guarded: Guarded) -> AsyncIterator[HandWorker]:
    async with HandWorker(guarded.url("worker")) as hand:
        await hand.announce()
        yield hand


def submission(*, stream: bool) -> Submission:
    return Submission.of(Envelope(request=GenerateRequest(prompt="Hi"), stream=stream))


async def test_requests_that_do_not_stream(
    guarded: Guarded, operator: OperatorBroker, worker: HandWorker
) -> None:
    sent = submission(stream=False)
    rid = sent.envelope.rid
    await operator.submit([sent])
    assert (await gather(operator, rid)).line is not None
    (work,) = await worker.take()
    assert (await gather(operator, rid)).record.state == "running"
    await worker.broker.note_batches([BatchNote("w1/1", "delay", 2, 0.0, 2, (rid, "0" * 34))])
    await worker.finish(work, "ok", batch=Batch(id="w1/1", size=2, reason="delay"))
    flight = await gather(operator, rid)
    assert flight.neighbours == ("0" * 34,)
    assert guarded.refusals() == []


async def test_logs_hold_answers_so_earlier_starts_stay_unknown(
    guarded: Guarded, operator: OperatorBroker, worker: HandWorker
) -> None:
    sent = submission(stream=True)
    await operator.submit([sent])
    await worker.take()
    await worker.broker.hand_back("w1", crashed=True)
    flight = await gather(operator, sent.envelope.rid)
    assert (flight.record.crashes, flight.starts) == (1, None)
    assert {role for role, _ in guarded.refusals()} == {"operator"}


async def test_queues_of_others_are_left_out_of_a_search(guarded: Guarded, operator: OperatorBroker) -> None:
    sent = submission(stream=False)
    await operator.submit([sent])
    assert await queue_of(operator, sent.envelope.rid, ["other", "q"]) == "q"
    with pytest.raises(RequestNotFound, match=r"none of 1 queues .*; this user .* may not look into 1 more$"):
        await queue_of(operator, "00" + "f" * 32, ["other", "q"])
    assert {role for role, _ in guarded.refusals()} == {"operator"}


async def test_notes_are_for_operators_alone(guarded: Guarded, worker: HandWorker) -> None:
    await worker.broker.note_batches([BatchNote("w1/1", "delay", 1, 0.0, 1, ("0" * 34,))])
    for role in ("producer", "gateway", "bulk", "metrics", "worker"):
        connections = Connections.open(guarded.url(role))
        with pytest.raises(BrokerUnavailable) as refused:
            await OperatorBroker(connections, "q").batch_note("w1/1", since_ms=0, until_ms=2**50)
        assert refused.value.reason == "forbidden"
        await connections.close()
