"""OpenAI's files and batches, by its client: over a live worker, and with a real RQ worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from openai.types import Batch, FileObject

from command import environment, streamfleet
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired

LIMIT_S = 60.0


@pytest.fixture
async def gateway(redis_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    hired = await Hired(redis_url, "w", GatedEngine()).start()
    settings: dict[str, Any] = {"files_dir": tmp_path / "files", "max_file_bytes": 100_000}
    async with Gateway(redis_url, **settings) as running:
        yield running
    await hired.dismiss()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def lines(*prompts: str) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "q", "prompt": prompt, "temperature": 0, "max_tokens": 8},
            }
        ).encode()
        + b"\n"
        for number, prompt in enumerate(prompts)
    )


async def burst(redis_url: str, folder: Path) -> None:
    """An RQ worker that does what there is, and ends."""
    env = environment(STREAMFLEET_REDIS_URL=redis_url)
    command = ("bulk", "worker", "--folder", str(folder), "--burst")
    done = await asyncio.to_thread(streamfleet, *command, env=env, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr


async def test_a_file_comes_back_as_it_was(client: openai.AsyncOpenAI) -> None:
    content = lines("ECHO 1", "ECHO 2")
    made = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.filename, made.bytes, made.purpose) == ("in.jsonl", len(content), "batch")
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == content
    other = await client.files.create(file=("other.jsonl", b"{}\n"), purpose="batch")
    assert {file.id async for file in client.files.list()} == {made.id, other.id}
    assert [file.id async for file in client.files.list(limit=1, order="asc")][:1] in ([made.id], [other.id])
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.delete(made.id)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("x", b"x"), purpose="assistants")


async def test_a_file_expires_when_it_is_told_to_but_not_under_a_batch(client: openai.AsyncOpenAI) -> None:
    async def create(seconds: int) -> FileObject:
        return await client.files.create(
            file=("in.jsonl", lines("ECHO 2")),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": seconds},
        )

    made = await create(3600)
    assert made.expires_at == made.created_at + 3600
    batch = await client.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert batch.expires_at is not None
    held = await client.files.retrieve(made.id)
    assert held.expires_at is not None
    assert held.expires_at > batch.expires_at
    for seconds in (3599, 2_592_001):
        with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\]: 3600 to 2592000"):
            await create(seconds)


async def test_what_is_no_upload_is_refused(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for body in (
            {"content": b"", "headers": {}},
            {"json": {"purpose": "batch"}},
            {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
            {"content": b"torn", "headers": {"content-type": "multipart/form-data; boundary=x"}},
            {"data": {"purpose": "batch"}, "files": {"other": b"x"}},
            {"data": {"purpose": "batch", "file": "text"}},
            {"data": {"purpose": "batch", "expires": "3600"}, "files": {"file": b"x"}},
            {"data": {"purpose": "batch", "expires_after[seconds]": "3600"}, "files": {"file": b"x"}},
            {"data": {"purpose": "batch", "expires_after[anchor]": "created_at"}, "files": {"file": b"x"}},
        ):
            answer = await client.post("/v1/files", **body)
            assert answer.status_code == 400, (body, answer.text)
        large = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * 100_001})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        endless = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x" * 1_000_000})
        assert endless.status_code == 413
    store = gateway.services.files
    assert store is not None
    assert store.total_bytes() == 0


async def test_a_batch_is_answered(
    redis_url: str, gateway: Gateway, client: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    source = await client.files.create(
        file=("in.jsonl", lines("ECHO 2", "RAISE@0", "ECHO 3")), purpose="batch"
    )
    made = await client.batches.create(
        input_file_id=source.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"order": "17"},
    )
    assert (made.status, made.input_file_id, made.endpoint) == ("validating", source.id, "/v1/completions")
    assert (made.output_file_id, made.error_file_id, made.metadata) == (None, None, {"order": "17"})
    assert made.request_counts is not None
    assert made.request_counts.total == 3

    await burst(redis_url, tmp_path / "files")

    done = await client.batches.retrieve(made.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    assert done.output_file_id is not None
    assert done.error_file_id is not None
    output = [
        json.loads(line) for line in (await client.files.content(done.output_file_id)).text.splitlines()
    ]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in output}
    assert texts == {"line-0": "tok0 tok1", "line-2": "tok0 tok1 tok2"}
    errors = [json.loads(line) for line in (await client.files.content(done.error_file_id)).text.splitlines()]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("line-1", 500)]
    assert [batch.id async for batch in client.batches.list()] == [made.id]


async def test_a_batch_that_nobody_took_is_cancelled_at_once(client: openai.AsyncOpenAI) -> None:
    source = await client.files.create(file=("in.jsonl", lines("ECHO 2")), purpose="batch")
    made = await client.batches.create(
        input_file_id=source.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert (await client.batches.cancel(made.id)).status == "cancelled"


async def test_a_batch_that_is_asked_for_twice_under_a_key_is_one(
    redis_url: str, client: openai.AsyncOpenAI
) -> None:
    source = await client.files.create(file=("in.jsonl", lines("ECHO 2")), purpose="batch")
    other = await client.files.create(file=("other.jsonl", lines("ECHO 2")), purpose="batch")

    async def create(key: str, file: str = source.id, **about: str) -> Batch:
        return await client.batches.create(
            input_file_id=file,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata=about,
            extra_headers={"Idempotency-Key": key},
        )

    first = await create("k", order="17")
    names = {file.id async for file in client.files.list()}
    assert await create("k", order="17") == first
    assert (await create("l", order="17")).id != first.id
    with pytest.raises(openai.ConflictError):
        await create("k", other.id, order="17")
    with pytest.raises(openai.ConflictError):
        await create("k", order="18")
    await client.files.delete(source.id)
    assert await create("k", order="17") == first
    assert len({file.id async for file in client.files.list()} - names) == 2  # what "l" writes
    with redis.Redis.from_url(redis_url) as raw:
        assert raw.llen("rq:queue:streamfleet-bulk") == 2


async def test_what_is_no_batch_is_refused_and_leaves_no_files(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    good = await client.files.create(file=("in.jsonl", lines("ECHO 2")), purpose="batch")
    bad = await client.files.create(file=("bad.jsonl", b"[1]\n"), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(
            input_file_id="file-" + "0" * 32, endpoint="/v1/completions", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="first line"):
        await client.batches.create(input_file_id=bad.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id=good.id, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve("batch_" + "0" * 32)
    assert {file.id async for file in client.files.list()} == {good.id, bad.id}


@pytest.mark.parametrize("limit", ["0", "-1", "x", "10001", "9" * 5000])
async def test_a_page_has_bounds(gateway: Gateway, limit: str) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/v1/files", "/v1/batches"):
            answer = await client.get(path, params={"limit": limit})
            assert answer.status_code == 400
            assert "limit: 1 to" in answer.json()["error"]["message"]


async def test_a_gateway_without_a_folder_says_so(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for path in ("/v1/files", "/v1/batches"):
            answer = await client.get(path)
            assert answer.status_code == 404
            assert "--files-dir" in answer.json()["error"]["message"]
