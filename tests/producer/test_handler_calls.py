"""Handlers called by name: what reaches them, what comes back, and what the door knows of them."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from hand_worker import HandWorker
from streamfleet_producer import (
    CallRequest,
    Client,
    Conflict,
    GenerationFailed,
    HandlerCard,
    InvalidRequest,
    ModelNotFound,
    Unsupported,
    blocking,
)


class Item(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    text: str = Field(max_length=10)
    when: dt.date | None = None
    kind: str = Field(default="plain", alias="class")


class Mood(BaseModel):
    model_config = ConfigDict(strict=True)

    label: str
    tags: tuple[str, ...] = ()
    seen: dt.date = dt.date(2020, 1, 1)


def card(schema: Any = None) -> HandlerCard:
    return HandlerCard(input_schema="" if schema is None else json.dumps(schema))


@pytest.fixture
async def mood(worker: HandWorker) -> HandWorker:
    """A worker of the handler `mood`."""
    await worker.announce(model="mood", tasks=["call"], handler=card(Item.model_json_schema()))
    return worker


def echo(request: CallRequest) -> dict[str, Any]:
    return {"outputs": (request.input,)}


async def test_a_value_goes_in_and_a_value_comes_out(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(model="any", tasks=["call"], handler=card())
    values = [None, True, 0, -2.5, "é", [], [1, [2, {"a": None}]], {"a": {"b": ["c"]}}]
    async with worker.serving(echo) as asked:
        for value in values:
            got = await fleet.call("any", value)
            assert (got, type(got)) == (value, type(value))
        assert await fleet.call_many("any", values) == values
    assert asked == [CallRequest(handler="any", input=value) for value in values] * 2


async def test_a_model_goes_in_by_its_aliases_and_a_model_comes_out(mood: HandWorker, fleet: Client) -> None:
    def answer(request: CallRequest) -> dict[str, Any]:
        return {"outputs": ({"label": "good", "tags": ["a", "b"], "seen": "2021-02-03"},)}

    item = Item(text="fine", when=dt.date(2024, 5, 6), kind="short")
    async with mood.serving(answer) as asked:
        found = await fleet.call("mood", item, output=Mood)
        assert found == Mood(label="good", tags=("a", "b"), seen=dt.date(2021, 2, 3))
        assert await fleet.call_many("mood", [item, item], output=Mood) == [found, found]
    assert asked[0].input == {"text": "fine", "when": "2024-05-06", "class": "short"}


async def test_an_output_of_another_type_is_a_failure_that_does_not_repeat_it(
    worker: HandWorker, fleet: Client
) -> None:
    await worker.announce(model="any", tasks=["call"])
    async with worker.serving(echo):
        with pytest.raises(GenerationFailed, match="not of the type that was asked for: label") as caught:
            await fleet.call("any", {"label": 5, "note": "s3cret"}, output=Mood)
        assert "s3cret" not in str(caught.value)
        assert not caught.value.retryable
        good, bad = await fleet.call_many("any", [["1"], [1]], output=list[str], return_exceptions=True)
        assert good == ["1"]
        assert isinstance(bad, GenerationFailed)
        with pytest.raises(GenerationFailed):
            await fleet.call_many("any", [["1"], [1]], output=list[str])


async def test_of_parts_a_call_gives_the_last(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(model="any", tasks=["call"])
    async with worker.serving(lambda request: {"outputs": tuple(request.input)}):
        assert await fleet.call("any", [1, 2, 3]) == 3
        assert await fleet.call("any", []) is None


async def test_failures_of_single_inputs_take_their_places(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(model="any", tasks=["call"], handler=card({"type": "integer"}))

    def answer(request: CallRequest) -> dict[str, Any]:
        if request.input == 2:
            raise GenerationFailed("no twos")
        return echo(request)

    async with worker.serving(answer):
        found = await fleet.call_many("any", [1, 2, "three", {4}, 5], return_exceptions=True)
        assert (found[0], found[4]) == (1, 5)
        assert isinstance(found[1], GenerationFailed)
        assert isinstance(found[2], InvalidRequest)
        assert isinstance(found[3], InvalidRequest)
        with pytest.raises(GenerationFailed, match="no twos"):
            await fleet.call_many("any", [2])


async def test_a_key_used_twice_is_one_call(worker: HandWorker, fleet: Client) -> None:
    await worker.announce(model="any", tasks=["call"])
    async with worker.serving(echo) as asked:
        assert await fleet.call("any", 1, idempotency_key="k") == 1
        assert await fleet.call("any", 1, idempotency_key="k") == 1
        with pytest.raises(Conflict):
            await fleet.call("any", 2, idempotency_key="k")
    assert len(asked) == 1


# --- the door


async def test_an_unknown_handler_is_told_with_those_that_there_are(redis_url: str, mood: HandWorker) -> None:
    async with HandWorker(redis_url, name="w2") as other, HandWorker(redis_url, name="w3") as third:
        await other.announce(model="tone", tasks=["call"])
        await third.announce(model="smollm2")
        async with Client(redis_url, queue="q") as fleet:
            with pytest.raises(
                ModelNotFound, match="does not serve handler 'mod' but mood, tone: check"
            ) as caught:
                await fleet.call("mod", {"text": "a"})
            assert caught.value.known == ["mood", "tone"]
            # A model is no handler.
            with pytest.raises(ModelNotFound, match="'smollm2' but mood, tone"):
                await fleet.call("smollm2", {"text": "a"})


async def test_a_queue_without_handlers(worker: HandWorker, fleet: Client) -> None:
    with pytest.raises(Unsupported, match="does generate, not call"):
        await fleet.call("m", 1)


async def test_an_input_is_checked_before_it_is_queued(mood: HandWorker, fleet: Client) -> None:
    secret = "s3cret" * 10
    with pytest.raises(InvalidRequest, match="handler 'mood' takes no such input") as caught:
        await fleet.call("mood", {"text": secret, "when": 7, "class": [secret]})
    assert sorted(caught.value.problems) == [
        'input.class: the value is not of type "string"',
        "input.text: the value is longer than 10 characters",
        'input.when: the value is not of type "string", and the value is not of type "null"',
    ]
    assert "s3cret" not in str(caught.value)
    with pytest.raises(InvalidRequest, match='"text" is a required property'):
        await fleet.call_many("mood", [{"text": "a"}, {}])
    with pytest.raises(InvalidRequest):
        await fleet.call_stream("mood", 5).__aenter__()
    with pytest.raises(InvalidRequest):
        await fleet.run(CallRequest(handler="mood", input=[]))
    assert (await fleet.depth()).open == 0


async def test_while_a_handler_is_replaced_the_most_generous_worker_counts(
    redis_url: str, worker: HandWorker
) -> None:
    async with HandWorker(redis_url, name="w2") as newer, Client(redis_url, queue="q") as fleet:
        await worker.announce(model="h", tasks=["call"], handler=card({"type": "integer"}))
        await newer.announce(model="h", tasks=["call"], handler=card({"type": "string"}))
        assert (await fleet.submit(CallRequest(handler="h", input=1))).state == "queued"
        assert (await fleet.submit(CallRequest(handler="h", input="1"))).state == "queued"
        with pytest.raises(InvalidRequest):
            await fleet.submit(CallRequest(handler="h", input=[]))
        await newer.announce(model="h", tasks=["call"], handler=card())
        await fleet.models()  # reads the cards again
        assert (await fleet.submit(CallRequest(handler="h", input=[]))).state == "queued"


async def test_a_schema_is_never_trusted_longer_than_its_card(redis_url: str, worker: HandWorker) -> None:
    async with Client(redis_url, queue="q", card_life_s=3600) as fleet:
        await worker.announce(model="h", tasks=["call"], handler=card({"type": "integer"}))
        with pytest.raises(InvalidRequest):
            await fleet.submit(CallRequest(handler="h", input="1"))
        await worker.announce(model="h", tasks=["call"], handler=card({"type": "string"}))
        assert (await fleet.submit(CallRequest(handler="h", input="1"))).state == "queued"


@pytest.mark.parametrize(
    "value", [float("nan"), {1: 2}, {"a": {1}}, b"bytes", object(), [float("inf")], "\ud800"]
)
async def test_what_is_no_json_is_refused(worker: HandWorker, fleet: Client, value: Any) -> None:
    await worker.announce(model="any", tasks=["call"])
    with pytest.raises(InvalidRequest):
        await fleet.call("any", value)
    assert (await fleet.depth()).open == 0


async def test_a_model_without_a_form_in_json_is_refused(worker: HandWorker, fleet: Client) -> None:
    class Odd(BaseModel):
        value: Any

    class Number(BaseModel):
        value: float

    await worker.announce(model="any", tasks=["call"])
    odd = [Odd(value=value) for value in (object(), b"\xff", {"s3cret": lambda: 1})]
    for model in (*odd, Number(value=float("nan"))):
        with pytest.raises(InvalidRequest) as caught:
            await fleet.call("any", model, timeout=60)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("handler", ["", "h" * 201, None, 7])
async def test_a_handler_has_a_name(fleet: Client, handler: Any) -> None:
    with pytest.raises(InvalidRequest, match="handler: "):
        await fleet.call(handler, 1)


def test_the_blocking_client_calls_too(redis_url: str) -> None:
    def call() -> list[Any]:
        with blocking.Client(redis_url, "q") as fleet:
            one = fleet.call("any", {"label": "a"}, output=Mood)
            many = fleet.call_many("any", [1, None])
            with fleet.call_stream("any", [5]) as parts:
                return [one, *many, list(parts)]

    async def both() -> list[Any]:
        async with HandWorker(redis_url) as worker:
            await worker.announce(model="any", tasks=["call"])
            async with worker.serving(echo):
                return await asyncio.to_thread(call)

    assert asyncio.run(both()) == [Mood(label="a"), 1, None, [[5]]]
