"""What scripts can say, what is wrong with some, and time that only moves when it is told to."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from broker_parts import Recorder
from streamfleet_common.broker import Broker
from streamfleet_common.errors import StreamfleetError
from streamfleet_producer import (
    BrokerUnavailable,
    Cancelled,
    ChatMessage,
    Client,
    DeadlineExceeded,
    DecideRequest,
    Delta,
    EmbedRequest,
    End,
    GenerateRequest,
    GenerationFailed,
    InvalidRequest,
    Question,
    QueueFull,
    Unsupported,
    blocking,
)
from streamfleet_producer import client as client_module
from streamfleet_producer.intake import keyed_rid
from streamfleet_producer.testing import ANYTHING, NEVER, Lost, ScriptedFleet, Wait
from streamfleet_producer.testing.memory_broker import MemoryBroker

HELLO = GenerateRequest(prompt="hello")


@pytest.fixture
async def fleet() -> AsyncIterator[ScriptedFleet]:
    async with ScriptedFleet() as fleet:
        yield fleet


@pytest.fixture
async def client(fleet: ScriptedFleet) -> AsyncIterator[Client]:
    async with fleet.client() as client:
        yield client


# --- the face


@pytest.mark.parametrize(
    ("real", "make"),
    [(Client, ScriptedFleet.client), (blocking.Client, ScriptedFleet.blocking_client)],
    ids=["async", "blocking"],
)
def test_its_clients_have_the_very_face_of_the_real_ones(real: type, make: Any) -> None:
    mine = type(make(ScriptedFleet()))
    assert issubclass(mine, real)
    public = [name for name in dir(real) if not name.startswith("_")]
    assert {"run", "stream", "call_stream", "count_tokens"} <= set(public)
    for name in public:
        one, other = getattr(mine, name), getattr(real, name)
        assert inspect.signature(one) == inspect.signature(other), name
        assert inspect.iscoroutinefunction(one) == inspect.iscoroutinefunction(other), name
    # Only the opening is not the real one's.
    assert {name for name in public if getattr(mine, name) is not getattr(real, name)} <= {"open"}


def test_whatever_a_client_asks_of_its_broker_is_answered_in_memory() -> None:
    """A step that was forgotten would ask a Redis that is not there."""
    folder = Path(client_module.__file__).parent
    asked = {
        step for path in folder.glob("*.py") for step in re.findall(r"broker\.(\w+)\(", path.read_text())
    }
    assert {"submit", "cancel", "status", "events", "cards", "queues", "depth", "sweep"} <= asked
    for step in asked:
        assert getattr(MemoryBroker, step) is not getattr(Broker, step), step


async def test_the_example_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    await names["test_a_summary"]()


# --- rules


async def test_the_first_rule_that_matches_answers(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate("hello", "once", times=1)
    fleet.on_generate(re.compile("^hel"), "pattern", times=1)
    fleet.on_generate(lambda request: request.max_tokens == 7, "seven")
    fleet.on_generate(ANYTHING, "any")
    asked = [HELLO, HELLO, GenerateRequest(prompt="hello", max_tokens=7), HELLO]
    assert [(await client.run(one)).text for one in asked] == ["once", "pattern", "seven", "any"]
    chat = GenerateRequest(messages=[ChatMessage(role="user", content="hello")])
    fleet.on_generate("hello", "late")
    assert (await client.run(chat)).text == "any"


async def test_what_was_asked_is_kept(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a")
    async with fleet.client(tenant="t") as other:
        await client.run(HELLO, lane="high", idempotency_key="k")
        await other.submit(GenerateRequest(prompt="bye"), deadline_s=5, stream=True)
    first, second = fleet.asked
    assert first.request == HELLO
    assert first.request is not HELLO  # it has been bytes
    assert (first.envelope.lane, first.envelope.idempotency_key, first.envelope.tenant) == (
        "high",
        "k",
        "default",
    )
    assert (second.envelope.tenant, second.envelope.deadline_ms, second.envelope.stream) == ("t", 5000, True)
    assert (first.state, first.id) == ("done", first.envelope.rid)


async def test_a_request_without_a_rule_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="no rule for request 1"):  # noqa: PT012 (leaving raises it)
        async with ScriptedFleet() as fleet, fleet.client() as client:
            fleet.on_generate("bye", "a")
            with pytest.raises(GenerationFailed) as caught:
                await client.run(HELLO)
            assert "hello" not in str(caught.value)


async def test_an_error_of_the_test_comes_before_that_of_the_script() -> None:
    with pytest.raises(KeyError):  # noqa: PT012 (leaving must not replace it)
        async with ScriptedFleet() as fleet, fleet.client() as client:
            with pytest.raises(GenerationFailed):
                await client.run(HELLO)
            raise KeyError


@pytest.mark.parametrize(
    ("request_", "steps", "what"),
    [
        (HELLO, [3], "strings, not int"),
        (HELLO, [Delta(index=1, token_ids=(1,), texts=("a",))], "choice 1"),
        (EmbedRequest(texts=["a", "b"]), [[[1.0]]], "1 answers for 2 items"),
        (EmbedRequest(texts=["a"]), [], "without an answer"),
        (EmbedRequest(texts=["a"]), ["text"], "a list is wanted"),
        (DecideRequest(state="s", questions=[Question(id="q", criteria="c", type="yes_no")]), [{}], "'q'"),
    ],
)
async def test_a_script_that_cannot_be_played_fails_the_test(
    request_: Any, steps: list[Any], what: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(what)):  # noqa: PT012 (leaving raises it)
        async with ScriptedFleet() as fleet, fleet.client() as client:
            fleet.on_generate(ANYTHING, *steps)
            fleet.on_embed(ANYTHING, *steps)
            fleet.on_decide(ANYTHING, *steps)
            with pytest.raises(GenerationFailed, match="cannot be played"):
                await client.run(request_)


# --- answers


async def test_every_choice_has_its_tokens_up_to_the_limit(fleet: ScriptedFleet, client: Client) -> None:
    only = Delta(index=1, token_ids=(9,), texts=("!",))
    fleet.on_generate("two words", "a", only, "b", "c")
    request = GenerateRequest(prompt="two words", n=2, max_tokens=3, logprobs=True, top_logprobs=1)
    end = await client.run(request)
    first, second = end.choices
    assert (first.text, first.finish_reason, first.token_ids) == ("abc", "length", (0, 1, 2))
    assert (second.text, second.finish_reason, second.last_token_id) == ("a!b", "length", 2)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (2, 6)
    assert first.logprobs == (-0.5,) * 3
    fleet.on_generate("hello", "a", finish_reason="stop")
    assert (await client.run(HELLO)).finish_reason == "stop"


async def test_a_function_makes_the_answer(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, lambda request: request.prompt.split(), "!")
    assert (await client.run(GenerateRequest(prompt="a b"))).choices[0].token_ids == (0, 1, 2)
    fleet.on_embed(ANYTHING, lambda request: [[len(text), 0.5] for text in request.texts])
    assert [list(one) for one in await client.embed(["a", "bcd"])] == [[1.0, 0.5], [3.0, 0.5]]


async def test_an_end_is_taken_as_it_is(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a", End(state="dead"))
    with pytest.raises(GenerationFailed, match="ended as dead"):
        await client.run(HELLO)


async def test_a_large_frame_is_announced_without_its_event(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a", "x" * 20_000)
    heard = Recorder()
    channel = f"{{q:default:0}}:c:default:{keyed_rid(b'default', 'k')}"
    fleet.channels.ears.add(channel, heard)
    async with client.stream(HELLO, idempotency_key="k") as tokens:
        assert [len(delta.text) async for delta in tokens] == [1, 20_000]
    start, first, second, end = heard.messages
    assert (start[:4], first[:4], second) == (b"1-0,", b"1-1 ", b"1-2 ")
    assert end.startswith(b"2-1,")
    assert end.endswith(b" ")


async def test_labels_orders_and_decisions(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_classify(ANYTHING, [{"bad": 0.25, "good": 0.75}])
    fleet.on_rerank("query", [0.1, 0.9, 0.9])
    fleet.on_decide("state", {"a": "no", "b": {"x": 1.0, "y": 1.0}})
    (mood,) = await client.classify(["text"], top_k=1)
    assert [(label.label, label.score) for label in mood.labels] == [("good", 0.75)]
    ranks = await client.rerank("query", ["a", "b", "c"], top_n=2)
    assert [(rank.index, rank.score) for rank in ranks] == [(1, 0.9), (2, 0.9)]
    questions = [
        Question(id="a", criteria="c", type="yes_no"),
        Question(id="b", criteria="c", options=("x", "y")),
    ]
    answers = await client.decide(questions, state="state")
    assert answers["a"].option == "no"
    # exp(0) against exp(log 0.01), and two equals.
    assert answers["a"].probabilities["no"] == pytest.approx(1 / 1.01)
    assert answers["b"].probabilities == {"x": 0.5, "y": 0.5}


class Review(BaseModel):
    stars: int


async def test_handlers(fleet: ScriptedFleet, client: Client) -> None:
    schema = '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}'
    fleet.on_call(
        "rate", {"stars": 1}, match=lambda request: request.input["text"] == "bad", input_schema=schema
    )
    fleet.on_call("rate", lambda request: {"stars": len(request.input["text"])})
    inputs = [{"text": "bad"}, {"text": "four"}]
    assert await client.call_many("rate", inputs, output=Review) == [Review(stars=1), Review(stars=4)]
    with pytest.raises(InvalidRequest, match="text"):
        await client.call("rate", {})
    assert [card.model for card in fleet.cards] == ["scripted", "rate"]


# --- what goes wrong


async def test_refusals(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a")
    fleet.refuse("tokens", retry_after_s=2.5, times=1)
    with pytest.raises(QueueFull, match="as many tokens") as caught:
        await client.run(HELLO)
    assert (caught.value.reason, caught.value.retry_after) == ("tokens", 2.5)
    assert (await client.run(HELLO)).text == "a"
    fleet.refuse("paused")
    for _ in range(2):
        with pytest.raises(QueueFull, match="is paused"):
            await client.run(HELLO)
    fleet.accept()
    assert (await client.run(HELLO)).text == "a"
    assert len(fleet.asked) == 2


async def test_a_queue_without_workers_keeps_what_comes(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a")
    fleet.stop_workers()
    assert await client.models() == []
    ticket = await client.submit(HELLO)
    with pytest.raises(DeadlineExceeded):
        await client.run(HELLO, timeout=60)
    assert (await client.status(ticket.id)).state == "queued"
    fleet.start_workers()
    assert (await client.result(ticket.id)).text == "a"


async def test_redis_away_and_back(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a", Wait(1), "b")
    ticket = await client.submit(HELLO, stream=True)
    async with client.attach(ticket.id) as tokens:
        assert (await anext(tokens)).text == "a"
        fleet.go_down()
        with pytest.raises(BrokerUnavailable) as caught:
            await client.run(HELLO)
        assert caught.value.reason == "unreachable"
        await fleet.advance(1)  # what is said now is lost
        fleet.come_back()
        assert [delta.text async for delta in tokens] == ["b"]


async def test_a_request_over_the_cards_limits_is_refused() -> None:
    async with ScriptedFleet(max_seq_len=10, tasks=("generate",)) as fleet, fleet.client() as client:
        with pytest.raises(StreamfleetError, match="over the limit of 10"):
            await client.run(GenerateRequest(prompt_token_ids=[1] * 8, max_tokens=3))
        with pytest.raises(Unsupported):
            await client.embed(["a"])
        assert fleet.asked == []


# --- time


async def test_time_that_jumps_takes_none(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate("hello", "a", Wait(3600), "b", queued_s=60)
    began = time.monotonic()
    end = await client.run(HELLO, deadline_s=7200)
    assert time.monotonic() - began < 30  # an hour and a minute of the fleet's
    assert (end.started_at_ms - end.queued_at_ms, end.ended_at_ms - end.started_at_ms) == (60_000, 3_600_000)
    with pytest.raises(DeadlineExceeded):
        await client.run(HELLO, timeout=3659)


async def test_time_that_stands_moves_when_told() -> None:
    async with ScriptedFleet(time="stands") as fleet, fleet.client() as client:
        fleet.on_generate("hello", "a", Wait(2), "b", NEVER)
        async with client.stream(HELLO, deadline_s=10) as tokens:
            heard: list[str] = []

            async def read() -> None:
                async for delta in tokens:
                    heard.append(delta.text)  # noqa: PERF401 (one by one is what counts)

            reading = asyncio.create_task(read())
            await fleet.advance(1.9)
            assert heard == ["a"]
            await fleet.advance(0.1)
            assert heard == ["a", "b"]
            assert (await client.depth()).running == 1
            await fleet.advance(8)
            with pytest.raises(DeadlineExceeded):
                await reading
        status = await client.status(tokens.id)
        assert status.ended_at_ms - status.accepted_at_ms == 10_000


async def test_results_and_logs_expire() -> None:
    async with ScriptedFleet(time="stands") as fleet, fleet.client() as client:
        fleet.on_generate("hello", "a", "b")
        ticket = await client.submit(HELLO, stream=True, result_ttl_s=120)
        await client.result(ticket.id)
        await fleet.advance(61)
        async with client.attach(ticket.id) as tokens:
            assert [delta.text async for delta in tokens] == ["ab"]  # of the record: the log is gone
        await fleet.advance(60)
        with pytest.raises(StreamfleetError, match="has expired"):
            await client.result(ticket.id)


async def test_the_same_script_makes_the_same_times_again() -> None:
    async def played() -> list[End]:
        async with ScriptedFleet() as fleet, fleet.client() as client:
            fleet.on_generate("hello", "a", Wait(7), Lost(), "b", Wait(6), "c")
            return [await client.run(HELLO) for _ in range(3)]

    first = await played()
    assert first == await played()
    assert first[-1].ended_at_ms - first[0].queued_at_ms == 39_000


async def test_a_fleet_belongs_to_one_event_loop(fleet: ScriptedFleet, client: Client) -> None:
    fleet.on_generate(ANYTHING, "a")
    await client.run(HELLO)
    with fleet.blocking_client() as other, pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(other.run, HELLO)


# --- the blocking client


def test_the_blocking_client() -> None:
    with ScriptedFleet(time="stands") as fleet, fleet.blocking_client() as client:
        fleet.on_generate("hello", "a", "b")
        fleet.on_generate("slow", "a", Wait(5), "b")
        assert client.run(HELLO).text == "ab"
        with client.stream(HELLO) as tokens:
            assert [delta.text for delta in tokens] == ["a", "b"]
        ticket = client.submit(GenerateRequest(prompt="slow"))
        assert client.status(ticket.id).state == "running"
        fleet.advance_blocking(5)
        assert client.status(ticket.id).state == "done"
        assert client.result(ticket.id).text == "ab"
        other = client.submit(GenerateRequest(prompt="slow"))
        assert client.cancel(other.id) == "cancelled"
        with pytest.raises(Cancelled):
            client.result(other.id)
    with ScriptedFleet() as again, again.blocking_client() as client:
        again.on_generate("hello", "a", Wait(60), "b")
        assert client.run(HELLO, timeout=120).text == "ab"
