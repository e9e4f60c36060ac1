"""Who lost his connection comes back with the place that he had reached."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hand_worker import HandWorker, Work, delta, done
from streamfleet_common.frames import Frame
from streamfleet_producer import (
    CallRequest,
    Choice,
    Client,
    Delta,
    End,
    GenerateRequest,
    IncompleteGeneration,
    InvalidRequest,
    Parts,
    Restart,
    Start,
    blocking,
)
from streamfleet_producer.token_stream import TokenStream
from streamfleet_producer.transcript import GONE, LOST, Transcript

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


async def read(stream: TokenStream) -> list[tuple[str, Any]]:
    """All events that are left, with their places."""
    return [(stream.place, event) async for event in stream.events()]


async def streaming(worker: HandWorker, fleet: Client, request: Any = REQUEST) -> Work:
    await fleet.submit(request, stream=True)
    [work] = await worker.take()
    return work


async def lost_and_taken_again(worker: HandWorker, work: Work) -> Work:
    await worker.lose(work)
    [again] = await worker.take()
    return again


async def drop_log(worker: HandWorker, work: Work) -> None:
    assert await worker.redis.delete(worker.broker.keys.log(work.rid)) == 1


async def test_the_rest_comes_from_every_place(worker: HandWorker, fleet: Client) -> None:
    work = await streaming(worker, fleet)
    for number, text in enumerate("abcdef"):
        await worker.emit(work, delta(text, number))
    await worker.finish(work, "abcdef")
    async with fleet.attach(work.rid) as tokens:
        events = await read(tokens)
        assert tokens.place == "2-1"
        assert tokens.result.text == "abcdef"
    assert [place for place, _ in events] == [f"1-{number}" for number in range(7)]
    for number, (place, _) in enumerate(events):
        async with fleet.attach(work.rid, after=place) as tokens:
            assert await read(tokens) == events[number + 1 :]
            assert tokens.result.text == "abcdef"
    async with fleet.attach(work.rid, after="2-1") as tokens:
        assert await read(tokens) == []
        assert tokens.result.text == "abcdef"


async def test_what_is_still_to_come_comes_live(worker: HandWorker, fleet: Client) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await worker.emit(work, delta("c", 2))
    async with fleet.attach(work.rid, after="1-1") as tokens:
        assert await anext(tokens) == delta("c", 2)
        await worker.emit(work, delta("d", 3))
        assert await anext(tokens) == delta("d", 3)
        await worker.finish(work, "abcd")
        assert await read(tokens) == []


@pytest.mark.parametrize("exact", ["kind", ""])
async def test_the_worker_may_be_lost_in_between(worker: HandWorker, fleet: Client, exact: str) -> None:
    worker.start = worker.start.model_copy(update={"exact": exact})
    work = await streaming(worker, fleet)
    for number, text in enumerate("abc"):
        await worker.emit(work, delta(text, number))
    work = await lost_and_taken_again(worker, work)
    await worker.emit(work, delta("ab"))
    await worker.emit(work, delta("cd", 2))
    await worker.finish(work, "abcd", exact=exact)
    async with fleet.attach(work.rid, after="1-2") as tokens:
        events = await read(tokens)
    epoch = work.delivery.epoch
    assert epoch > 1
    if exact:
        assert events == [("1-3", delta("c", 2)), (f"{epoch}-2", delta("d", 3))]
    else:
        assert [type(event) for _, event in events] == [Delta, Restart, Start, Delta, Delta]
        assert [place for place, _ in events] == ["1-3", "1-3", *(f"{epoch}-{seq}" for seq in range(3))]
        # Who comes back amid the step that takes all back gets the whole of it again.
        async with fleet.attach(work.rid, after=events[1][0]) as tokens:
            assert await read(tokens) == events[1:]
    # A place of the second attempt leads on in it, whatever came before.
    async with fleet.attach(work.rid, after=events[-1][0]) as tokens:
        assert await read(tokens) == []
    deltas = []
    async with fleet.attach(work.rid, after="1-2") as tokens:
        deltas = [event.text async for event in tokens]
    assert deltas == ["c", "d"]  # the same text either way, and nothing twice


async def test_whoever_reads_deltas_is_told_that_the_next_attempt_differs(
    worker: HandWorker, fleet: Client
) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    work = await lost_and_taken_again(worker, work)
    await worker.emit(work, delta("aX"))
    await worker.finish(work, "aX")
    async with fleet.attach(work.rid, after="1-1") as tokens:
        # What he saw was compared with, though he saw it elsewhere: he has "ab".
        with pytest.raises(Exception, match="differs from what was shown"):
            await anext(tokens)


# --- when the log is gone


async def test_without_a_log_all_comes_again_after_a_restart(worker: HandWorker, fleet: Client) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await worker.emit(work, delta("cd", 2))
    await worker.finish(work, "abcd")
    await drop_log(worker, work)
    whole = Delta(token_ids=(0, 1, 2, 3), texts=("", "", "", "abcd"))
    for place in ("1-0", "1-1"):
        async with fleet.attach(work.rid, after=place) as tokens:
            assert await read(tokens) == [(place, Restart(reason=GONE)), (place, whole)]
            assert tokens.place == "2-1"
    async with fleet.attach(work.rid, after="1-1") as tokens:
        with pytest.raises(IncompleteGeneration, match="not known any more"):
            await anext(tokens)
    # Behind the last one nothing is missing but the end.
    for place in ("1-2", "2-1"):
        async with fleet.attach(work.rid, after=place) as tokens:
            assert await read(tokens) == []
            assert tokens.result.text == "abcd"


async def test_while_it_runs_a_lost_log_costs_nothing_that_is_still_told(
    worker: HandWorker, fleet: Client
) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await drop_log(worker, work)
    async with (
        fleet.attach(work.rid, after="1-1") as tokens,
        fleet.attach(work.rid, after="1-0") as behind,
    ):
        await worker.emit(work, delta("cd", 2))
        await worker.finish(work, "abcd")
        assert await read(tokens) == [("1-2", delta("cd", 2))]
        # The log begins anew behind what this one misses.
        whole = Delta(token_ids=(0, 1, 2, 3), texts=("", "", "", "abcd"))
        assert await read(behind) == [("1-0", Restart(reason=GONE)), ("1-0", whole)]


async def test_a_later_attempt_is_told_though_the_log_of_the_first_is_lost(
    worker: HandWorker, fleet: Client
) -> None:
    worker.start = worker.start.model_copy(update={"exact": "kind"})
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await drop_log(worker, work)
    work = await lost_and_taken_again(worker, work)
    await worker.emit(work, delta("abc"))
    await worker.finish(work, "abc", exact="kind")
    async with fleet.attach(work.rid, after="1-1") as tokens:
        events = [event for _, event in await read(tokens)]
    assert [type(event) for event in events] == [Restart, Start, Delta]
    assert events[-1] == delta("abc")


def test_what_an_unknown_epoch_has_shown_is_taken_back() -> None:
    start = Start(worker="w", model="m")
    for place, restarts in [((1, 0), []), ((1, 2), [Restart(reason=LOST)]), ((3, 0), [Restart(reason=LOST)])]:
        transcript = Transcript()
        transcript.begin_behind(*place)
        assert transcript.apply(Frame(5, 0, b"x", (1, 2, 3, 1)), start) == [*restarts, start]
        assert transcript.proves(done("", of=5, last_seq=0))


async def test_a_log_that_lost_its_tail_voids_what_was_shown_of_it(worker: HandWorker, fleet: Client) -> None:
    worker.start = worker.start.model_copy(update={"exact": "kind"})
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await worker.emit(work, delta("c", 2))
    # As after a failover to a replica that was a little behind.
    await worker.redis.xdel(worker.broker.keys.log(work.rid), "1-2")
    work = await lost_and_taken_again(worker, work)
    await worker.emit(work, delta("abcd"))
    await worker.finish(work, "abcd", exact="kind")
    async with fleet.attach(work.rid, after="1-2") as tokens:
        events = [event for _, event in await read(tokens)]
    assert [type(event) for event in events] == [Restart, Start, Delta]
    assert events[-1] == delta("abcd")


# --- what is made of the end


async def test_answers_that_never_streamed_are_counted(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(GenerateRequest(prompt="hello", n=2, max_tokens=2))
    [work] = await worker.take()
    choices = tuple(
        Choice(index=index, text=text, token_ids=(1,), finish_reason="length")
        for index, text in enumerate("ab")
    )
    await worker.answer(work, choices=choices)
    made = [
        (f"2-1.{index + 1}", Delta(index=index, token_ids=(1,), texts=(text,)))
        for index, text in enumerate("ab")
    ]
    async with fleet.attach(ticket.id) as tokens:
        assert await read(tokens) == made
        assert tokens.place == "2-1"
    for number, place in enumerate(("2-1.1", "2-1.2", "2-1")):
        async with fleet.attach(ticket.id, after=place) as tokens:
            assert await read(tokens) == made[number + 1 :]
            assert tokens.result.choices == choices


async def test_an_output_in_one_piece_is_counted(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(model="spell", tasks=("call",))
    work = await streaming(worker, fleet, CallRequest(handler="spell", input="x"))
    await worker.answer(work, outputs=({"a": 1},))
    async with fleet.attach(work.rid, after="1-0") as tokens:
        assert await read(tokens) == [("2-1.1", Parts(values=({"a": 1},)))]
    await drop_log(worker, work)
    for place, left in [("1-0", [("2-1.1", Parts(values=({"a": 1},)))]), ("2-1.1", [])]:
        async with fleet.attach(work.rid, after=place) as tokens:
            assert await read(tokens) == left


# --- places that are none


NONSENSE = ("", "x", "1", "0-0", "0-1", "1--1", "1-2 ", "01-2", "1-02", "1-2.0", "9999999999-1", "\u0661-1")
FUTURE = ("1-4", "1-99", "2-2", "3-1", "9-9", "1-1.1", "2-1.1")


async def test_nonsense_and_what_has_not_been_is_refused(worker: HandWorker, fleet: Client) -> None:
    work = await streaming(worker, fleet)
    for number, text in enumerate("abc"):
        await worker.emit(work, delta(text, number))
    for ended in (False, True):
        if ended:
            await worker.finish(work, "abc")
        # Once there is an end, an id before it may be of an event that the server has lost.
        future = FUTURE[2:] if ended else FUTURE
        for place in (*NONSENSE, *future):
            with pytest.raises(InvalidRequest, match="no event of this request"):
                async with fleet.attach(work.rid, after=place):
                    pass
    assert not any(work.rid.encode() in channel for channel in await listened(worker))


@pytest.mark.parametrize(("place", "ended"), [("2-0", False), ("3-1", True), ("2-2", True), ("2-1.1", True)])
async def test_the_record_alone_refuses_what_cannot_have_been(
    worker: HandWorker, fleet: Client, place: str, ended: bool
) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("abc"))
    if ended:
        await worker.finish(work, "abc")
    await drop_log(worker, work)
    with pytest.raises(InvalidRequest, match="no event of this request"):
        async with fleet.attach(work.rid, after=place):
            pass


async def listened(worker: HandWorker) -> list[bytes]:
    """Channels, once the server was told of those that were left."""
    await asyncio.sleep(0.1)
    return await worker.channels()


async def test_a_request_that_failed_fails_whoever_comes_back(worker: HandWorker, fleet: Client) -> None:
    work = await streaming(worker, fleet)
    await worker.emit(work, delta("ab"))
    await worker.fail(work, IncompleteGeneration("told to"))
    async with fleet.attach(work.rid, after="1-0") as tokens:
        assert await anext(tokens) == delta("ab")
        with pytest.raises(IncompleteGeneration, match="told to"):
            await anext(tokens)
        assert tokens.place == "2-1"
        assert isinstance(tokens.ended, End)


def test_without_an_event_loop_it_is_the_same(redis_url: str) -> None:
    async def play() -> str:
        async with HandWorker(redis_url) as worker, Client(redis_url, queue="q") as fleet:
            await worker.announce()
            work = await streaming(worker, fleet)
            await worker.emit(work, delta("ab"))
            await worker.emit(work, delta("c", 2))
            await worker.finish(work, "abc")
            return work.rid

    rid = asyncio.run(play())
    with blocking.Client(redis_url, queue="q") as fleet:
        with fleet.attach(rid) as tokens:
            assert next(iter(tokens)) == delta("ab")
            place = tokens.place
        with fleet.attach(rid, after=place) as tokens:
            assert [event.text for event in tokens] == ["c"]
