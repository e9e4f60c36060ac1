"""Texts to an order, labels and decisions over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from eventually import eventually
from gateway_process import Gateway
from hand_worker import HandWorker
from hired import eventually_so
from streamfleet_producer import (
    Classification,
    ClassifyRequest,
    Client,
    DecideRequest,
    Decision,
    InvalidRequest,
    Label,
    Rank,
    RerankRequest,
    Usage,
)

TASKS = ("rerank", "classify", "decide")
YES = Decision(id="urgent", option="yes", probabilities={"yes": 0.75, "no": 0.25}, scores={"yes": 1, "no": 0})


def answer(request: Any) -> dict[str, Any]:
    """What the hand-played worker says."""
    about = {"model": "m", "revision": "7", "usage": Usage(prompt_tokens=5)}
    match request:
        case RerankRequest():
            if "fail" in request.documents:
                raise InvalidRequest("documents.0: told to fail")
            return {**about, "ranking": (Rank(index=1, score=0.5), Rank(index=0, score=0.25))}
        case ClassifyRequest():
            labels = (Label(label="good", score=0.75), Label(label="bad", score=0.25))
            return {**about, "classifications": (Classification(labels=labels),) * len(request.texts)}
        case _:
            return {**about, "answers": (YES,)}


async def test_answers_are_told_with_their_usage(hand: HandWorker, gateway: Gateway) -> None:
    await hand.announce(tasks=TASKS)
    async with httpx.AsyncClient(base_url=gateway.url) as http, hand.serving(answer) as asked:
        got = await http.post("/v1/rerank", json={"model": "m", "query": "far?", "documents": ["a", "b"]})
        assert got.status_code == 200, got.text
        said = got.json()
        assert said["results"] == [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]
        assert (said["model"], said["revision"], said["usage"]["prompt_tokens"]) == ("m", "7", 5)
        assert said["id"] == got.headers["x-request-id"]
        # The request can be asked for afterwards, as any other.
        state = (await http.get(f"/v1/requests/{said['id']}")).json()
        assert (state["state"], len(state["result"]["ranking"])) == ("done", 2)

        got = await http.post("/v1/classify", json={"model": "q", "texts": ["a", "b"], "top_k": 2})
        assert [one["label"] for one in got.json()["results"]] == ["good", "good"]
        assert got.json()["results"][0]["labels"][1] == {"label": "bad", "score": 0.25}

        questions = [{"id": "urgent", "criteria": "Is it?", "type": "yes_no"}]
        got = await http.post("/v1/decide", json={"state_json": {"a": [1]}, "questions": questions})
        assert got.json()["results"] == [YES.model_dump(mode="json")]
    rerank, classify, decide = asked
    assert (rerank.model, classify.model) == ("m", None)
    assert isinstance(decide, DecideRequest)
    assert decide.state_json == '{"a": [1]}'


async def test_what_is_wrong_is_named(hand: HandWorker, gateway: Gateway) -> None:
    await hand.announce(tasks=TASKS)
    async with httpx.AsyncClient(base_url=gateway.url) as http, hand.serving(answer):
        for path, body, problem in (
            ("rerank", {"query": "a", "documents": []}, "documents: "),
            ("rerank", {"query": " ", "documents": ["a"]}, "query is empty"),
            ("rerank", {"query": "a", "documents": ["a"], "top_k": 3}, "top_k: unknown field"),
            ("rerank", {"query": "a", "documents": ["a"], "kind": "embed"}, "kind: "),
            ("classify", {"texts": ["a", 7]}, "texts.1: "),
            ("decide", {"state": "a", "questions": [{"id": "x", "criteria": ""}]}, "questions.0"),
            ("rerank", {"query": "a", "documents": ["fail"]}, "documents.0: told to fail"),
        ):
            got = await http.post(f"/v1/{path}", json=body)
            assert got.status_code == 400, got.text
            assert any(one.startswith(problem) for one in got.json()["error"]["details"]["problems"]), (
                got.text
            )
        got = await http.post("/v1/rerank", json={"model": "?", "query": "a", "documents": ["a"]})
        assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found")


async def test_where_nobody_does_such_work_no_queue_is_said_to_do(
    redis_url: str, hand: HandWorker, gateway: Gateway
) -> None:
    async with (
        HandWorker(redis_url, queue="other") as second,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        for worker in (hand, second):
            await worker.announce(tasks=("embed",))
        got = await http.post("/v1/rerank", json={"query": "a", "documents": ["a"]})
        assert got.status_code == 400
        assert "no live worker does 'rerank'" in got.json()["error"]["message"]
        got = await http.post("/generate", json={"inputs": "a"})
        assert (got.status_code, "no queue generates here now" in got.json()["error"]) == (404, True)
        got = await http.post("/v1/embeddings", json={"input": "a"})
        assert "several queues would do" in got.json()["error"]["message"]


async def test_a_client_that_leaves_cancels_its_request(
    redis_url: str, hand: HandWorker, gateway: Gateway
) -> None:
    await hand.announce(tasks=TASKS)
    async with httpx.AsyncClient(base_url=gateway.url) as http, Client(redis_url, queue="q") as client:
        body = {"query": "a", "documents": ["a"]}
        asking = asyncio.create_task(http.post("/v1/rerank", json=body))
        [work] = await hand.take()
        asking.cancel()

        async def cancelled() -> bool:
            return (await client.status(work.rid)).state == "cancelled"

        await eventually_so(cancelled, "the cancellation")
        await eventually(lambda: gateway.services.metrics.open_requests == 0, "the end of the request")


async def test_a_key_is_free_again_once_its_request_was_given_up(
    redis_url: str, hand: HandWorker, gateway: Gateway
) -> None:
    await hand.announce(tasks=TASKS)
    asked: dict[str, Any] = {
        "json": {"query": "far?", "documents": ["a", "b"]},
        "headers": {"Idempotency-Key": "k"},
    }
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        Client(redis_url, queue="q") as client,
    ):
        asking = asyncio.create_task(http.post("/v1/rerank", **asked))
        await hand.take()
        asking.cancel()

        async def given_up() -> bool:
            return (await client.depth()).open == 0

        await eventually_so(given_up, "the cancellation")
        async with hand.serving(answer):
            got = await http.post("/v1/rerank", **asked)
    assert (got.status_code, len(got.json()["results"])) == (200, 2)
