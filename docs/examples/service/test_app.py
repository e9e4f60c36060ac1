"""The service's tests: no Redis, no worker, no model, and no time that passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from app import TIMEOUT_S, service
from fastapi import FastAPI

from streamfleet_producer import ChatMessage, GenerationFailed
from streamfleet_producer.testing import ANYTHING, NEVER, Lost, ScriptedFleet, Wait

LONG = {"text": "A long text."}


@pytest.fixture
async def writer() -> AsyncIterator[ScriptedFleet]:
    async with ScriptedFleet() as fleet:
        yield fleet


@pytest.fixture
async def judge() -> AsyncIterator[ScriptedFleet]:
    async with ScriptedFleet(tasks=["classify"]) as fleet:
        yield fleet


@pytest.fixture
async def app(writer: ScriptedFleet, judge: ScriptedFleet) -> AsyncIterator[FastAPI]:
    app = service(writer.client, judge.client)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield http


class Caller:
    """A caller by hand: httpx shows a response when it is whole, and never hangs up."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.heard = ""
        self.told = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.calling = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        self.heard += message.get("body", b"").decode()
        if message.get("body"):
            self.told.set()

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


# --- answers


async def test_a_summary(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate("A long text.", "Short", ".")
    answer = await http.post("/summaries", json=LONG)
    assert answer.json() == {"summary": "Short.", "cut": False}
    (asked,) = writer.asked
    assert asked.request.kind == "generate"
    assert asked.request.messages is not None
    assert asked.request.messages[0] == ChatMessage(
        role="system", content="Sum the text up in two sentences."
    )
    assert asked.envelope.deadline_ms == TIMEOUT_S * 1000


async def test_a_summary_that_was_cut(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate(ANYTHING, *["word "] * 500)
    answer = (await http.post("/summaries", json=LONG)).json()
    assert answer["cut"]
    assert len(answer["summary"].split()) == 200


async def test_a_repeated_request_runs_once(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate(ANYTHING, "Short.")
    for _ in range(2):
        answer = await http.post("/summaries", json=LONG, headers={"Idempotency-Key": "k"})
        assert answer.json()["summary"] == "Short."
    assert len(writer.asked) == 1
    other = await http.post("/summaries", json={"text": "Another."}, headers={"Idempotency-Key": "k"})
    assert other.status_code == 409


async def test_a_stream(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate(ANYTHING, "Sho", Wait(2), "rt.")
    answer = await http.post("/summaries/stream", json=LONG)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == (
        'data: {"text": "Sho"}\n\ndata: {"text": "rt."}\n\n'
        'event: end\ndata: {"reason": "eos", "tokens": 2}\n\n'
    )


async def test_moods(judge: ScriptedFleet, http: httpx.AsyncClient) -> None:
    judge.on_classify(
        ANYTHING,
        lambda request: [
            {"good": 0.75, "bad": 0.25} if "!" in text else {"bad": 0.5} for text in request.texts
        ],
    )
    answer = await http.post("/moods", json={"texts": ["Yes!", "No."]})
    assert answer.json() == [{"mood": "good", "score": 0.75}, {"mood": "bad", "score": 0.5}]
    assert (await http.post("/moods", json={"texts": []})).json() == []
    assert (await http.post("/moods", json={"texts": [" "]})).status_code == 400


# --- what goes wrong


async def test_a_full_queue(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.refuse("requests", retry_after_s=2.5)
    for path in ("/summaries", "/summaries/stream"):
        answer = await http.post(path, json=LONG)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")
        assert answer.json()["error"]["code"] == "queue_full"


async def test_no_answer_in_time(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate(ANYTHING, "Sho", NEVER)
    assert (await http.post("/summaries", json=LONG)).status_code == 504
    streamed = (await http.post("/summaries/stream", json=LONG)).text
    assert streamed.startswith('data: {"text": "Sho"}\n\nevent: error\ndata: {"code": "deadline_exceeded"')
    assert [asked.state for asked in writer.asked] == ["expired", "expired"]


async def test_a_worker_that_fails(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.on_generate(ANYTHING, GenerationFailed("out of memory"))
    answer = await http.post("/summaries", json=LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "generation_failed")


@pytest.mark.parametrize(("again", "last"), [("Sho", "event: end"), ("Bre", "event: error")])
async def test_a_worker_that_is_lost(
    writer: ScriptedFleet, http: httpx.AsyncClient, again: str, last: str
) -> None:
    writer.on_generate(ANYTHING, "Sho", Lost(), again, "rt.")
    told = (await http.post("/summaries/stream", json=LONG)).text
    assert told.count('"Sho"') == 1
    assert told.strip().split("\n\n")[-1].startswith(last)


async def test_no_redis(writer: ScriptedFleet, http: httpx.AsyncClient) -> None:
    writer.go_down()
    assert (await http.post("/summaries", json=LONG)).status_code == 503


async def test_texts_that_cannot_be(http: httpx.AsyncClient, writer: ScriptedFleet) -> None:
    assert (await http.post("/summaries", json={"text": ""})).status_code == 422
    assert writer.asked == []


# --- callers who go


@pytest.mark.parametrize("path", ["/summaries", "/summaries/stream"])
async def test_who_hangs_up_is_not_worked_for(writer: ScriptedFleet, app: FastAPI, path: str) -> None:
    writer.time.jumps = False
    writer.on_generate(ANYTHING, "Sho", Wait(5), "rt.")
    caller = Caller(app, path, LONG)
    await writer.advance(1)
    (asked,) = writer.asked
    assert asked.state == "running"
    assert caller.heard == ("" if path == "/summaries" else 'data: {"text": "Sho"}\n\n')
    caller.hang_up()
    await caller.calling
    await writer.advance(0)
    assert writer.asked[0].state == "cancelled"
