"""Handlers over HTTP: outputs, and parts as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway_process import Gateway
from hand_worker import HandWorker
from hired import eventually_so
from sse_reader import sent_events
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.one_shot import HandlerCard
from streamfleet_producer import CallRequest, Client, Parts

EVENTS = {"Accept": "text/event-stream"}
SCHEMA = '{"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}'


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        yield http


@pytest.fixture
async def spell(hand: HandWorker) -> HandWorker:
    await hand.announce(model="spell", tasks=("call",))
    return hand


async def test_any_json_goes_in_and_comes_out(spell: HandWorker, http: httpx.AsyncClient) -> None:
    values: list[Any] = [None, True, 7, 0.5, "a\n\u2028", [], {"a": [1, {"b": None}]}, 2**63 - 1]
    async with spell.serving(lambda request: {"outputs": (request.input,)}):
        for value in values:
            for name in ("spell", "q"):  # the handler's name, and the queue's
                got = await http.post(f"/v1/handlers/{name}", content=json.dumps(value))
                assert (got.status_code, got.json()) == (200, value), got.text
                assert got.headers["x-request-id"].startswith("q:")


async def test_parts_come_as_they_are_made(spell: HandWorker, http: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/v1/handlers/spell", json="ab", headers=EVENTS) as response:
        [work] = await spell.take()
        assert response.headers["x-request-id"] == f"q:{work.rid}"
        events = sent_events(response)
        assert (await anext(events)).name == "start"
        await spell.emit(work, Parts(values=("a",)))
        event = await anext(events)
        assert (event.name, event.data["values"], event.last_id) == ("parts", ["a"], "1-1")
        await spell.emit(work, Parts(values=("b", {"c": 1})))
        await spell.answer(work, outputs=("a", "b", {"c": 1}))
        rest = [event async for event in events]
    assert [event.name for event in rest] == ["parts", "end"]
    assert rest[1].data["outputs"] == ["a", "b", {"c": 1}]
    # The same request, read behind its first part.
    again = await http.get(f"/v1/requests/q:{work.rid}/events", headers={"Last-Event-ID": event.last_id})
    assert [one async for one in sent_events(again, event.last_id)] == rest


async def test_an_output_in_one_piece_is_one_part(spell: HandWorker, http: httpx.AsyncClient) -> None:
    async with spell.serving(lambda request: {"outputs": ({"text": "x"},)}):
        got = await http.post("/v1/handlers/spell", json="ab", headers=EVENTS)
    events = [event async for event in sent_events(got)]
    assert [(event.name, event.last_id) for event in events] == [
        ("start", "1-0"),
        ("parts", "2-1.1"),
        ("end", "2-1"),
    ]


async def test_who_leaves_a_call_cancels_it(
    redis_url: str, spell: HandWorker, http: httpx.AsyncClient
) -> None:
    async with Client(redis_url, queue="q") as client:
        for headers in ({}, EVENTS):
            asking = asyncio.create_task(http.post("/v1/handlers/spell", json=1, headers=headers))
            [work] = await spell.take()
            if headers:
                await spell.emit(work, Parts(values=(1,)))
            asking.cancel()

            async def cancelled(rid: str = work.rid) -> bool:
                return (await client.status(rid)).state == "cancelled"

            await eventually_so(cancelled, "the cancellation")


async def test_a_key_is_free_again_once_its_call_was_given_up(
    redis_url: str, spell: HandWorker, http: httpx.AsyncClient
) -> None:
    async with Client(redis_url, queue="q") as client:
        for place, headers in enumerate(({}, EVENTS)):
            asked: dict[str, Any] = {"json": 1, "headers": {**headers, "Idempotency-Key": f"k{place}"}}
            asking = asyncio.create_task(http.post("/v1/handlers/spell", **asked))
            await spell.take()
            asking.cancel()

            async def given_up() -> bool:
                return (await client.depth()).open == 0

            await eventually_so(given_up, "the cancellation")
            asking = asyncio.create_task(http.post("/v1/handlers/spell", **asked))
            [work] = await spell.take()
            await spell.answer(work, outputs=("yes",))
            assert '"yes"' in (await asking).text


async def test_what_is_wrong_is_told_before_a_stream_begins(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    card = HandlerCard(input_schema=SCHEMA)
    await hand.announce(model="spell", tasks=("call",), handler=card, max_request_bytes=3000)
    for headers in ({}, EVENTS):
        for content, status, code in (
            (b'{"text": 7}', 400, "invalid_request"),
            (b"{", 400, "invalid_request"),
            (b"", 400, "invalid_request"),
            (b'{"text": NaN}', 400, "invalid_request"),
            (b"[" * 500 + b"]" * 500, 400, "invalid_request"),
            (b'{"text": "a", "more": %d}' % 2**70, 400, "invalid_request"),
            (b'{"text": "a", "more": 1e400}', 400, "invalid_request"),
            (b'{"text": "\\ud800"}', 400, "invalid_request"),
            (b"\xff", 400, "invalid_request"),
            (b'"' + b"x" * 2**20 + b'"', 413, "too_large"),
        ):
            got = await http.post("/v1/handlers/spell", content=content, headers=headers)
            assert (got.status_code, got.json()["error"]["code"]) == (status, code), (content[:30], got.text)
        got = await http.post("/v1/handlers/spell", json={"text": "x" * 3000}, headers=headers)
        assert (got.status_code, got.json()["error"]["code"]) == (413, "too_large")
        got = await http.post("/v1/handlers/nobody", json=1, headers=headers)
        assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_failure_has_a_status_or_is_the_end_of_the_stream(
    spell: HandWorker, http: httpx.AsyncClient
) -> None:
    def fail(request: CallRequest) -> dict[str, Any]:
        raise GenerationFailed("told to")

    async with spell.serving(fail):
        got = await http.post("/v1/handlers/spell", json=1)
        assert (got.status_code, got.json()["error"]["message"]) == (500, "told to")
        got = await http.post("/v1/handlers/spell", json=1, headers=EVENTS)
        assert got.status_code == 200
        *_, last = [event async for event in sent_events(got)]
        assert (last.name, last.data["state"], last.data["error"]["message"]) == ("end", "failed", "told to")


async def test_a_call_waits_for_a_worker_where_none_lives(hand: HandWorker, http: httpx.AsyncClient) -> None:
    await hand.announce(model="q", tasks=("call",), life_ms=1)  # known, and dead by now
    for headers in ({}, EVENTS):
        asking = asyncio.create_task(http.post("/v1/handlers/q", json=1, headers=headers))
        [work] = await hand.take()
        await hand.answer(work, outputs=("yes",))
        got = await asking
        assert got.status_code == 200, got.text
        assert '"yes"' in got.text
