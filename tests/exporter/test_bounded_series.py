"""Whatever names and ids clients make up, no series comes of them: at exporter, gateway or worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
from prometheus_client import generate_latest

from exporter_page import Exporter, samples_of
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired
from streamfleet_common.broker import Broker
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer.client import Client

AT_ONCE = 16


class Pages:
    """A worker, a gateway and an exporter, and clients of them that talk nonsense."""

    def __init__(self, url: str, hired: Hired, gateway: Gateway, exporter: Exporter) -> None:
        self._url = url
        self._hired = hired
        self._gateway = gateway
        self._exporter = exporter

    async def series(self) -> dict[str, set[object]]:
        """The series of each page."""
        async with httpx.AsyncClient(base_url=self._gateway.url) as http:
            gateway = (await http.get("/metrics")).text
        worker = generate_latest(self._hired.worker.metrics.registry).decode()
        pages = {"exporter": await self._exporter.page(), "gateway": gateway, "worker": worker}
        return {name: set(samples_of(text)) for name, text in pages.items()}

    async def junk(self, first: int, count: int) -> None:
        """Come `count` times with names and ids that there are not; each time with others."""
        limit = asyncio.Semaphore(AT_ONCE)
        async with (
            httpx.AsyncClient(base_url=self._gateway.url, timeout=60) as http,
            Client(self._url, "q") as fleet,
        ):

            async def one(number: int) -> None:
                async with limit:
                    await _over_http(http, f"junk-{number}")
                    await _as_a_client(self._url, fleet, f"junk-{number}")

            await asyncio.gather(*(one(number) for number in range(first, first + count)))


async def _over_http(http: httpx.AsyncClient, name: str) -> None:
    body = {"model": name, "prompt": "a", "max_tokens": 2}
    refused = [
        await http.post("/v1/completions", json=body),
        await http.post(
            "/v1/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "a"}]}
        ),
        await http.post("/v1/embeddings", json={"model": name, "input": "a"}),
        await http.get(f"/v1/models/{name}"),
        await http.get(f"/v1/requests/{name}"),
        await http.delete(f"/v1/requests/{name}"),
        await http.get(f"/v1/batches/{name}"),
        await http.get(f"/{name}/{name}"),
        await http.request("PUT", f"/v1/requests/{name}"),
    ]
    assert all(400 <= answer.status_code < 500 for answer in refused), [one.status_code for one in refused]
    headers = {"x-request-id": name, "user-agent": name, "authorization": f"Bearer {name}", "x-tenant": name}
    served = await http.post("/v1/completions", json={**body, "model": "q", "user": name}, headers=headers)
    assert served.status_code == 200, served.text


async def _as_a_client(url: str, fleet: Client, name: str) -> None:
    answer = await fleet.run(GenerateRequest(prompt="a", max_tokens=2), idempotency_key=name)
    assert answer.text == "a"
    async with Client(url, "q", tenant=name) as stranger:
        await stranger.run(GenerateRequest(prompt="a", max_tokens=2))
    with pytest.raises(StreamfleetError):
        await fleet.run(GenerateRequest(prompt="a", max_tokens=2, model=name))
    with pytest.raises(StreamfleetError):
        await fleet.result("00" + name.encode().hex().rjust(32, "0")[-32:])
    async with Client(url, name) as nowhere:
        with pytest.raises(StreamfleetError):
            await nowhere.run(GenerateRequest(prompt="a", max_tokens=2))


@pytest.fixture
async def pages(redis_url: str) -> AsyncIterator[Pages]:
    hired = await Hired(redis_url, "w0", GatedEngine()).start()
    await Broker(hired.connections, "q").sweep()  # before the first one there is no time since the last
    async with Gateway(redis_url) as gateway, Exporter(redis_url) as exporter:
        yield Pages(redis_url, hired, gateway, exporter)
    with suppress(StreamfleetError):
        await hired.dismiss()


@pytest.mark.parametrize(
    "count", [16, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_no_client_makes_a_series(pages: Pages, count: int) -> None:
    # A route has a series for each status once it was answered with that, /metrics too.
    await pages.series()
    await pages.junk(0, 1)
    before = await pages.series()
    assert all(before.values())

    await pages.junk(1, count)

    after = await pages.series()
    assert {name: len(found) for name, found in after.items()} == {
        name: len(found) for name, found in before.items()
    }
    assert after == before
    assert "junk" not in str(after)
