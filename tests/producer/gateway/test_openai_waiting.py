"""Waiting, leaving and trying again, as the `openai` client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from eventually import eventually
from gated_engine import GatedEngine
from gateway_process import Gateway
from hand_worker import HandWorker, delta
from hired import Hired, eventually_so
from openai_client import client_of
from streamfleet_common.errors import GenerationFailed, TooLong
from streamfleet_producer import Client
from streamfleet_producer.gateway import openai_reading

USER = {"role": "user", "content": "ECHO 3"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


async def test_a_client_that_runs_out_of_time_gives_up_its_request_and_may_try_again(
    hand: HandWorker, gateway: Gateway
) -> None:
    async with client_of(gateway, timeout=0.3) as api:
        with pytest.raises(openai.APITimeoutError):
            await api.completions.create(model="q", prompt="a", extra_headers={"Idempotency-Key": "k"})
        async with Client(gateway.services.hub.url, queue="q") as fleet:

            async def given_up() -> bool:
                return (await fleet.depth()).open == 0

            await eventually_so(given_up, "the cancellation")
        # Under the same key it begins anew: there is no answer that could be given again.
        asking = asyncio.create_task(
            api.completions.create(model="q", prompt="a", timeout=10, extra_headers={"Idempotency-Key": "k"})
        )
        (work,) = await hand.take()
        await hand.finish(work, "yes")
        assert (await asking).choices[0].text == "yes"


async def test_the_client_s_own_retry_after_a_failure_is_a_new_attempt(
    hand: HandWorker, gateway: Gateway
) -> None:
    async with client_of(gateway, max_retries=1) as api:
        asked: Any = {"model": "q", "prompt": "a", "extra_headers": {"Idempotency-Key": "k"}}
        asking = asyncio.create_task(api.completions.create(**asked))
        (work,) = await hand.take()
        await hand.fail(work, GenerationFailed("for now", retryable=True))
        (again,) = await hand.take()
        assert again.rid != work.rid
        await hand.fail(again, GenerationFailed("for good", retryable=True))
        with pytest.raises(openai.InternalServerError, match="for good"):
            await asking
        # A failure is an answer, too: another call under the key is told the first one.
        with pytest.raises(openai.InternalServerError, match="for now"):
            await api.with_options(max_retries=0).completions.create(**asked)


async def test_of_several_prompts_the_key_is_free_again_once_one_of_them_was_given_up(
    hand: HandWorker, gateway: Gateway
) -> None:
    asked: Any = {"model": "q", "prompt": ["a", "b"], "extra_headers": {"Idempotency-Key": "k"}}
    async with client_of(gateway) as api, Client(gateway.services.hub.url, queue="q") as fleet:
        for _ in range(5):
            asking = asyncio.create_task(api.completions.create(**asked))
            (done,) = await hand.take()
            await hand.finish(done, "yes")
            (_,) = await hand.take()
            asking.cancel()

            async def given_up() -> bool:
                return (await fleet.depth()).open == 0

            await eventually_so(given_up, "the cancellation")
        asking = asyncio.create_task(api.completions.create(**asked))
        for _ in range(2):
            (work,) = await hand.take()
            await hand.finish(work, "yes")
        assert [choice.text for choice in (await asking).choices] == ["yes", "yes"]


async def test_the_keys_that_are_made_of_one_are_nobody_else_s(hired: Hired, api: AsyncOpenAI) -> None:
    for key, prompt in (("k", ["ECHO 1", "ECHO 2"]), ("k 1", "ECHO 3"), ("k 2", "ECHO 4")):
        asked: Any = {"model": "q", "prompt": prompt, "extra_headers": {"Idempotency-Key": key}}
        assert (await api.completions.create(**asked)).choices[0].text.startswith("tok0")


async def test_a_stream_that_is_left_is_cancelled(hired: Hired, api: AsyncOpenAI) -> None:
    stream = await api.completions.create(model="q", prompt="ECHO 1000 TICK 5", max_tokens=1000, stream=True)
    first = await anext(stream)
    rid = first.id.removeprefix("cmpl-q:")
    await stream.close()
    await eventually(lambda: rid in hired.engine.cancelled, "the cancellation")


async def test_a_stream_of_several_prompts_that_is_left_takes_all_of_them_along(
    hired: Hired, api: AsyncOpenAI
) -> None:
    prompts = [f"ECHO 1000 TICK 5 AS {word}" for word in ("a", "b", "c")]
    stream = await api.completions.create(model="q", prompt=prompts, max_tokens=1000, stream=True)
    seen = set[int]()
    while len(seen) < 3:
        seen.add((await anext(stream)).choices[0].index)
    assert len(_pumps()) == 3
    await stream.close()
    await eventually(lambda: sorted(hired.engine.cancelled) == sorted(hired.engine.added), "the cancellation")
    await eventually(lambda: not _pumps(), "the end of what read them")


async def test_one_prompt_that_fails_takes_the_others_along(hired: Hired, api: AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        await api.completions.create(model="q", prompt=["ECHO 1000 TICK 5", "RAISE@0"], max_tokens=1000)
    await eventually(lambda: len(hired.engine.cancelled) == 1, "the cancellation")


async def test_one_idempotency_key_gives_one_answer_streamed_or_not(hired: Hired, api: AsyncOpenAI) -> None:
    asked: Any = {"model": "q", "extra_headers": {"Idempotency-Key": "order 17"}}
    for prompt, texts in (("ECHO 3", ["tok0 tok1 tok2"]), (["ECHO 1", "ECHO 2"], ["tok0", "tok0 tok1"])):
        asked["extra_headers"] = {"Idempotency-Key": f"order {texts}"}
        ids = set()
        for _ in range(2):
            whole = await api.completions.create(**asked, prompt=prompt)
            streamed = dict.fromkeys(range(len(texts)), "")
            async for chunk in await api.completions.create(**asked, prompt=prompt, stream=True):
                ids.add(chunk.id)
                for choice in chunk.choices:
                    streamed[choice.index] += choice.text
            ids.add(whole.id)
            assert [choice.text for choice in whole.choices] == list(streamed.values()) == texts
        assert len(ids) == 1
    assert len(hired.engine.added) == 3
    with pytest.raises(openai.ConflictError):
        await api.completions.create(**asked, prompt=["ECHO 3", "ECHO 2"])


async def test_every_answer_bears_the_id_of_its_request(hired: Hired, api: AsyncOpenAI) -> None:
    raw = await api.completions.with_raw_response.create(model="q", prompt="ECHO 1")
    assert raw.parse().id == f"cmpl-{raw.headers['x-request-id']}"
    streamed = await api.completions.with_raw_response.create(model="q", prompt="ECHO 1", stream=True)
    chunks = [chunk async for chunk in streamed.parse()]
    assert chunks[0].id == f"cmpl-{streamed.headers['x-request-id']}"


async def test_who_waits_is_told_his_place_by_comments_that_clients_skip(
    redis_url: str, gateway: Gateway
) -> None:
    async with HandWorker(redis_url) as hand:
        await hand.announce(life_ms=1)  # known, and dead by now
        async with (
            client_of(gateway) as api,
            _raw(gateway, "ECHO 1") as first,
            _raw(gateway, "ECHO 2") as second,
        ):
            assert await anext(first) == ": queued position=1"
            assert await anext(second) == ": queued position=2"
            asking = asyncio.create_task(api.completions.create(model="q", prompt="ECHO 3", stream=True))
            hired = await Hired(redis_url, "w0", GatedEngine()).start()
            try:
                assert "".join([chunk.choices[0].text async for chunk in await asking]) == "tok0 tok1 tok2"
                rest = [line async for line in second if line.startswith("data: {")]
                assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest) == "tok0 tok1"
            finally:
                await hired.dismiss()


async def test_what_a_worker_refuses_has_a_status_though_it_was_to_stream(
    hand: HandWorker, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_reading, "FIRST_NEWS_S", 600.0)
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", {"model": "q", "prompt": "a"}, 400),
        ("/v1/completions", {"model": "q", "prompt": ["a", "b"]}, 400),
        ("/v1/chat/completions", {"model": "q", "messages": [USER]}, 400),
        ("/", {"inputs": "a"}, 422),
    ]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for path, body, status in asked:
            asking = asyncio.create_task(http.post(path, json={**body, "stream": True}))
            (work, *_) = await hand.take(2 if body.get("prompt") == ["a", "b"] else 1)
            await hand.fail(work, TooLong("too long", prompt_tokens=9, max_tokens=1, limit=5))
            got = await asking
            assert (got.status_code, got.headers["content-type"]) == (status, "application/json")


async def test_a_stream_whose_worker_is_long_silent_is_opened_all_the_same(
    hand: HandWorker, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_reading, "FIRST_NEWS_S", 0.01)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for path in ("/v1/completions", "/generate_stream"):
            body = {"model": "q", "prompt": "a", "stream": True} if "v1" in path else {"inputs": "a"}
            asking = asyncio.create_task(http.send(http.build_request("POST", path, json=body), stream=True))
            (work,) = await hand.take()
            response = await asking
            assert response.status_code == 200
            await hand.emit(work, delta("yes"))
            await hand.finish(work, "yes")
            assert '"yes"' in (await response.aread()).decode()


async def test_a_client_of_the_first_http_is_sent_no_chunks(hired: Hired, gateway: Gateway) -> None:
    body = b'{"model": "q", "prompt": "ECHO 3", "stream": %s}'
    for streams in (b"true", b"false"):
        told = body % streams
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(told)
        writer.write(head + told)
        async with asyncio.timeout(60):
            answer, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b"transfer-encoding" not in answer.lower()
        if streams == b"true":
            assert rest.startswith(b"data: {")
            assert rest.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(rest)["choices"][0]["text"] == "tok0 tok1 tok2"


async def test_a_queue_without_a_worker_is_503_where_nobody_is_to_wait(redis_url: str) -> None:
    async with HandWorker(redis_url) as hand, Gateway(redis_url, no_worker="refuse") as gateway:
        await hand.announce(life_ms=1)
        async with client_of(gateway) as api:
            with pytest.raises(openai.InternalServerError) as caught:
                await api.completions.create(model="q", prompt="a")
            assert (caught.value.status_code, caught.value.code) == (503, "no_worker")
            told = [model.model_dump() async for model in api.models.list()]
            assert [(model["id"], model["workers"]) for model in told] == [("q", 0)]


@asynccontextmanager
async def _raw(gateway: Gateway, prompt: str) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream that are not empty."""
    body = {"model": "q", "prompt": prompt, "stream": True}
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200

        async def lines() -> AsyncIterator[str]:
            async for line in response.aiter_lines():
                if line:
                    yield line

        yield lines()


def _pumps() -> list[asyncio.Task[Any]]:
    """What reads the prompts of one request side by side."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "prompt"]
