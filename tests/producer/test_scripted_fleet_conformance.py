"""A scripted fleet behaves as a real one: each test runs on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hired import eventually_so
from stages import Stage, real, scripted
from streamfleet_producer import (
    Cancelled,
    Client,
    Conflict,
    DeadlineExceeded,
    Delta,
    GenerateRequest,
    GenerationFailed,
    ModelNotFound,
    Prefill,
    QueueFull,
    RequestNotFound,
    Restart,
    Retry,
    Start,
    StreamfleetError,
    TooLong,
    Unsupported,
)
from streamfleet_producer.testing import NEVER, Lost

HELLO = GenerateRequest(prompt="hello")


@pytest.fixture
def exact() -> str:
    """The class of the workers' bits."""
    return ""


@pytest.fixture(params=["scripted", "real"])
async def stage(request: pytest.FixtureRequest, exact: str) -> AsyncIterator[Stage]:
    if request.param == "scripted":
        async with scripted(exact) as stage:
            yield stage
    else:
        async with real(request.getfixturevalue("redis_url"), exact) as stage:
            yield stage


@pytest.fixture
async def fleet(stage: Stage) -> AsyncIterator[Client]:
    async with stage.client() as fleet:
        yield fleet


async def one_runs(fleet: Client) -> None:
    """Wait until a worker has begun a request."""

    async def runs() -> bool:
        return (await fleet.depth()).running == 1

    await eventually_so(runs, "a running request")


