"""One request's events, in order, once each."""

from __future__ import annotations

import asyncio

import pytest

from hand_worker import HandWorker, delta, done
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Emission, Finish
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_producer import (
    Cancelled,
    Client,
    DeadlineExceeded,
    Delta,
    End,
    GenerateRequest,
    GenerationFailed,
    IncompleteGeneration,
    Prefill,
    Restart,
    Start,
    TokenStream,
    TooLong,
)

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


async def text_of(tokens: TokenStream) -> str:
    return "".join([delta.text async for delta in tokens])


async def test_deltas_come_in_order_and_end_with_the_result(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("he"))
        assert (await anext(tokens)).text == "he"
        await worker.emit(work, delta("y", 2))
        await worker.finish(work, "hey")
        assert await text_of(tokens) == "y"
    assert tokens.result.text == "hey"
    assert tokens.result.attempt == 1
    assert tokens.ticket.id == tokens.id == work.rid
    assert (await fleet.status(tokens.id)).state == "done"


async def test_all_events_come_with_start_and_prefill(worker: HandWorker, fleet: Client) -> None:
    prefill = Prefill(token_ids=(1, 2), texts=("a", "b"), logprobs=(None, -0.5))
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, prefill)
        await worker.emit(work, delta("x"))
        await worker.finish(work, "x")
        start, *others = [event async for event in tokens.events()]
    assert isinstance(start, Start)
    assert start.started_at_ms >= start.queued_at_ms > 0
    assert others == [prefill, delta("x")]


