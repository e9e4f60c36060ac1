"""A Redis that takes what it is sent and answers nothing: nobody waits for it longer than he said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway_process import Gateway
from hand_worker import HandWorker
from lossy_proxy import LossyProxy
from streamfleet_common import connections
from streamfleet_producer.gateway import directory, health, operation
from streamfleet_producer.gateway.directory import Directory
from streamfleet_producer.hub import Hub

SOON_S = 0.05
PATIENCE_S = 60.0
BODY = {"model": "q", "prompt": "x"}


@pytest.fixture
async def proxy(
    redis_url: str, hand: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LossyProxy]:
    """It does not end by itself what hangs, however long that is waited for here."""
    monkeypatch.setattr(connections, "COMMAND_TIMEOUT_S", 10 * PATIENCE_S)
    for module, name in ((operation, "LAST_LOOK_S"), (health, "PROBE_S"), (directory, "SLOW_S")):
        monkeypatch.setattr(module, name, SOON_S)
    async with LossyProxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def http(proxy: LossyProxy) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that knows its queues, and whose Redis hangs by now."""
    async with (
        Gateway(proxy.url, queue="q") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client,
    ):
        assert (await client.get("/v1/models")).json()["data"]
        proxy.is_mute = True
        yield client
        proxy.is_mute = False
        proxy.cut()


async def test_a_request_has_its_timeout(http: httpx.AsyncClient) -> None:
    asked: list[tuple[str, Any]] = [
        ("/v1/completions", BODY),
        ("/v1/completions", BODY | {"stream": True}),
        ("/v1/chat/completions", {"model": "q", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"model": "q", "input": "x"}),
        ("/v1/rerank", {"model": "q", "query": "x", "documents": ["y"]}),
        ("/v1/handlers/q", 1),
        ("/generate", {"inputs": "x"}),
    ]
    headers = {"X-Request-Timeout": str(SOON_S)}
    answers = await asyncio.gather(*(http.post(path, json=body, headers=headers) for path, body in asked))
    assert [answer.status_code for answer in answers] == [504] * len(asked)


async def test_a_probe_is_answered(http: httpx.AsyncClient) -> None:
    assert [(await http.get(path)).status_code for path in ("/readyz", "/health")] == [503, 503]


async def test_what_was_known_of_the_queues_goes_on(proxy: LossyProxy) -> None:
    hub = Hub(proxy.url)
    queues = Directory(hub, life_s=0.0)
    known = await queues.cards()
    assert [card.worker for card in known["q"]] != []
    proxy.is_mute = True
    for _ in range(2):  # the second one waits for the reading of the first, if at all
        assert await queues.cards() == known
    assert (await queues.find("q", "generate")).queue == "q"
    proxy.is_mute = False
    proxy.cut()
    await queues.close()
    await hub.close()
