"""An event stream read by curl, cut at token 20 and taken up again: each token comes once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from command import environment
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired
from sse_reader import Sent, events_in
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client
from tiny_model import tiny_model

LIMIT_S = 60.0
CUT_AT = 20

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


async def curled(*arguments: str) -> AsyncGenerator[str]:
    """The lines that curl prints. It is killed when the reading ends."""
    curl = await asyncio.create_subprocess_exec("curl", "-sN", *arguments, stdout=asyncio.subprocess.PIPE)
    assert curl.stdout is not None
    try:
        async for line in curl.stdout:
            yield line.decode().rstrip("\r\n")
    finally:
        if curl.returncode is None:
            curl.kill()
        await curl.wait()


async def read(url: str, rid: str, after: str = "", tokens: int | None = None) -> list[Sent]:
    """The events behind one; after so many tokens curl is killed."""
    header = ["-H", f"Last-Event-ID: {after}"] if after else []
    seen: list[Sent] = []
    lines = curled(*header, f"{url}/v1/requests/{rid}/events")
    async with contextlib.aclosing(lines):
        async for event in events_in(lines, after):
            seen.append(event)
            if tokens is not None and len(token_ids(seen)) >= tokens:
                break
    return seen


async def submitted(url: str, queue: str, request: dict[str, Any]) -> str:
    body = json.dumps({"queue": queue, "stream": True, "request": request})
    said = [line async for line in curled("-d", body, f"{url}/v1/requests")]
    rid: str = json.loads("".join(said))["id"]
    return rid


def token_ids(events: list[Sent]) -> list[int]:
    return [token for event in events if event.name == "delta" for token in event.data["token_ids"]]


def check(events: list[Sent]) -> None:
    """These events, read in two parts, are the whole answer, and no token of it twice."""
    end = events[-1]
    assert (end.name, end.data["state"]) == ("end", "done")
    (choice,) = end.data["choices"]
    assert token_ids(events) == choice["token_ids"]
    texts = [text for event in events if event.name == "delta" for text in event.data["texts"]]
    assert "".join(texts) == choice["text"]
    assert [event.name for event in events if event.name not in ("delta", "queued")] == ["start", "end"]


async def test_a_stream_that_was_cut_goes_on(redis_url: str) -> None:
    hired = await Hired(redis_url, "w0", GatedEngine(tick_s=0.005)).start()
    try:
        async with asyncio.timeout(LIMIT_S), Gateway(redis_url) as gateway:
            rid = await submitted(gateway.url, "q", {"prompt": "ECHO 100", "max_tokens": 100})
            first = await read(gateway.url, rid, tokens=CUT_AT)
            rest = await read(gateway.url, rid, first[-1].last_id)
    finally:
        await hired.dismiss()
    assert CUT_AT <= len(token_ids(first)) < 100
    check(first + rest)


# --- with a real model, whose worker is killed


@contextmanager
def worker(url: str) -> Iterator[None]:
    settings = {
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": "tiny",
        "STREAMFLEET_ENGINE": "generation",
        "STREAMFLEET_MODEL": str(tiny_model("long")),
        "STREAMFLEET_MAX_SEQ_LEN": "1024",
        "STREAMFLEET_LEASE_S": "1.5",
        "STREAMFLEET_LOG_LEVEL": "warning",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "streamfleet_worker"], env=environment(**settings)
    ) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_worker_may_be_killed_in_between() -> None:
    request = {
        "prompt": "def value(self):",
        "max_tokens": 700,
        "ignore_eos": True,
        "sampling": {"temperature": 1.0},
    }
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedBroker()).url
        for _ in range(2):
            stack.enter_context(worker(url))
        async with Client(url, queue="tiny") as client, asyncio.timeout(2 * LIMIT_S):
            while len(await client.models()) < 2:  # noqa: ASYNC110 (other processes make it true)
                await asyncio.sleep(0.05)
            async with Gateway(url) as gateway:
                rid = await submitted(gateway.url, "tiny", request)
                first = await read(gateway.url, rid, tokens=CUT_AT)
                (start,) = [event.data for event in first if event.name == "start"]
                os.kill(int(start["worker"].split(":")[1]), signal.SIGKILL)
                rest = await read(gateway.url, rid, first[-1].last_id)
                async with httpx.AsyncClient(base_url=gateway.url) as http:
                    state = (await http.get(f"/v1/requests/{rid}")).json()
    assert CUT_AT <= len(token_ids(first)) < 700
    assert state["attempt"] == 2
    assert state["result"]["worker"] != start["worker"]
    assert state["result"]["exact"] == start["exact"] != ""
    # Not even a restart, since both promise the same bits; the ids go on in the second attempt's.
    check(first + rest)
    assert rest[-2].last_id.split("-")[0] > first[-1].last_id.split("-")[0]
