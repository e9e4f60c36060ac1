"""Requests by their ids: handed in, asked for, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway_process import Gateway
from hand_worker import HandWorker, delta
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import new_rid
from streamfleet_producer import CallRequest, Client, GenerateRequest

GENERATE = {"prompt": "hello", "max_tokens": 8}


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        yield http


async def submitted(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/requests", json={"queue": "q", "request": GENERATE, **fields})
    assert answer.status_code == 202, answer.text
    rid: str = answer.json()["id"]
    return rid


async def test_a_request_is_handed_in_asked_for_and_answered(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/requests", json={"model": "m", "request": GENERATE, "lane": "high"})
    assert answer.status_code == 202
    receipt = answer.json()
    assert receipt == {"id": receipt["id"], "state": "queued", "duplicate": False, "position": 1}
    assert answer.headers["location"] == f"/v1/requests/{receipt['id']}"
    assert answer.headers["x-request-id"] == receipt["id"]
    path = answer.headers["location"]
    state = (await http.get(path)).json()
    assert (state["state"], state["attempt"], state["result"]) == ("queued", 0, None)
    [work] = await hand.take()
    assert work.delivery.entry.stream == "high"
    assert receipt["id"] == f"q:{work.rid}"
    assert work.envelope.request.model == "m"
    asking = asyncio.create_task(http.get(path, params={"wait": "20"}))
    await hand.finish(work, "abc")
    ended = (await asking).json()
    assert (ended["state"], ended["attempt"], ended["worker"]) == ("done", 1, ended["worker"])
    assert ended["result"]["choices"][0]["text"] == "abc"
    assert ended["ended_at_ms"] >= ended["started_at_ms"] >= ended["accepted_at_ms"] > 0
    # The ids of OpenAI's routes are understood, too.
    for prefix in ("chatcmpl-", "cmpl-"):
        assert (await http.get(f"/v1/requests/{prefix}{receipt['id']}")).json() == ended


async def test_every_kind_of_request_goes_in(hand: HandWorker, http: httpx.AsyncClient) -> None:
    await hand.announce(tasks=("generate", "embed", "rerank", "classify", "decide"))
    kinds: list[dict[str, Any]] = [
        {"kind": "generate", "messages": [{"role": "user", "content": "hi"}]},
        {"kind": "embed", "texts": ["a", "b"]},
        {"kind": "rerank", "query": "a", "documents": ["b"]},
        {"kind": "classify", "texts": ["a"]},
        {
            "kind": "decide",
            "state_json": {"a": 1},
            "questions": [{"id": "x", "criteria": "?", "type": "yes_no"}],
        },
    ]
    for request in kinds:
        answer = await http.post("/v1/requests", json={"queue": "q", "request": request})
        assert answer.status_code == 202, answer.text
        [work] = await hand.take()
        assert work.envelope.request.kind == request["kind"]
    await hand.announce(model="spell", tasks=("call",))
    request = {"kind": "call", "handler": "spell", "input": [1, {"a": None}]}
    answer = await http.post("/v1/requests", json={"queue": "q", "request": request})
    assert answer.status_code == 202, answer.text
    [work] = await hand.take()
    assert isinstance(work.envelope.request, CallRequest)
    assert work.envelope.request.input == [1, {"a": None}]


async def test_what_is_said_of_a_request_reaches_it(hand: HandWorker, http: httpx.AsyncClient) -> None:
    fields = {"stream": True, "deadline_s": 30, "result_ttl_s": 5.5, "retry": {"attempts": 2}}
    await submitted(http, **fields, on_restart="fail")
    [work] = await hand.take()
    envelope = work.envelope
    assert (envelope.stream, envelope.deadline_ms, envelope.result_ttl_ms) == (True, 30_000, 5500)
    assert (envelope.retry.attempts, envelope.on_restart, envelope.tenant) == (2, "fail", "default")
    # A body counts more than a header.
    answer = await http.post(
        "/v1/requests",
        json={"queue": "q", "request": GENERATE, "retry": "never", "lane": "bulk"},
        headers={"X-Request-Timeout": "7", "X-Lane": "high"},
    )
    assert answer.status_code == 202
    [work] = await hand.take()
    assert (work.envelope.deadline_ms, work.envelope.lane) == (7000, "bulk")
    assert work.envelope.retry.attempts == 1


async def test_with_a_preference_the_answer_is_waited_for(hand: HandWorker, http: httpx.AsyncClient) -> None:
    async def answer() -> None:
        [work] = await hand.take()
        await hand.finish(work, "abc")

    answering = asyncio.create_task(answer())
    body = {"queue": "q", "request": GENERATE}
    got = await http.post("/v1/requests", json=body, headers={"Prefer": "respond-async, wait=20"})
    await answering
    assert (got.status_code, got.headers["preference-applied"]) == (200, "wait=20")
    assert got.json()["result"]["choices"][0]["text"] == "abc"
    got = await http.post("/v1/requests", json=body, headers={"Prefer": "wait=0"})
    assert got.status_code == 202
    got = await http.post("/v1/requests", json=body, headers={"Prefer": "wait=1"})
    assert (got.status_code, got.json()["state"]) == (202, "queued")


async def test_a_request_is_cancelled_once(hand: HandWorker, http: httpx.AsyncClient) -> None:
    rid = await submitted(http)
    for _ in range(2):
        answer = await http.delete(f"/v1/requests/{rid}")
        assert (answer.status_code, answer.json()) == (200, {"id": rid, "state": "cancelled"})
    state = (await http.get(f"/v1/requests/{rid}")).json()
    assert (state["state"], state["result"]["error"]["code"]) == ("cancelled", "cancelled")
    rid = await submitted(http)
    [work] = await hand.take()
    await hand.finish(work, "abc")
    assert (await http.delete(f"/v1/requests/{rid}")).json()["state"] == "done"


async def test_a_failure_is_a_result(hand: HandWorker, http: httpx.AsyncClient) -> None:
    rid = await submitted(http)
    [work] = await hand.take()
    await hand.fail(work, GenerationFailed("told to", retryable=True))
    answer = await http.get(f"/v1/requests/{rid}", params={"wait": 5})
    assert answer.status_code == 200
    state = answer.json()
    assert (state["state"], state["result"]["error"]["message"]) == ("failed", "told to")


async def test_an_idempotency_key_gives_the_same_request(hand: HandWorker, http: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "order 17"}
    body = {"queue": "q", "request": GENERATE}
    first, second = [(await http.post("/v1/requests", json=body, headers=key)).json() for _ in range(2)]
    assert (first["id"], second["duplicate"]) == (second["id"], True)
    other = {"queue": "q", "request": {**GENERATE, "max_tokens": 9}}
    answer = await http.post("/v1/requests", json=other, headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_foreign_unknown_and_malformed_ids_are_told_apart_by_nobody(
    redis_url: str, hand: HandWorker, http: httpx.AsyncClient
) -> None:
    async with Client(redis_url, queue="q", tenant="another") as other:
        foreign = (await other.submit(GenerateRequest(prompt="secret"), stream=True)).id
        ids = [f"q:{foreign}", f"q:{new_rid()}", f"nowhere:{new_rid()}", "x", "q:", f"q:{foreign}0"]
        ids += [f"q:{foreign.upper()}x", f"q:{new_rid()}%0A", f"{'q' * 65}:{new_rid()}", "%F0%9F%A6%86"]
        answers = [
            await ask(f"/v1/requests/{one}{rest}")
            for one in ids
            for ask, rest in ((http.get, ""), (http.get, "?wait=1"), (http.delete, ""), (http.get, "/events"))
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.content for answer in answers}) == 1
        assert answers[0].json()["error"]["code"] == "request_not_found"
        assert (await other.status(foreign)).state == "queued"  # and nothing became of it


async def test_only_the_queues_of_the_settings_are_reached(redis_url: str, hand: HandWorker) -> None:
    async with (
        Client(redis_url, queue="q") as client,
        Gateway(redis_url, gateway_queues=("other",)) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        ticket = await client.submit(GenerateRequest(prompt="x"))
        assert (await http.get(f"/v1/requests/q:{ticket.id}")).status_code == 404
        answer = await http.post("/v1/requests", json={"queue": "q", "request": GENERATE})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"request": {"prompt": ""}}, "request: prompt is empty"),
    ({"request": {"kind": "sing"}}, "request: "),
    ({"request": GENERATE, "queue": "q", "model": "m"}, "model: "),
    ({"request": GENERATE, "queue": "q", "deadline_s": 0}, "deadline_s: "),
    ({"request": GENERATE, "queue": "q", "lane": "fast"}, "lane: "),
    ({"request": GENERATE, "queue": "q", "n": 2}, "n: unknown field"),
    ({"request": {"prompt": "a", "max_tokens": 0, "stop": 7}}, "request.max_tokens: "),
    ({}, "request: "),
]


async def test_what_is_wrong_is_named(hand: HandWorker, http: httpx.AsyncClient) -> None:
    for body, problem in WRONG:
        answer = await http.post("/v1/requests", json=body)
        assert answer.status_code == 400, answer.text
        problems = answer.json()["error"]["details"]["problems"]
        assert any(one.startswith(problem) for one in problems), answer.text
    for wait in ("x", "-1", "301", "nan", "inf", "1e9", ""):
        answer = await http.get(f"/v1/requests/q:{new_rid()}", params={"wait": wait})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "wait")


async def test_a_full_queue_says_when_to_come_again(hand: HandWorker, http: httpx.AsyncClient) -> None:
    await hand.announce(max_queue_depth=1)
    await submitted(http)
    answer = await http.post("/v1/requests", json={"queue": "q", "request": GENERATE})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1


async def test_no_worker_is_waited_for_or_refused_as_the_settings_say(
    redis_url: str, hand: HandWorker, http: httpx.AsyncClient
) -> None:
    await hand.announce(life_ms=1)
    await submitted(http)
    async with (
        Gateway(redis_url, no_worker="refuse") as strict,
        httpx.AsyncClient(base_url=strict.url) as other,
    ):
        for where in ({"queue": "q"}, {"model": "q"}):
            answer = await other.post("/v1/requests", json={**where, "request": GENERATE})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert answer.headers["retry-after"] == "1"


async def test_a_deadline_is_a_gateway_timeout(hand: HandWorker, http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/completions", json={"model": "q", "prompt": "x"}, headers={"X-Request-Timeout": "0.2"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_log_of_a_stream_is_kept_for_who_reads_it(
    hand: HandWorker, http: httpx.AsyncClient
) -> None:
    rid = await submitted(http, stream=True)
    [work] = await hand.take()
    await hand.emit(work, delta("abc"))
    await hand.finish(work, "abc")
    text = (await http.get(f"/v1/requests/{rid}/events")).text
    assert [line for line in text.split("\n") if line.startswith(("id", "event"))] == [
        "id: 1-0",
        "event: start",
        "id: 1-1",
        "event: delta",
        "id: 2-1",
        "event: end",
    ]
