"""A stream whose worker is lost, where the next one promises the same bits."""

from __future__ import annotations

import asyncio

import pytest

from hand_worker import HandWorker, Work, delta
from streamfleet_common import codec
from streamfleet_producer import (
    Client,
    Delta,
    GenerateRequest,
    GenerationFailed,
    Prefill,
    Restart,
    Start,
    blocking,
)

REQUEST = GenerateRequest(prompt="hello", max_tokens=8, logprobs=True, prompt_logprobs=True)
PREFILL = Prefill(token_ids=(1,), texts=("p",), logprobs=(None,))


@pytest.fixture
def exact(worker: HandWorker) -> HandWorker:
    """A worker that promises the bits of its class."""
    worker.start = worker.start.model_copy(update={"exact": "kind"})
    return worker


def scored(text: str, first_id: int = 0, logprob: float = -0.5) -> Delta:
    return delta(text, first_id).model_copy(update={"logprobs": (logprob,) * len(text)})


async def lost_and_taken_again(worker: HandWorker, work: Work) -> Work:
    await worker.lose(work)
    [again] = await worker.take()
    return again


async def test_nobody_sees_that_the_worker_changed(exact: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await exact.take()
        await exact.emit(work, PREFILL)
        await exact.emit(work, scored("abc"))
        for _ in range(2):
            work = await lost_and_taken_again(exact, work)
            await exact.emit(work, PREFILL)
            await exact.emit(work, scored("ab"))
        await exact.emit(work, scored("cd", 2))
        await exact.finish(work, "abcd", exact="kind")
        events = [event async for event in tokens.events()]
    assert [type(event) for event in events] == [Start, Prefill, Delta, Delta]
    assert events[2:] == [scored("abc"), scored("d", 3)]
    assert (tokens.result.text, tokens.result.attempt, tokens.result.exact) == ("abcd", 3, "kind")
    # Whoever comes later finds all attempts in the log, and one text.
    async with fleet.attach(tokens.id) as later:
        assert [event async for event in later.events()] == events


async def test_another_class_begins_anew(exact: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await exact.take()
        await exact.emit(work, scored("abc"))
        exact.start = exact.start.model_copy(update={"exact": "another"})
        work = await lost_and_taken_again(exact, work)
        await exact.emit(work, scored("abc"))
        await exact.finish(work, "abc")
        events = [event async for event in tokens.events()]
    assert [type(event) for event in events] == [Start, Delta, Restart, Start, Delta]


async def test_a_log_probability_that_differs_shows_to_who_reads_events(
    exact: HandWorker, fleet: Client
) -> None:
    ticket = await fleet.submit(REQUEST, stream=True)
    async with fleet.attach(ticket.id) as tokens, fleet.attach(ticket.id) as deltas:
        [work] = await exact.take()
        await exact.emit(work, scored("abc"))
        work = await lost_and_taken_again(exact, work)
        await exact.emit(work, scored("a"))
        await exact.emit(work, scored("bcd", 1, logprob=-0.25))
        await exact.finish(work, "abcd")
        events = [event async for event in tokens.events()]
        assert [type(event) for event in events] == [Start, Delta, Restart, Start, Delta]
        assert isinstance(events[-1], Delta)
        assert events[-1].logprobs == (-0.5, -0.25, -0.25, -0.25)
        # Who wants the text alone has it: that is the same.
        assert [event.text async for event in deltas] == ["abc", "d"]


async def test_another_text_is_never_spliced_to_what_was_shown(exact: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await exact.take()
        await exact.emit(work, scored("abc"))
        assert (await anext(tokens)).text == "abc"
        work = await lost_and_taken_again(exact, work)
        await exact.emit(work, scored("abX"))
        await exact.finish(work, "abX")
        with pytest.raises(GenerationFailed, match="differs from what was shown") as caught:
            await anext(tokens)
        assert caught.value.retryable


@pytest.mark.parametrize("exact_again", ["kind", ""])
async def test_who_wants_no_restart_has_nothing_against_a_replay(
    exact: HandWorker, fleet: Client, exact_again: str
) -> None:
    async with fleet.stream(REQUEST, on_restart="fail") as tokens:
        [work] = await exact.take()
        await exact.emit(work, scored("abc"))
        assert (await anext(tokens)).text == "abc"
        # The server would have ended it; a worker that was never lost for it goes on.
        start = exact.start.model_copy(update={"exact": exact_again})
        await exact.publish(work, b"2-0,1,2,3,2 " + codec.encode(start))
        await exact.publish(work, b"2-1 " + codec.encode(scored("abcd")))
        if exact_again:
            assert (await anext(tokens)).text == "d"
        else:
            with pytest.raises(GenerationFailed):
                await anext(tokens)


def test_without_an_event_loop_it_is_the_same(redis_url: str) -> None:
    async def take() -> Work:
        async with HandWorker(redis_url) as worker:
            worker.start = worker.start.model_copy(update={"exact": "kind"})
            [work] = await worker.take()
            await worker.emit(work, scored("abc"))
            again = await lost_and_taken_again(worker, work)
            await worker.emit(again, scored("abcd"))
            await worker.finish(again, "abcd")
            return again

    async def announce() -> None:
        async with HandWorker(redis_url) as worker:
            await worker.announce()

    asyncio.run(announce())
    with blocking.Client(redis_url, queue="q") as fleet, fleet.stream(REQUEST) as tokens:
        asyncio.run(take())
        events = list(tokens.events())
    assert [type(event) for event in events] == [Start, Delta, Delta]
    assert events[1:] == [scored("abc"), scored("d", 3)]
