"""Final answers, tickets, and what is asked of the fleet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from eventually import eventually
from hand_worker import HandWorker, delta
from hired import eventually_so
from lossy_proxy import LossyProxy
from streamfleet_common import calls
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import StreamfleetError, Undecodable
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_producer import (
    BrokerUnavailable,
    Cancelled,
    Client,
    Conflict,
    DeadlineExceeded,
    End,
    GenerateRequest,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    QueueFull,
    RequestNotFound,
    Status,
)
from streamfleet_producer import client as client_module
from streamfleet_producer import link as link_module
from streamfleet_producer.intake import keyed_rid

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)
OTHER = GenerateRequest(prompt="good bye", max_tokens=8)


async def nobody_listens(worker: HandWorker, fleet: Client | None = None) -> None:
    """Wait until the server has been told of the last listener's leaving.

    Ids that an open client keeps ready for its next requests are nobody's.
    """
    while True:
        names = {name.decode().rpartition(":")[2] for name in await worker.channels()}
        if all(fleet is not None and name in fleet._open_link().rids for name in names):
            return
        await asyncio.sleep(0.002)


async def serve(worker: HandWorker, count: int = 1) -> None:
    for work in await worker.take(count):
        await worker.finish(work, work.prompt)


# --- run


async def test_run_gives_the_answer_and_leaves_nothing_behind(worker: HandWorker, fleet: Client) -> None:
    answer, _ = await asyncio.gather(fleet.run(REQUEST), serve(worker))
    assert answer.text == "hello"
    assert answer.attempt == 1
    assert answer.ended_at_ms >= answer.started_at_ms >= answer.queued_at_ms > 0
    await nobody_listens(worker, fleet)


async def test_run_raises_what_the_end_says(worker: HandWorker, fleet: Client) -> None:
    async def fail() -> None:
        [work] = await worker.take()
        await worker.fail(work, GenerationFailed("out of memory", retryable=True))

    with pytest.raises(GenerationFailed, match="out of memory") as caught:
        await asyncio.gather(fleet.run(REQUEST), fail())
    assert caught.value.retryable


async def test_an_answer_too_large_for_a_channel_is_read_from_the_record(
    worker: HandWorker, fleet: Client
) -> None:
    async def serve_large() -> None:
        [work] = await worker.take()
        await worker.finish(work, "x" * 100_000)

    answer, _ = await asyncio.gather(fleet.run(REQUEST), serve_large())
    assert answer.text == "x" * 100_000


async def test_an_answer_told_while_nobody_could_hear_is_read_from_the_record(
    worker: HandWorker, fleet: Client
) -> None:
    running = asyncio.create_task(fleet.run(REQUEST))
    [work] = await worker.take()
    await worker.cut_subscribers()
    await worker.finish(work, "abc")
    assert (await running).text == "abc"


async def test_a_message_lost_without_a_trace_is_found_after_silence(
    redis_url: str, worker: HandWorker
) -> None:
    async with Client(redis_url, queue="q", silence_s=0.02) as fleet:
        running = asyncio.create_task(fleet.run(REQUEST))
        [work] = await worker.take()
        [answer] = fleet._open_link().waiting
        fleet._open_link().leave(work.rid, answer)  # type: ignore[arg-type]
        await worker.finish(work, "abc")
        assert (await running).text == "abc"


async def test_a_record_written_by_hand_fails_whoever_asks_for_it_alone(
    worker: HandWorker, fleet: Client
) -> None:
    ticket = await fleet.submit(REQUEST)
    other = "00" + "b" * 32
    await worker.redis.set(worker.broker.keys.record(other), b"garbage")
    both = (fleet.status(other), fleet.status(ticket.id))
    broken, found = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(broken, Undecodable)
    assert isinstance(found, Status)
    assert found.state == "queued"


async def test_noise_on_the_channel_is_no_answer(worker: HandWorker, fleet: Client) -> None:
    running = asyncio.create_task(fleet.run(REQUEST))
    [work] = await worker.take()
    for noise in (b"", b"nonsense", b"1-0,1,2,3,1 ", b"1-1 delta"):
        await worker.publish(work, noise)
    await worker.finish(work, "abc")
    assert (await running).text == "abc"


async def test_a_timeout_gives_up_and_cancels(worker: HandWorker, fleet: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await fleet.run(REQUEST, timeout=0.02, deadline_s=60, idempotency_key="k")

    async def is_cancelled() -> bool:
        return (await fleet.status(keyed_rid(b"default", "k"))).state == "cancelled"

    await eventually_so(is_cancelled, "its cancellation")


async def test_a_timeout_is_a_deadline_too(worker: HandWorker, fleet: Client) -> None:
    running = asyncio.create_task(fleet.run(REQUEST, timeout=30))
    [work] = await worker.take()
    assert work.envelope.deadline_ms == 30_000
    await worker.finish(work, "abc")
    assert (await running).text == "abc"


@pytest.mark.parametrize("call", ["run", "run_many", "result"])
async def test_a_timeout_holds_when_redis_hangs(
    redis_url: str, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(client_module, "LAST_LOOK_S", 0.05)
    async with LossyProxy(redis_url) as proxy, Client(proxy.url, queue="q") as fleet:
        ticket = await fleet.submit(REQUEST)
        proxy.is_mute = True
        argument = {"run": REQUEST, "run_many": [REQUEST], "result": ticket.id}[call]
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(3):  # a command's own limit is five seconds
                await getattr(fleet, call)(argument, timeout=0.05)
        proxy.is_mute = False
        proxy.cut()


async def test_an_answer_that_came_just_in_time_counts(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LAST_LOOK_S", 60.0)
    running = asyncio.create_task(fleet.run(REQUEST, timeout=0.5, deadline_s=60))
    [work] = await worker.take()
    [answer] = fleet._open_link().waiting
    fleet._open_link().leave(work.rid, answer)  # type: ignore[arg-type]
    await worker.finish(work, "abc")
    assert (await running).text == "abc"  # no message told it: the last look into the record did


async def test_a_deadline_without_a_worker_ends_the_request_as_expired(
    worker: HandWorker, fleet: Client
) -> None:
    with pytest.raises(DeadlineExceeded):
        await fleet.run(REQUEST, deadline_s=0.02, idempotency_key="k")
    assert (await fleet.status(keyed_rid(b"default", "k"))).state == "expired"
    assert (await fleet.depth()).open == 0


async def test_a_request_that_redis_forgot_is_incomplete(redis_url: str, worker: HandWorker) -> None:
    async with Client(redis_url, queue="q", silence_s=0.02) as fleet:
        running = asyncio.create_task(fleet.run(REQUEST))
        await worker.take()
        await worker.redis.flushall()
        with pytest.raises(IncompleteGeneration):
            await running


async def test_a_cancelled_caller_cancels_the_request_and_leaves_nothing_behind(
    worker: HandWorker, fleet: Client
) -> None:
    callers = [asyncio.create_task(fleet.run(REQUEST)) for _ in range(20)]
    works = await worker.take(20)
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    await nobody_listens(worker, fleet)
    await fleet._open_link().cancels.flush()
    for work in works:
        assert (await fleet.status(work.rid)).state == "cancelled"


async def test_a_caller_cancelled_at_any_moment_leaves_no_request_open(
    worker: HandWorker, fleet: Client
) -> None:
    for turns in range(40):
        caller = asyncio.create_task(fleet.run(REQUEST))
        for _ in range(turns):
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
    await fleet._open_link().submits.flush()
    await fleet._open_link().cancels.flush()
    assert (await fleet.depth()).open == 0
    await nobody_listens(worker, fleet)


async def test_closing_the_client_ends_who_waits(redis_url: str, worker: HandWorker) -> None:
    fleet = await Client(redis_url, queue="q").open()
    running = asyncio.create_task(fleet.run(REQUEST))
    [work] = await worker.take()
    closing = asyncio.create_task(fleet.close())
    with pytest.raises(Cancelled):
        await running
    await closing
    async with Client(redis_url, queue="q") as other:
        assert (await other.status(work.rid)).state == "cancelled"


async def test_closing_the_client_in_the_middle_of_a_submit_cancels_it(
    redis_url: str, worker: HandWorker
) -> None:
    for turns in range(30):
        fleet = await Client(redis_url, queue="q").open()
        await fleet.models()
        running = asyncio.create_task(fleet.run(REQUEST))
        for _ in range(turns):
            await asyncio.sleep(0)
        await fleet.close()
        with pytest.raises((Cancelled, BrokerUnavailable, RuntimeError)):
            await running
    async with Client(redis_url, queue="q") as other:
        assert (await other.depth()).open == 0
    await nobody_listens(worker)


async def test_a_submit_whose_reply_is_lost_is_one_request(redis_url: str, worker: HandWorker) -> None:
    async with LossyProxy(redis_url) as proxy, Client(proxy.url, queue="q") as fleet:
        await fleet.models()
        proxy.lose_reply(b"hello")
        running = asyncio.create_task(fleet.run(REQUEST))
        [work] = await worker.take()
        await proxy.lost.wait()
        assert (await fleet.depth()).open == 1
        await worker.finish(work, "abc")
        assert (await running).text == "abc"


async def test_a_client_that_is_not_open_says_so(redis_url: str) -> None:
    with pytest.raises(RuntimeError, match="not open"):
        await Client(redis_url, queue="q").run(REQUEST)


# --- many


async def test_many_go_in_one_call_and_come_back_in_order(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.models()
    broker = fleet._open_link().broker
    real, calls = broker.submit, []

    async def submit(submissions: Sequence[Submission]) -> list[Submitted]:
        calls.append(len(submissions))
        return await real(submissions)

    monkeypatch.setattr(broker, "submit", submit)
    requests = [GenerateRequest(prompt=str(number)) for number in range(200)]
    before = (await worker.redis.info("commandstats")).get("cmdstat_subscribe", {"calls": 0})["calls"]
    answers, _ = await asyncio.gather(fleet.run_many(requests), serve(worker, 200))
    after = (await worker.redis.info("commandstats"))["cmdstat_subscribe"]["calls"]
    assert [answer.text for answer in answers] == [str(number) for number in range(200)]
    assert calls == [200]
    assert after - before == 1
    await nobody_listens(worker, fleet)


async def test_failures_among_many_take_the_place_of_their_answers(
    redis_url: str, worker: HandWorker
) -> None:
    await worker.announce(max_queue_depth=3, vocab_size=100)
    async with Client(redis_url, queue="q", max_request_bytes=10_000) as fleet:
        requests = [
            REQUEST,
            GenerateRequest(prompt_token_ids=(5, 100)),
            OTHER,
            GenerateRequest(prompt="x" * 20_000),
            REQUEST,
            REQUEST,
        ]

        async def serve_some() -> None:
            first, second, third = await worker.take(3)
            await worker.finish(first, "one")
            await worker.fail(second, GenerationFailed("no"))
            await worker.finish(third, "three")

        outcomes, _ = await asyncio.gather(fleet.run_many(requests, return_exceptions=True), serve_some())
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds[0] is kinds[4] is End
        assert kinds[2] is GenerationFailed
        assert kinds[5] is QueueFull
        for refused in (outcomes[1], outcomes[3]):
            assert isinstance(refused, InvalidRequest)


async def test_the_first_failure_among_many_cancels_the_others(worker: HandWorker, fleet: Client) -> None:
    running = asyncio.create_task(fleet.run_many([REQUEST, OTHER, REQUEST]))
    works = await worker.take(3)
    await worker.fail(works[1], GenerationFailed("no"))
    with pytest.raises(GenerationFailed):
        await running
    await fleet._open_link().cancels.flush()
    assert (await fleet.status(works[0].rid)).state == "cancelled"
    assert (await fleet.status(works[2].rid)).state == "cancelled"


async def test_no_requests_at_all_have_no_answers(worker: HandWorker, fleet: Client) -> None:
    assert await fleet.run_many([]) == []


async def test_whoever_submits_listens_already(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fleet._open_link().broker
    real = broker.submit

    async def submit(submissions: Sequence[Submission]) -> list[Submitted]:
        listened = {name.decode().rpartition(":")[2] for name in await worker.channels()}
        assert {submission.envelope.rid for submission in submissions} <= listened
        return await real(submissions)

    monkeypatch.setattr(broker, "submit", submit)
    await asyncio.gather(fleet.run(REQUEST), serve(worker))
    await asyncio.gather(fleet.run_many([REQUEST, OTHER]), serve(worker, 2))
    async with fleet.stream(REQUEST):
        pass


async def test_concurrent_submits_go_together(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.models()
    link = fleet._open_link()
    real, calls = link.broker.submit, []

    async def submit(submissions: Sequence[Submission]) -> list[Submitted]:
        calls.append(len(submissions))
        return await real(submissions)

    monkeypatch.setattr(link.submits, "_call", submit)
    await asyncio.gather(*(fleet.submit(REQUEST) for _ in range(300)))
    assert sum(calls) == 300
    assert max(calls) == 128
    assert len(calls) <= 5


async def test_who_comes_first_is_submitted_first(worker: HandWorker, fleet: Client) -> None:
    await fleet.models()
    prompts = [str(number) for number in range(20)]
    runs = asyncio.gather(*(fleet.run(GenerateRequest(prompt=prompt)) for prompt in prompts))
    taken = await worker.take(20)
    assert [work.prompt for work in taken] == prompts
    for work in taken:
        await worker.finish(work, "")
    await runs


# --- tickets, keys and tenants


async def test_a_ticket_leads_back_to_the_answer(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST, lane="high", result_ttl_s=60)
    assert (ticket.state, ticket.duplicate, ticket.depth) == ("queued", False, 1)
    status = await fleet.status(ticket.id)
    assert (status.state, status.queue, status.attempt, status.worker) == ("queued", "q", 0, "")
    assert status.deadline_at_ms - status.accepted_at_ms == 600_000

    waiting = asyncio.create_task(fleet.result(ticket.id, timeout=30))
    [work] = await worker.take()
    assert (work.envelope.lane, work.envelope.result_ttl_ms) == ("high", 60_000)
    status = await fleet.status(ticket.id)
    assert (status.state, status.attempt, status.worker) == ("running", 1, "w1")
    await worker.finish(work, "abc", worker="w1")
    assert (await waiting).text == "abc"
    assert (await fleet.result(ticket.id)).text == "abc"
    status = await fleet.status(ticket.id)
    assert (status.state, status.worker) == ("done", "w1")
    assert status.ended_at_ms >= status.started_at_ms >= status.accepted_at_ms > 0


async def test_waiting_for_a_result_does_not_cancel_it(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST)
    with pytest.raises(DeadlineExceeded):
        await fleet.result(ticket.id, timeout=0.02)
    assert (await fleet.status(ticket.id)).state == "queued"


async def test_a_stream_s_result_may_be_waited_for(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST, stream=True)
    waiting = asyncio.create_task(fleet.result(ticket.id))
    [work] = await worker.take()
    await worker.emit(work, delta("ab"))
    await worker.finish(work, "ab")
    assert (await waiting).text == "ab"


async def test_a_key_stands_for_one_request(worker: HandWorker, fleet: Client) -> None:
    first = await fleet.submit(REQUEST, idempotency_key="order-17")
    again = await fleet.submit(REQUEST, idempotency_key="order-17")
    assert (again.id, again.duplicate, again.state) == (first.id, True, "queued")
    with pytest.raises(Conflict):
        await fleet.submit(OTHER, idempotency_key="order-17")
    with pytest.raises(Conflict):
        await fleet.run(OTHER, idempotency_key="order-17")
    assert (await fleet.depth()).open == 1
    await nobody_listens(worker, fleet)


async def test_two_callers_with_one_key_get_one_answer(worker: HandWorker, fleet: Client) -> None:
    callers = [asyncio.create_task(fleet.run(REQUEST, idempotency_key="k")) for _ in range(3)]
    await serve(worker)
    assert [(await caller).text for caller in callers] == ["hello"] * 3
    assert (await fleet.run(REQUEST, idempotency_key="k")).text == "hello"
    assert (await fleet.depth()).open == 0


async def test_a_joining_caller_cancels_nothing(worker: HandWorker, fleet: Client) -> None:
    first = asyncio.create_task(fleet.run(REQUEST, idempotency_key="k"))
    [work] = await worker.take()
    with pytest.raises(DeadlineExceeded):
        await fleet.run(REQUEST, idempotency_key="k", timeout=0.02)
    await fleet._open_link().cancels.flush()
    await worker.finish(work, "abc")
    assert (await first).text == "abc"


async def test_a_shared_request_is_cancelled_by_the_last_who_leaves(
    worker: HandWorker, fleet: Client
) -> None:
    async def state() -> str:
        await fleet._open_link().cancels.flush()
        return (await fleet.status(work.rid)).state

    first = asyncio.create_task(fleet.run(REQUEST, idempotency_key="k"))
    [work] = await worker.take()
    async with fleet.stream(REQUEST, idempotency_key="k"):
        async with fleet.stream(REQUEST, idempotency_key="k"):
            first.cancel()
            await asyncio.wait([first])
            assert await state() == "running"
        assert await state() == "running"
    assert await state() == "cancelled"


async def test_who_shares_a_request_has_its_answer_though_its_submitter_leaves(
    worker: HandWorker, fleet: Client
) -> None:
    async with fleet.stream(REQUEST, idempotency_key="k") as stream:
        [work] = await worker.take()
        sharer = asyncio.create_task(fleet.run(REQUEST, idempotency_key="k"))
        await eventually(lambda: bool(fleet._open_link().sharing), "the second caller")
        assert stream.ended is None
    await fleet._open_link().cancels.flush()
    await worker.finish(work, "abc")
    assert (await sharer).text == "abc"
    assert not fleet._open_link().sharing


def test_the_id_of_a_key_is_an_hmac() -> None:
    # printf order-17 | openssl dgst -sha256 -hmac s3cret
    assert keyed_rid(b"s3cret", "order-17") == "0036fdd5e8af653382a77fe5c10aa69b47"
    assert keyed_rid(b"other", "order-17") != keyed_rid(b"s3cret", "order-17")


async def test_tenants_do_not_see_each_other(redis_url: str, worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST, idempotency_key="k", stream=True)
    async with Client(redis_url, queue="q", tenant="other") as other:
        for ask in (other.status, other.cancel, other.result):
            with pytest.raises(RequestNotFound) as foreign:
                await ask(ticket.id)
            with pytest.raises(RequestNotFound) as unknown:
                await ask("00" + "0" * 32)
            assert str(foreign.value) == str(unknown.value)
        with pytest.raises(RequestNotFound):
            await other.attach(ticket.id).__aenter__()
        mine = await other.submit(REQUEST, idempotency_key="k")
        assert mine.id != ticket.id
        assert not mine.duplicate
    assert (await fleet.status(ticket.id)).state == "queued"


@pytest.mark.parametrize("rid", ["", "x", "00" + "0" * 31, "00" + "G" * 32, "*", "00" + "0" * 32 + "\n"])
async def test_what_is_no_id_is_no_request(worker: HandWorker, fleet: Client, rid: str) -> None:
    for ask in (fleet.status, fleet.cancel, fleet.result):
        with pytest.raises(RequestNotFound):
            await ask(rid)


async def test_cancel_tells_what_became_of_it(worker: HandWorker, fleet: Client) -> None:
    ticket = await fleet.submit(REQUEST)
    assert await fleet.cancel(ticket.id) == "cancelled"
    assert await fleet.cancel(ticket.id) == "cancelled"
    with pytest.raises(Cancelled):
        await fleet.result(ticket.id)
    ended = await fleet.submit(REQUEST)
    await serve(worker)
    assert await fleet.cancel(ended.id) == "done"


# --- the fleet and its absence


async def test_a_full_queue_says_when_to_come_back(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(max_queue_depth=2)
    await fleet.run_many([REQUEST] * 2, timeout=0.01, return_exceptions=True)
    for _ in range(2):
        await fleet.submit(REQUEST)
    for attempt in (fleet.submit(REQUEST), fleet.run(REQUEST), fleet.stream(REQUEST).__aenter__()):
        with pytest.raises(QueueFull) as caught:
            await attempt
        assert (caught.value.limit, caught.value.depth) == (2, 2)
        assert caught.value.retry_after > 0
        assert caught.value.retryable
    assert (await fleet.depth()).open == 2
    await nobody_listens(worker, fleet)


async def test_the_fleet_tells_what_it_serves(worker: HandWorker, fleet: Client) -> None:
    assert [(card.worker, card.model) for card in await fleet.models()] == [("w1", "m")]
    assert await fleet.queues() == ["q"]
    await fleet.submit(REQUEST)
    depth = await fleet.depth()
    assert (depth.queued, depth.running, depth.open) == (1, 0, 1)


async def test_without_redis_every_call_says_so(unused_port: int) -> None:
    async with Client(f"redis://127.0.0.1:{unused_port}/0", queue="q") as fleet:
        for attempt in (
            fleet.run(REQUEST),
            fleet.run_many([REQUEST]),
            fleet.submit(REQUEST),
            fleet.stream(REQUEST).__aenter__(),
            fleet.status("00" + "0" * 32),
            fleet.models(),
        ):
            with pytest.raises(BrokerUnavailable, match=f"127.0.0.1:{unused_port}.*cannot be reached"):
                await attempt


async def test_redis_may_be_away_for_so_long_only(
    redis_url: str, server: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BUDGET_S", 0.1)
    async with (
        HandWorker(redis_url) as worker,
        Client(redis_url, queue="q", silence_s=0.02, outage_s=0) as fleet,
    ):
        await worker.announce()
        running = asyncio.create_task(fleet.run(REQUEST))
        await worker.take()
        async with fleet.stream(REQUEST) as tokens:
            server.stop()
            with pytest.raises(BrokerUnavailable):
                await running
            with pytest.raises(StreamfleetError):
                await anext(tokens)


async def test_closing_a_client_does_not_wait_for_redis(
    redis_url: str, server: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_S", 0.05)
    async with HandWorker(redis_url) as worker:
        await worker.announce()
        fleet = await Client(redis_url, queue="q").open()
        running = asyncio.create_task(fleet.run(REQUEST))
        await worker.take()
        server.stop()
        async with asyncio.timeout(5):  # a call's own budget is ten seconds
            await fleet.close()
        with pytest.raises(Cancelled):
            await running


async def test_leaving_a_stream_does_not_wait_for_redis(
    redis_url: str, server: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "LEAVE_S", 0.05)
    async with HandWorker(redis_url) as worker, Client(redis_url, queue="q") as fleet:
        await worker.announce()
        async with asyncio.timeout(5):  # a call's own budget is ten seconds
            async with fleet.stream(REQUEST):
                await worker.take()
                server.stop()
        await fleet.close(within_s=0.05)


def test_no_such_names(redis_url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client(redis_url, queue="a b", tenant="ä")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["queue", "tenant"]


async def test_options_are_validated(worker: HandWorker, fleet: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await fleet.submit(REQUEST, lane="fast", deadline_s=-1, idempotency_key="")  # type: ignore[arg-type]
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "lane",
        "deadline_s",
        "idempotency_key",
    ]
    assert str(caught.value) == "options are not valid: " + "; ".join(caught.value.problems)
    with pytest.raises(InvalidRequest, match="deadline: no argument or option has this name"):
        await fleet.run(REQUEST, deadline=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match=r"deadline_s: 0\.001 to 86400 seconds are wanted"):
        await fleet.run(REQUEST, timeout=100_000)
    with pytest.raises(InvalidRequest, match="result_ttl_s: 1 to 604800 seconds are wanted"):
        await fleet.submit(REQUEST, result_ttl_s=0.5)
    for seconds in (math.inf, math.nan, None, "3"):
        with pytest.raises(InvalidRequest, match="deadline_s"):
            await fleet.submit(REQUEST, deadline_s=seconds)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="deadline_s"):
        await fleet.run(REQUEST, timeout=math.inf)
    with pytest.raises(InvalidRequest, match="GenerateRequest"):
        await fleet.submit("hello")  # type: ignore[arg-type]
