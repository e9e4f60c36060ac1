"""Errors of OpenAI's routes as the `openai` client raises them."""

from __future__ import annotations

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from gated_engine import GatedEngine
from gateway_process import Gateway
from hand_worker import HandWorker, delta
from hired import Hired
from openai_client import client_of
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, hash_of, new_key, new_tenant

USER = {"role": "user", "content": "ECHO 3"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
]


async def test_wrong_requests_by_their_classes(hired: Hired, api: AsyncOpenAI) -> None:
    async def refused(kind: type[openai.APIStatusError], **fields: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": "q", "messages": [USER], **fields}
        with pytest.raises(kind) as caught:
            await api.chat.completions.create(**asked)
        body: Any = caught.value.body
        assert caught.value.status_code == caught.value.response.status_code
        return dict(body)

    body = await refused(openai.BadRequestError, temperature=-1)
    assert (body["param"], body["type"], body["code"]) == (
        "temperature",
        "invalid_request_error",
        "invalid_request",
    )
    body = await refused(openai.BadRequestError, extra_body={"temprature": 1, "n": 0})
    assert {problem.partition(":")[0] for problem in body["details"]["problems"]} == {"temprature", "n"}
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    body = await refused(openai.BadRequestError, messages=[{"role": "user", "content": [image]}])
    assert (body["param"], body["code"]) == ("messages.0.content.0.type", "unsupported")
    body = await refused(openai.BadRequestError, max_tokens=5000)
    assert body["code"] == "context_length_exceeded"
    long = "a" * 200_001
    body = await refused(openai.BadRequestError, messages=[{"role": "user", "content": long}])
    assert (body["param"], "at most 200000 characters" in body["message"]) == ("messages.0.content", True)
    for path, field in (("/completions", "prompt"), ("/embeddings", "input")):
        with pytest.raises(openai.BadRequestError, match=f"{field}: .*at most 200000 characters"):
            await api.post(path, cast_to=object, body={"model": "q", field: long})
    body = await refused(openai.NotFoundError, model="none")
    assert body["code"] == "model_not_found"
    body = await refused(openai.NotFoundError, model="none", stream=True)
    assert body["code"] == "model_not_found"
    body = await refused(openai.InternalServerError, messages=[{"role": "user", "content": "RAISE@0"}])
    assert (body["code"], body["type"]) == ("generation_failed", "server_error")


async def test_an_error_amid_a_stream_is_its_last_chunk(hired: Hired, api: AsyncOpenAI) -> None:
    stream = await api.completions.create(model="q", prompt="ECHO 5 TICK 1 RAISE@3", stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts[:] = "".join(texts), chunk.choices[0].text

    with pytest.raises(openai.APIError, match="told to fail") as caught:
        await read()
    assert "".join(texts) == "tok0 tok1 tok2"
    assert (caught.value.code, caught.value.type) == ("generation_failed", "server_error")


async def test_a_new_attempt_that_differs_ends_the_stream_with_an_error_to_be_tried_again(
    hand: HandWorker, api: AsyncOpenAI
) -> None:
    asking = asyncio.create_task(api.completions.create(model="q", prompt="Hi", stream=True))
    (work,) = await hand.take()
    stream = await asking
    await hand.emit(work, delta("ab"))
    assert (await anext(stream)).choices[0].text == "ab"
    await hand.lose(work)
    (again,) = await hand.take()
    assert again.rid == work.rid
    await hand.emit(again, delta("xy"))
    with pytest.raises(openai.APIError, match="send the request again") as caught:
        await anext(stream)
    body: Any = caught.value.body
    assert body["details"]["retryable"] is True


async def test_a_full_queue_is_a_rate_limit_and_is_tried_again(redis_url: str, gateway: Gateway) -> None:
    engine = GatedEngine(is_open=False)
    hired = await Hired(redis_url, "w0", engine, max_queue_depth=1).start()
    try:
        async with client_of(gateway) as api, client_of(gateway, max_retries=4) as patient:
            held = await api.completions.create(model="q", prompt="ECHO 2", stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                await api.completions.create(model="q", prompt="ECHO 1")
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code == "queue_full"
            asking = asyncio.create_task(patient.completions.create(model="q", prompt="ECHO 1"))
            engine.is_open = True
            assert "".join([chunk.choices[0].text async for chunk in held]) == "tok0 tok1"
            assert (await asking).choices[0].text == "tok0"
    finally:
        await hired.dismiss()


async def test_a_deadline_that_passes_is_504(hand: HandWorker, api: AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await api.completions.create(model="q", prompt="a", extra_headers={"X-Request-Timeout": "0.05"})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")


async def test_keys(tmp_path: Path, redis_url: str, hired: Hired) -> None:
    file = tmp_path / "keys.json"
    key = new_key()
    entry = KeyEntry(sha256=hash_of(key), created=dt.date(2027, 1, 1))
    with KeyFile.edited(file) as tenants:
        tenants["ann"] = new_tenant().changed({"keys": (entry,)})
    async with Gateway(redis_url, keys_file=file) as gateway:
        async with client_of(gateway, api_key=key) as api:
            assert (await api.completions.create(model="q", prompt="ECHO 1")).choices[0].text == "tok0"
        async with client_of(gateway, api_key="sf-wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.completions.create(model="q", prompt="ECHO 1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/readyz", None),
        ("/v1/models", None),
        ("/v1/completions", {"model": "q", "prompt": "a"}),
        ("/generate", {"inputs": "a"}),
    ],
)
async def test_where_redis_is_is_not_for_clients(unused_port: int, path: str, body: Any) -> None:
    async with (
        Gateway(f"redis://user:s3cret@127.0.0.1:{unused_port}/0") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        # Whoever looks may not even have a key.
        told = await http.request("GET" if body is None else "POST", path, json=body)
        assert told.status_code == 503
        assert "unreachable" in told.text
        assert not [word for word in (str(unused_port), "127.0.0.1", "user") if word in told.text]