async def test_a_delta_that_comes_twice_is_shown_once(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        for place, text in enumerate("abc"):
            await worker.emit(work, delta(text, place))
        for place, text in enumerate("abc"):
            await worker.publish(work, f"1-{place + 1} ".encode() + codec.encode(delta(text, place)))
        await worker.finish(work, "abc")
        assert await text_of(tokens) == "abc"


async def test_a_lost_message_is_read_from_the_log(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("a"))
        await worker.log(work, delta("b", 1))
        await worker.log(work, delta("c", 2))
        await worker.emit(work, delta("d", 3))
        assert [(await anext(tokens)).text for _ in range(4)] == list("abcd")
        await worker.log(work, delta("e", 4))
        await worker.finish(work, "abcde")
        assert await text_of(tokens) == "e"


async def test_what_was_lost_before_the_end_comes_as_it_was_sent(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        for place, letter in enumerate("abc"):
            await worker.log(work, delta(letter, place))
        await worker.finish(work, "abc")
        assert [event.text async for event in tokens] == list("abc")


async def test_more_than_a_page_of_the_log_is_read(worker: HandWorker, fleet: Client) -> None:
    text = "abcdefghij" * 250
    async with fleet.stream(REQUEST, max_buffered_frames=1) as tokens:
        [work] = await worker.take()
        bodies = [codec.encode(delta(letter, place)) for place, letter in enumerate(text)]
        await worker.broker.emit(
            [Emission(work.delivery, "default", place + 1, body) for place, body in enumerate(bodies)]
        )
        work.seq = len(text)
        await worker.finish(work, text)
        assert await text_of(tokens) == text


async def test_a_cut_connection_loses_nothing(worker: HandWorker, fleet: Client) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        shown = ""
        for place, letter in enumerate(text):
            await worker.cut_subscribers()
            await worker.emit(work, delta(letter, place))
            if place % 3 == 0:
                shown += (await anext(tokens)).text
        await worker.cut_subscribers()
        await worker.finish(work, text)
        assert shown + await text_of(tokens) == text


async def test_after_silence_the_log_is_read(redis_url: str, worker: HandWorker) -> None:
    async with (
        Client(redis_url, queue="q", silence_s=0.02) as fleet,
        fleet.stream(REQUEST) as tokens,
    ):
        [work] = await worker.take()
        await worker.log(work, delta("a"))
        assert (await anext(tokens)).text == "a"
        # The end is told to a channel that nobody hears.
        tokens._reader._link.leave(tokens.id, tokens._reader)
        await worker.finish(work, "a")
        assert await text_of(tokens) == ""
        assert tokens.result.text == "a"


async def test_noise_on_the_channel_does_no_harm(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        for noise in (b"", b"hello", b"1-1 \xc1", b"1-1,2 x", b"9-7 " + codec.encode(delta("z"))):
            await worker.publish(work, noise)
        await worker.emit(work, delta("a"))
        await worker.finish(work, "a")
        assert await text_of(tokens) == "a"


async def test_what_is_too_large_for_a_channel_comes_from_the_log(worker: HandWorker, fleet: Client) -> None:
    large = Delta(token_ids=(0,), texts=("x" * 20_000,))
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, large)
        await worker.emit(work, delta("y", 1))
        await worker.finish(work, "z" * 20_000)
        assert [event async for event in tokens] == [large, delta("y", 1)]
    assert tokens.result.text == "z" * 20_000


async def test_a_log_that_cannot_help_is_not_read_again_and_again(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("a"))
        assert (await anext(tokens)).text == "a"
        broker, reads = fleet._open_link().broker, []
        real = broker.events

        async def events(rid: str, after: str = "-") -> list[Frame]:
            reads.append(after)
            return await real(rid, after)

        monkeypatch.setattr(broker, "events", events)
        await worker.redis.delete(worker.broker.keys.log(work.rid))
        reading = asyncio.create_task(text_of(tokens))
        for seq in range(3, 30):
            await worker.publish(work, f"1-{seq} ".encode() + codec.encode(delta("x", seq)))
            await fleet.depth()  # so that the reader has had its turn
        await worker.finish(work, "abc", last_seq=29)
        assert await reading == "bc"
        assert len(reads) <= 4


# --- restarts


async def test_an_end_of_an_attempt_that_was_given_up_is_none(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [first] = await worker.take()
        await worker.lose(first)
        [second] = await worker.take()
        await worker.emit(second, delta("a"))
        assert (await anext(tokens)).text == "a"
        await worker.publish(second, b"2-1,1,2,3,1 " + codec.encode(End(state="failed")))
        await worker.finish(second, "a")
        assert await text_of(tokens) == ""
        assert tokens.result.text == "a"


async def test_a_restart_is_told_to_whoever_reads_all_events(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [first] = await worker.take()
        await worker.emit(first, delta("abc"))
        await worker.lose(first)
        assert not await worker.emit(first, delta("late", 3))  # fenced
        [second] = await worker.take()
        await worker.publish(first, b"1-2 " + codec.encode(delta("zombie", 3)))
        await worker.emit(second, delta("xy"))
        await worker.finish(second, "xy")
        kinds = [(type(event), getattr(event, "text", None)) async for event in tokens.events()]
    assert kinds == [(Start, None), (Delta, "abc"), (Restart, None), (Start, None), (Delta, "xy")]
    assert tokens.result.text == "xy"
    assert tokens.result.attempt == 2


async def test_the_same_text_again_goes_on_where_it_stopped(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("abc"))
        assert (await anext(tokens)).text == "abc"
        for _ in range(2):
            await worker.lose(work)
            [work] = await worker.take()
            await worker.emit(work, delta("ab"))
        await worker.emit(work, delta("cd", 2))
        await worker.emit(work, delta("e", 4))
        await worker.finish(work, "abcde")
        assert await text_of(tokens) == "de"
    assert tokens.result.text == "abcde"


@pytest.mark.parametrize("again", ["abX", "ab"])
async def test_another_text_is_not_spliced_to_what_was_shown(
    worker: HandWorker, fleet: Client, again: str
) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [first] = await worker.take()
        await worker.emit(first, delta("abc"))
        assert (await anext(tokens)).text == "abc"
        await worker.lose(first)
        [second] = await worker.take()
        await worker.emit(second, delta(again))
        await worker.finish(second, again)
        with pytest.raises(GenerationFailed, match="differs from what was shown") as caught:
            await text_of(tokens)
        assert caught.value.retryable


async def test_a_request_may_rather_fail_than_begin_again(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST, on_restart="fail") as tokens:
        [first] = await worker.take()
        await worker.emit(first, delta("abc"))
        await worker.lose(first)
        assert (await anext(tokens)).text == "abc"
        with pytest.raises(GenerationFailed) as caught:
            await anext(tokens)
        assert caught.value.retryable
    assert (await fleet.status(tokens.id)).state == "failed"


async def test_a_reader_who_wants_no_restart_takes_none_from_any_worker(
    worker: HandWorker, fleet: Client
) -> None:
    async with fleet.stream(REQUEST, on_restart="fail") as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("abc"))
        await worker.publish(work, b"2-0,1,2,3,2 " + codec.encode(worker.start))
        assert (await anext(tokens)).text == "abc"
        with pytest.raises(GenerationFailed) as caught:
            await anext(tokens)
        assert caught.value.retryable
    assert (await fleet.status(tokens.id)).state == "cancelled"


async def test_nothing_shown_means_nothing_to_take_back(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST, on_restart="fail") as tokens:
        [first] = await worker.take()
        await worker.lose(first)
        [second] = await worker.take()
        await worker.emit(second, delta("ab"))
        await worker.finish(second, "ab")
        assert await text_of(tokens) == "ab"


# --- ends


async def test_the_end_makes_up_for_a_log_that_is_gone(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        assert (await anext(tokens)).text == "ab"
        await worker.log(work, delta("c", 2))
        await worker.redis.delete(worker.broker.keys.log(work.rid))
        await worker.emit(work, delta("d", 3))
        await worker.finish(work, "abcd")
        [rest] = [event async for event in tokens]
        assert rest == Delta(token_ids=(2, 3), texts=("", "cd"))


async def test_an_end_that_does_not_fit_makes_nothing_whole(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        assert (await anext(tokens)).text == "ab"
        await worker.finish(work, "XYZ", last_seq=7)
        with pytest.raises(IncompleteGeneration):
            await text_of(tokens)
    assert tokens.result.text == "XYZ"


async def test_what_comes_between_the_log_and_the_record_is_not_missed(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("a"))
        assert (await anext(tokens)).text == "a"
        link = fleet._open_link()
        ask = link.record

        async def ask_late(rid: str) -> Record | None:
            monkeypatch.setattr(link, "record", ask)
            await worker.log(work, delta("bc", 1))
            await worker.finish(work, "abc")
            return await ask(rid)

        monkeypatch.setattr(link, "record", ask_late)
        tokens._reader.missed()
        assert [new.texts async for new in tokens] == [("b", "c")]
    assert tokens.result.text == "abc"


async def test_a_restart_whose_log_is_gone_goes_on_where_the_text_stopped(
    worker: HandWorker, fleet: Client
) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        assert (await anext(tokens)).text == "ab"
        await worker.lose(work)
        [work] = await worker.take()
        await worker.log(work, delta("abc"))
        await worker.redis.delete(worker.broker.keys.log(work.rid))
        await worker.finish(work, "abcd")
        assert await text_of(tokens) == "cd"
    assert tokens.result.text == "abcd"


async def test_an_end_of_an_attempt_never_seen_is_a_restart(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [first] = await worker.take()
        await worker.emit(first, delta("ab"))
        await worker.redis.delete(worker.broker.keys.log(first.rid))
        await worker.broker.finish([Finish(first.delivery, done("xyz", of=3, last_seq=2))])
        events = [event async for event in tokens.events()]
    assert [type(event) for event in events] == [Start, Delta, Restart, Delta]
    assert events[-1] == Delta(token_ids=(0, 1, 2), texts=("", "", "xyz"))


async def test_how_it_failed_is_raised_after_what_came_before(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        await worker.fail(work, TooLong(prompt_tokens=5, max_tokens=8, limit=10))
        assert (await anext(tokens)).text == "ab"
        with pytest.raises(TooLong) as caught:
            await anext(tokens)
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (5, 8, 10)
        with pytest.raises(TooLong):  # and again, not a second end of the iteration
            await anext(tokens)
    assert tokens.result.state == "failed"


async def test_wait_skips_to_the_end(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        with pytest.raises(RuntimeError, match="not ended"):
            _ = tokens.result
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        await worker.finish(work, "ab")
        assert (await tokens.wait()).text == "ab"


async def test_another_client_may_cancel(redis_url: str, worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        async with Client(redis_url, queue="q") as other:
            assert await other.cancel(tokens.id) == "cancelled"
        with pytest.raises(Cancelled):
            await anext(tokens)


async def test_a_request_that_redis_forgot_is_incomplete(redis_url: str, worker: HandWorker) -> None:
    async with Client(redis_url, queue="q", silence_s=0.02) as fleet, fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        assert (await anext(tokens)).text == "ab"
        await worker.redis.flushall()
        with pytest.raises(IncompleteGeneration):
            await anext(tokens)


async def test_a_log_that_stops_without_an_end_is_shown_and_then_incomplete(
    redis_url: str, worker: HandWorker
) -> None:
    async with Client(redis_url, queue="q", silence_s=0.02) as fleet, fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.log(work, delta("a"))
        await worker.log(work, delta("b", 1))
        await worker.redis.delete(worker.broker.keys.record(work.rid))
        assert [(await anext(tokens)).text for _ in range(2)] == ["a", "b"]
        with pytest.raises(IncompleteGeneration):
            await anext(tokens)


async def test_a_deadline_fires_without_a_worker(redis_url: str, worker: HandWorker) -> None:
    async with Client(redis_url, queue="q") as fleet, fleet.stream(REQUEST, deadline_s=0.02) as tokens:
        with pytest.raises(DeadlineExceeded):
            await anext(tokens)
    assert tokens.result.state == "expired"


async def test_a_deadline_fires_even_if_the_server_does_not_see_it(
    redis_url: str, worker: HandWorker
) -> None:
    async with Client(redis_url, queue="q", grace_s=0.02) as fleet:
        async with fleet.stream(REQUEST, deadline_s=60) as tokens:
            tokens._reader.arm(deadline_at=0, doubtful=False)  # as if a minute had passed
            with pytest.raises(DeadlineExceeded):
                await anext(tokens)
        assert (await fleet.status(tokens.id)).state == "cancelled"


# --- leaving, joining, lagging


async def test_leaving_early_cancels(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST) as tokens:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        await anext(tokens)
    assert (await fleet.status(tokens.id)).state == "cancelled"
    assert not await worker.emit(work, delta("c", 2))


async def test_a_cancelled_reader_cancels_its_request(worker: HandWorker, fleet: Client) -> None:
    entered: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        async with fleet.stream(REQUEST) as tokens:
            entered.set_result(tokens.id)
            await text_of(tokens)

    task = asyncio.create_task(read())
    rid = await entered
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (await fleet.status(rid)).state == "cancelled"


async def test_a_key_used_before_joins_the_request(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST, idempotency_key="k") as first:
        [work] = await worker.take()
        await worker.emit(work, delta("ab"))
        async with fleet.stream(REQUEST, idempotency_key="k") as second:
            assert second.id == first.id
            assert (first.ticket.duplicate, second.ticket.duplicate) == (False, True)
            assert second.ticket.state == "running"
            assert (await anext(second)).text == "ab"
        assert (await fleet.status(first.id)).state == "running"  # leaving a joined one cancels nothing
        await worker.emit(work, delta("c", 2))
        await worker.finish(work, "abc")
        assert await text_of(first) == "abc"
    async with fleet.stream(REQUEST, idempotency_key="k") as third:
        assert await text_of(third) == "abc"
    assert third.ticket.state == "done"


async def test_attaching_to_a_stream_gives_it_from_the_first_event(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST, stream=True)
    [work] = await worker.take()
    await worker.emit(work, delta("ab"))
    async with fleet.attach(ticket.id) as tokens:
        assert (await anext(tokens)).text == "ab"
        await worker.emit(work, delta("c", 2))
        assert (await anext(tokens)).text == "c"
    await worker.finish(work, "abc")
    async with fleet.attach(ticket.id) as tokens:
        assert await text_of(tokens) == "abc"
    assert tokens.result.text == "abc"


async def test_a_reader_who_gives_up_waiting_may_come_back(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = await fleet.submit(REQUEST, stream=True)
    [work] = await worker.take()
    await worker.emit(work, delta("ab"))
    asked = asyncio.Event()

    async def hang(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with fleet.attach(ticket.id) as tokens:
        with monkeypatch.context() as slow:
            slow.setattr(Broker, "events", hang)
            waiting = asyncio.ensure_future(anext(tokens))
            await asked.wait()
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(60):
            assert (await anext(tokens)).text == "ab"


async def test_attaching_to_a_request_without_a_log_gives_its_text_whole(
    worker: HandWorker, fleet: Client
) -> None:
    ticket = await fleet.submit(REQUEST)
    async with fleet.attach(ticket.id) as tokens:
        [work] = await worker.take()
        await worker.finish(work, "abc")
        assert [event async for event in tokens] == [Delta(token_ids=(0, 1, 2), texts=("", "", "abc"))]


async def test_a_slow_reader_is_bounded_and_misses_nothing(worker: HandWorker, fleet: Client) -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    async with fleet.stream(REQUEST, max_buffered_frames=8) as tokens:
        [work] = await worker.take()
        for place, letter in enumerate(text):
            await worker.emit(work, delta(letter, place))
            assert len(tokens._reader._frames) <= 8
        await worker.finish(work, text)
        assert await text_of(tokens) == text


@pytest.mark.parametrize("bound", range(1, 6))
async def test_whatever_a_slow_reader_has_no_room_for_is_not_lost(
    worker: HandWorker, fleet: Client, bound: int
) -> None:
    async with fleet.stream(REQUEST, max_buffered_frames=bound) as tokens:
        [work] = await worker.take()
        for place, letter in enumerate("abc"):
            await worker.emit(work, delta(letter, place))
        await worker.finish(work, "abc")
        await fleet.depth()  # all messages have come, the end last
        assert await text_of(tokens) == "abc"


async def test_a_slow_reader_is_bounded_in_bytes(worker: HandWorker, fleet: Client) -> None:
    async with fleet.stream(REQUEST, max_buffered_bytes=10_000) as tokens:
        [work] = await worker.take()
        for place in range(20):
            await worker.emit(work, Delta(token_ids=(place,), texts=("x" * 3000,)))
            assert sum(map(len, tokens._reader._frames)) == tokens._reader._bytes <= 10_000
        await worker.finish(work, "x" * 60_000)
        assert len(await text_of(tokens)) == 60_000


async def test_closing_the_client_ends_a_reader(redis_url: str, worker: HandWorker) -> None:
    fleet = await Client(redis_url, queue="q").open()
    async with fleet.stream(REQUEST) as tokens:
        reading = asyncio.create_task(text_of(tokens))
        await worker.take()
        await fleet.close()
        with pytest.raises(Cancelled):
            await reading