async def test_an_answer_at_once(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld")
    end = await fleet.run(HELLO, timeout=60)
    (choice,) = end.choices
    assert (end.state, choice.text, choice.token_ids, choice.finish_reason) == (
        "done",
        "world",
        (0, 1),
        "eos",
    )
    assert (end.attempt, end.of, end.model) == (1, 1, "m")
    assert end.queued_at_ms <= end.started_at_ms <= end.ended_at_ms


async def test_an_answer_as_it_comes(stage: Stage, fleet: Client) -> None:
    prefill = Prefill(token_ids=(7,), texts=("hello",), logprobs=(None,))
    stage.on("hello", prefill, "wor", "ld")
    async with fleet.stream(HELLO) as tokens:
        events = [event async for event in tokens.events()]
    assert isinstance(events[0], Start)
    assert events[1:] == [
        prefill,
        Delta(token_ids=(0,), texts=("wor",)),
        Delta(token_ids=(1,), texts=("ld",)),
    ]
    assert (tokens.result.text, tokens.result.last_seq) == ("world", 3)


async def test_a_lost_worker_begins_the_text_again(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", Lost(), "Wor", "ld")
    async with fleet.stream(HELLO) as tokens:
        events = [event async for event in tokens.events()]
    kinds = [type(event) for event in events]
    assert kinds == [Start, Delta, Restart, Start, Delta, Delta]
    assert (tokens.result.text, tokens.result.attempt, tokens.result.of) == ("World", 2, 3)


async def test_a_text_that_was_shown_is_not_taken_back(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", Lost(), "Wor", "ld")
    async with fleet.stream(HELLO) as tokens:
        assert (await anext(tokens)).text == "wor"
        with pytest.raises(GenerationFailed) as caught:
            await anext(tokens)
    assert caught.value.retryable


@pytest.mark.parametrize("exact", ["a class"])
async def test_a_lost_worker_is_not_seen_where_the_next_says_the_same(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", Lost(), "wor", "ld")
    async with fleet.stream(HELLO) as tokens:
        events = [event async for event in tokens.events()]
    assert [type(event) for event in events] == [Start, Delta, Delta]
    assert tokens.result.text == "world"


async def test_a_lost_worker_fails_who_asked_for_it(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", Lost(), "Wor", "ld")
    for options in ({"on_restart": "fail"}, {"retry": "never"}, {"retry": Retry(attempts=1)}):
        async with fleet.stream(HELLO, **options) as tokens:
            with pytest.raises(GenerationFailed) as caught:
                await tokens.wait()
        assert caught.value.retryable


async def test_a_failure_has_its_kind_and_its_details(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", TooLong(prompt_tokens=5, max_tokens=6, limit=10))
    with pytest.raises(TooLong) as caught:
        await fleet.run(HELLO)
    assert (caught.value.prompt_tokens, caught.value.limit) == (5, 10)
    async with fleet.stream(HELLO) as tokens:
        assert (await anext(tokens)).text == "wor"
        with pytest.raises(TooLong):
            await anext(tokens)
    assert (await fleet.status(tokens.id)).state == "failed"


async def test_leaving_a_stream_cancels_its_request(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", NEVER)
    async with fleet.stream(HELLO) as tokens:
        assert (await anext(tokens)).text == "wor"
    assert (await fleet.status(tokens.id)).state == "cancelled"


async def test_a_caller_who_is_cancelled_cancels_its_request(stage: Stage, fleet: Client) -> None:
    stage.on("hello", NEVER)
    running = asyncio.create_task(fleet.run(HELLO, idempotency_key="k"))
    await one_runs(fleet)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(Cancelled):
        await fleet.run(HELLO, idempotency_key="k")


async def test_cancel_says_how_it_had_ended(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", NEVER)
    stage.on("bye", "good", "bye")
    ticket = await fleet.submit(HELLO, stream=True)
    async with fleet.attach(ticket.id) as tokens:
        assert (await anext(tokens)).text == "wor"
        assert await fleet.cancel(ticket.id) == "cancelled"
        with pytest.raises(Cancelled):
            await anext(tokens)
    assert await fleet.cancel(ticket.id) == "cancelled"
    done = await fleet.submit(GenerateRequest(prompt="bye"))
    await fleet.result(done.id)
    assert await fleet.cancel(done.id) == "done"


async def test_a_ticket_is_good_for_the_answer_more_than_once(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld")
    ticket = await fleet.submit(HELLO, stream=True)
    assert (ticket.state, ticket.duplicate, ticket.depth) == ("queued", False, 1)
    first, again = await fleet.result(ticket.id), await fleet.result(ticket.id)
    assert first == again
    async with fleet.attach(ticket.id) as tokens:
        assert [delta.text async for delta in tokens] == ["wor", "ld"]
    status = await fleet.status(ticket.id)
    assert (status.state, status.attempt, status.deadline_at_ms) == ("done", 1, 0)
    assert status.ended_at_ms == first.ended_at_ms


async def test_a_reader_comes_back_to_where_he_left(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld", NEVER)
    ticket = await fleet.submit(HELLO, stream=True)
    async with fleet.attach(ticket.id) as tokens:
        assert (await anext(tokens)).text == "wor"
        place = str(tokens.place)
    async with fleet.attach(ticket.id, after=place) as tokens:
        assert (await anext(tokens)).text == "ld"
        await fleet.cancel(ticket.id)
        with pytest.raises(Cancelled):
            await anext(tokens)


async def test_a_key_stands_for_one_request(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld")
    first = await fleet.submit(HELLO, idempotency_key="k")
    end = await fleet.result(first.id)
    again = await fleet.submit(HELLO, idempotency_key="k")
    assert (again.id, again.duplicate, again.state) == (first.id, True, "done")
    assert await fleet.run(HELLO, idempotency_key="k") == end
    with pytest.raises(Conflict):
        await fleet.run(GenerateRequest(prompt="other"), idempotency_key="k")


async def test_another_tenant_finds_nothing(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld")
    ticket = await fleet.submit(HELLO)
    await fleet.result(ticket.id)
    async with stage.client(tenant="other") as other:
        for asking in (other.status(ticket.id), other.result(ticket.id), other.cancel(ticket.id)):
            with pytest.raises(RequestNotFound):
                await asking
    with pytest.raises(RequestNotFound):
        await fleet.status("00" + "a" * 32)


async def test_a_deadline_ends_a_request(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", NEVER)
    stage.let_time_pass()
    async with fleet.stream(HELLO, deadline_s=0.05) as tokens:
        assert (await anext(tokens)).text == "wor"
        with pytest.raises(DeadlineExceeded):
            await anext(tokens)
    status = await fleet.status(tokens.id)
    assert status.state == "expired"
    assert status.ended_at_ms - status.accepted_at_ms >= 50


async def test_a_timeout_gives_up_one_look_or_the_request(stage: Stage, fleet: Client) -> None:
    stage.on("hello", NEVER)
    stage.let_time_pass()
    ticket = await fleet.submit(HELLO)
    with pytest.raises(DeadlineExceeded):
        await fleet.result(ticket.id, timeout=0.05)
    assert (await fleet.status(ticket.id)).state == "running"
    with pytest.raises(DeadlineExceeded):
        await fleet.run(HELLO, timeout=0.05)
    assert (await fleet.depth()).open == 1


async def test_a_full_queue_refuses(stage: Stage, fleet: Client) -> None:
    stage.on("hello", NEVER)
    await stage.limit(2)
    tickets = [await fleet.submit(HELLO) for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        await fleet.submit(HELLO)
    assert (caught.value.limit, caught.value.reason, caught.value.position) == (2, "requests", 2)
    assert caught.value.retry_after > 0
    await fleet.cancel(tickets[0].id)
    await fleet.submit(HELLO)


async def test_what_no_worker_would_take_is_refused(stage: Stage, fleet: Client) -> None:
    with pytest.raises(ModelNotFound) as caught:
        await fleet.run(GenerateRequest(prompt="hello", model="other"))
    assert caught.value.known == ["m"]
    with pytest.raises(TooLong):
        await fleet.run(GenerateRequest(prompt_token_ids=[1] * 990, max_tokens=11))
    with pytest.raises(Unsupported):
        await fleet.call("nobody", 1)


async def test_many_at_once(stage: Stage, fleet: Client) -> None:
    stage.on("hello", "wor", "ld")
    stage.on("bad", GenerationFailed("told to"))
    requests = [HELLO, GenerateRequest(prompt="bad"), HELLO]
    outcomes = await fleet.run_many(requests, return_exceptions=True)
    told = [str(one) if isinstance(one, StreamfleetError) else one.text for one in outcomes]
    assert told == ["world", "told to", "world"]
    with pytest.raises(GenerationFailed, match="told to"):
        await fleet.run_many(requests)


async def test_large_answers(stage: Stage, fleet: Client) -> None:
    large, many = "x" * 20_000, ["y"] * 1500
    stage.on("hello", large, *many)
    request = GenerateRequest(prompt="hello", max_tokens=2000)
    async with fleet.stream(request) as tokens:
        assert "".join([delta.text async for delta in tokens]) == large + "".join(many)
    assert (await fleet.run(request)).text == tokens.result.text


async def test_vectors(stage: Stage, fleet: Client) -> None:
    stage.on_embed([[1.0, 2.0], [0.5, -1.0]])
    assert [list(vector) for vector in await fleet.embed(["a", "b"])] == [[1.0, 2.0], [0.5, -1.0]]


async def test_a_handler(stage: Stage, fleet: Client) -> None:
    await stage.serve("spell", {"letters": ["a", 1, None]})
    assert await fleet.call("spell", "a") == {"letters": ["a", 1, None]}
    with pytest.raises(ModelNotFound) as caught:
        await fleet.call("nobody", 1)
    assert caught.value.known == ["spell"]


async def test_a_handler_in_parts(stage: Stage, fleet: Client) -> None:
    await stage.serve("spell", "a", "b", "c", streams=True)
    async with fleet.call_stream("spell", "abc") as parts:
        assert [part async for part in parts] == ["a", "b", "c"]
    assert await fleet.call("spell", "abc") == "c"


async def test_what_there_is(stage: Stage, fleet: Client) -> None:
    stage.on("hello", NEVER)
    assert [card.model for card in await fleet.models()] == ["m"]
    assert await fleet.queues() == ["q"]
    await fleet.submit(HELLO)
    await one_runs(fleet)
    depth = await fleet.depth()
    assert (depth.queued, depth.running, depth.limit, depth.dead) == (0, 1, depth.limit, 0)


async def test_closing_a_client_ends_who_waits(stage: Stage, fleet: Client) -> None:
    stage.on("hello", NEVER)
    client = await stage.client().open()
    running = asyncio.create_task(client.run(HELLO))
    await one_runs(fleet)
    await client.close()
    with pytest.raises(Cancelled):
        await running
    assert (await fleet.depth()).open == 0
