"""A stream of events over HTTP, cut and taken up again with the id of the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway_process import Gateway
from hand_worker import HandWorker, Work, delta
from hired import Hired, eventually_so
from sse_reader import Sent, sent_events, text_of
from streamfleet_common.errors import GenerationFailed
from streamfleet_producer import Client

GENERATE = {"prompt": "ECHO 30", "max_tokens": 100}


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        yield http


async def submitted(http: httpx.AsyncClient, **request: Any) -> str:
    body = {"queue": "q", "stream": True, "request": {**GENERATE, **request}}
    answer = await http.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    rid: str = answer.json()["id"]
    return rid


async def begun(http: httpx.AsyncClient, hand: HandWorker) -> tuple[str, Work]:
    rid = await submitted(http)
    [work] = await hand.take()
    return rid, work


@asynccontextmanager
async def reading(
    http: httpx.AsyncClient, rid: str, after: str = "", **params: str
) -> AsyncIterator[AsyncIterator[Sent]]:
    headers: Mapping[str, str] = {"Last-Event-ID": after} if after else {}
    async with http.stream("GET", f"/v1/requests/{rid}/events", headers=headers, params=params) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield sent_events(response, after)


async def read(http: httpx.AsyncClient, rid: str, after: str = "", **params: str) -> list[Sent]:
    async with reading(http, rid, after, **params) as events:
        return [event async for event in events]


async def test_a_stream_is_read_whole_and_from_every_event_on(hired: Hired, http: httpx.AsyncClient) -> None:
    rid = await submitted(http)
    events = await read(http, rid)
    # What comes faster than it is sent comes together.
    assert [event.name for event in events] == ["start", *["delta"] * (len(events) - 2), "end"]
    assert [event.data["type"] for event in events] == [event.name for event in events]
    whole = " ".join(f"tok{number}" for number in range(30))
    assert text_of(events) == whole == events[-1].data["choices"][0]["text"]
    for number, event in enumerate(events[:-1]):
        assert await read(http, rid, event.last_id) == events[number + 1 :]
    assert await read(http, rid, last_event_id=events[1].last_id) == events[2:]
    # Behind the end nothing comes, and a browser does not ask again.
    answer = await http.get(f"/v1/requests/{rid}/events", headers={"Last-Event-ID": events[-1].last_id})
    assert (answer.status_code, answer.content) == (204, b"")


async def test_whoever_leaves_a_stream_that_he_attached_to_cancels_nothing(
    hired: Hired, http: httpx.AsyncClient
) -> None:
    hired.engine.is_open, hired.engine.allowed = False, 20
    rid = await submitted(http)
    seen: list[Sent] = []
    async with reading(http, rid) as events:
        while "tok9 " not in text_of(seen):
            seen.append(await anext(events))
    hired.engine.is_open = True
    rest = await read(http, rid, seen[-1].last_id)
    assert text_of(seen + rest) == " ".join(f"tok{number}" for number in range(30))
    assert rest[-1].data["state"] == "done"


@pytest.mark.parametrize("exact", ["kind", ""])
async def test_the_worker_may_be_lost_meanwhile(
    hand: HandWorker, http: httpx.AsyncClient, exact: str
) -> None:
    hand.start = hand.start.model_copy(update={"exact": exact})
    rid, work = await begun(http, hand)
    await hand.emit(work, delta("ab"))
    async with reading(http, rid) as events:
        seen = [await anext(events) for _ in range(2)]
    await hand.lose(work)
    [again] = await hand.take()
    await hand.emit(again, delta("abc"))
    async with reading(http, rid, seen[-1].last_id) as events:
        if exact:
            event = await anext(events)
            assert (event.name, event.data["texts"]) == ("delta", ["c"])
            assert event.last_id.startswith(f"{again.delivery.epoch}-")
        else:
            names = [(await anext(events)).name for _ in range(3)]
            assert names == ["restart", "start", "delta"]
        await hand.finish(again, "abc", exact=exact)
        assert (await anext(events)).name == "end"


async def test_when_the_log_is_gone_the_record_tells_the_rest(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    rid, work = await begun(http, hand)
    await hand.emit(work, delta("ab"))
    await hand.emit(work, delta("c", 2))
    await hand.finish(work, "abc")
    # Redis may have lost what bore this id: only before there is an end it is known to be none.
    assert [event.name for event in await read(http, rid, "1-9999")] == ["restart", "delta", "end"]
    await hand.redis.delete(hand.broker.keys.log(work.rid))
    rest = await read(http, rid, "1-1")
    assert [event.name for event in rest] == ["restart", "delta", "end"]
    assert text_of(rest) == "abc"
    assert [event.name for event in await read(http, rid, "1-2")] == ["end"]


async def test_nonsense_and_the_future_are_refused(hand: HandWorker, http: httpx.AsyncClient) -> None:
    rid, work = await begun(http, hand)
    await hand.emit(work, delta("ab"))
    for after in ("x", "0", "0-0", "1", "1-2", "9-0", "1-1.1", "-1", "1e3-2"):
        answer = await http.get(f"/v1/requests/{rid}/events", headers={"Last-Event-ID": after})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


async def test_a_failure_is_an_end_that_says_why(hand: HandWorker, http: httpx.AsyncClient) -> None:
    rid, work = await begun(http, hand)
    await hand.emit(work, delta("ab"))
    await hand.fail(work, GenerationFailed("told to"))
    for after in ("", "1-1"):
        *_, last = await read(http, rid, after)
        assert (last.name, last.data["error"]["message"], last.last_id) == ("end", "told to", "2-1")


async def test_what_was_lost_for_good_is_an_error(hand: HandWorker, http: httpx.AsyncClient) -> None:
    rid, work = await begun(http, hand)
    async with reading(http, rid) as events:
        await anext(events)
        await hand.redis.delete(hand.broker.keys.record(work.rid), hand.broker.keys.log(work.rid))
        await hand.cut_subscribers()  # so that the record is asked, as after a silence
        last = await anext(events)
    assert (last.name, last.data["error"]["code"]) == ("error", "incomplete_generation")


async def test_a_request_that_did_not_stream_is_told_in_one_delta(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    body = {"queue": "q", "request": {"prompt": "x"}}
    rid = (await http.post("/v1/requests", json=body)).json()["id"]
    [work] = await hand.take()
    await hand.finish(work, "abc")
    events = await read(http, rid)
    assert [(event.name, event.last_id) for event in events] == [("delta", "2-1.1"), ("end", "2-1")]
    assert await read(http, rid, "2-1.1") == events[1:]


async def test_whoever_waits_is_told_his_place_when_it_changes(
    redis_url: str, hand: HandWorker, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    gateway.services.lines.life_s = 0.05
    _, second, third = [await submitted(http) for _ in range(3)]
    async with reading(http, third) as events:
        event = await anext(events)
        assert (event.name, event.data, event.last_id) == ("queued", {"type": "queued", "position": 3}, "")
        await http.delete(f"/v1/requests/{second}")
        assert (await anext(events)).data["position"] == 2
        await hand.take(2)
        assert (await anext(events)).name == "start"


async def test_readers_leave_nothing_behind(
    redis_url: str, hand: HandWorker, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    rid, work = await begun(http, hand)
    async with Client(redis_url, queue="q") as client:
        for _ in range(5):
            async with reading(http, rid) as events:
                await anext(events)

        async def left() -> bool:
            return not any(work.rid.encode() in channel for channel in await hand.channels())

        await eventually_so(left, "the end of the subscriptions")
        await asyncio.sleep(0)
        assert (await client.status(work.rid)).state == "running"
