"""A handler's output part by part: each once, in order, whatever becomes of messages and workers."""

from __future__ import annotations

from typing import Any

import pytest

from hand_worker import HandWorker
from streamfleet_common.schemas import Start
from streamfleet_producer import (
    CallRequest,
    Cancelled,
    Client,
    GenerationFailed,
    IncompleteGeneration,
    Parts,
    PartStream,
    Restart,
)


@pytest.fixture
async def counter(worker: HandWorker) -> HandWorker:
    await worker.announce(model="count", tasks=["call"])
    return worker


def parts(*values: Any) -> Parts:
    return Parts(values=values)


async def read(stream: PartStream) -> list[Any]:
    return [part async for part in stream]


async def test_parts_come_one_by_one(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", {"to": 3}) as stream:
        [work] = await counter.take()
        assert work.envelope.request == CallRequest(handler="count", input={"to": 3})
        assert work.envelope.stream
        await counter.emit(work, parts(1))
        assert await anext(stream) == 1
        await counter.emit(work, parts(None, {"a": [2]}))
        await counter.answer(work, outputs=(1, None, {"a": [2]}))
        assert await read(stream) == [None, {"a": [2]}]
        assert await read(stream) == []
    assert stream.result.outputs == (1, None, {"a": [2]})
    assert stream.result.output == {"a": [2]}


async def test_events_show_parts(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 2) as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1, 2))
        await counter.answer(work, outputs=(1, 2))
        start, *others = [event async for event in stream.events()]
    assert isinstance(start, Start)
    assert others == [parts(1, 2)]


async def test_an_output_in_one_piece_is_one_part(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 2) as stream:
        [work] = await counter.take()
        await counter.answer(work, outputs=([1, 2],))
        assert await read(stream) == [[1, 2]]


async def test_no_output_is_no_part(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 0) as stream:
        [work] = await counter.take()
        await counter.answer(work, outputs=())
        assert await read(stream) == []


async def test_parts_whose_messages_were_lost_come_from_the_log(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 3) as stream:
        [work] = await counter.take()
        await counter.log(work, parts(1))
        await counter.emit(work, parts(2))
        await counter.log(work, parts(3))
        await counter.answer(work, outputs=(1, 2, 3))
        assert await read(stream) == [1, 2, 3]


async def test_parts_that_are_lost_for_good_are_made_of_the_output(
    counter: HandWorker, fleet: Client
) -> None:
    async with fleet.call_stream("count", 3) as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        assert await anext(stream) == 1
        await counter.log(work, parts(2))
        await counter.redis.delete(counter.broker.keys.log(work.rid))
        await counter.answer(work, outputs=(1, 2, 3))
        assert await read(stream) == [2, 3]


async def test_an_output_that_does_not_begin_as_shown_is_incomplete(
    counter: HandWorker, fleet: Client
) -> None:
    async with fleet.call_stream("count", 3) as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        assert await anext(stream) == 1
        await counter.answer(work, outputs=(5, 6))
        with pytest.raises(IncompleteGeneration):
            await read(stream)


async def test_the_same_parts_of_another_worker_are_shown_once(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 4) as stream:
        [lost] = await counter.take()
        await counter.emit(lost, parts(1, 2))
        assert [await anext(stream), await anext(stream)] == [1, 2]
        await counter.lose(lost)
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        await counter.emit(work, parts(2, 3))
        assert await anext(stream) == 3
        await counter.emit(work, parts(4))
        await counter.answer(work, outputs=(1, 2, 3, 4))
        assert await read(stream) == [4]


@pytest.mark.parametrize("again", [(1, 7), (1,), ()])
async def test_other_parts_are_never_spliced_to_what_was_shown(
    counter: HandWorker, fleet: Client, again: tuple[int, ...]
) -> None:
    async with fleet.call_stream("count", 2) as stream:
        [lost] = await counter.take()
        await counter.emit(lost, parts(1, 2))
        assert [await anext(stream), await anext(stream)] == [1, 2]
        await counter.lose(lost)
        [work] = await counter.take()
        if again:
            await counter.emit(work, parts(*again))
        await counter.answer(work, outputs=again)
        with pytest.raises(GenerationFailed, match="differs from what was shown") as caught:
            await read(stream)
    assert caught.value.retryable


async def test_who_reads_events_is_told_to_begin_anew(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 2) as stream:
        [lost] = await counter.take()
        await counter.emit(lost, parts(1, 2))
        events = stream.events()
        assert [type(await anext(events)) for _ in range(2)] == [Start, Parts]
        await counter.lose(lost)
        [work] = await counter.take()
        await counter.emit(work, parts(1, 7))
        await counter.answer(work, outputs=(1, 7))
        restart, start, shown = [event async for event in events]
    assert isinstance(restart, Restart)
    assert isinstance(start, Start)
    assert shown == parts(1, 7)


async def test_leaving_early_cancels_the_call(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 9) as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        assert await anext(stream) == 1
    with pytest.raises(Cancelled):
        await fleet.result(stream.id)


async def test_a_handler_that_fails_amid_its_parts(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 9) as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        await counter.fail(work, GenerationFailed("broken"))
        assert await anext(stream) == 1
        with pytest.raises(GenerationFailed, match="broken"):
            await anext(stream)


async def test_a_joined_call_begins_with_its_first_part(counter: HandWorker, fleet: Client) -> None:
    async with fleet.call_stream("count", 2, idempotency_key="k") as stream:
        [work] = await counter.take()
        await counter.emit(work, parts(1))
        assert await anext(stream) == 1
        async with fleet.call_stream("count", 2, idempotency_key="k") as joined:
            assert joined.ticket.duplicate
            await counter.emit(work, parts(2))
            await counter.answer(work, outputs=(1, 2))
            assert await read(joined) == [1, 2]
        assert await read(stream) == [2]
    async with fleet.attach(stream.id) as attached:
        shown = [event async for event in attached.events()]
    assert shown[1:] == [parts(1), parts(2)]


async def test_a_call_that_was_submitted_without_a_stream_shows_its_output_whole(
    counter: HandWorker, fleet: Client
) -> None:
    ticket = await fleet.submit(CallRequest(handler="count", input=2))
    [work] = await counter.take()
    await counter.answer(work, outputs=(1, 2))
    async with fleet.attach(ticket.id) as attached:
        assert [event async for event in attached.events()] == [parts(1, 2)]
