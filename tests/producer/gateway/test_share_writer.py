"""What the key file says a tenant may take, counts in every queue."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired, eventually_so
from streamfleet_common.shares import Share
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, hash_of, new_tenant


@pytest.fixture
async def engine(redis_url: str) -> AsyncIterator[GatedEngine]:
    engine = GatedEngine(is_open=False)
    hired = await Hired(redis_url, "w", engine).start()
    yield engine
    await hired.dismiss()


def allow(path: Path, tenant: str, **limits: int) -> dict[str, str]:
    """Give a tenant a key of its own name; gives the header that brings it."""
    key = KeyEntry(sha256=hash_of(f"sf-{tenant}"), created=dt.date(2026, 1, 1))
    with KeyFile.edited(path) as tenants:
        tenants[tenant] = new_tenant().changed({"keys": (key,), **limits})
    return {"Authorization": f"Bearer sf-{tenant}"}


async def test_a_tenant_over_its_share_is_refused_and_no_other(
    redis_url: str, engine: GatedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    small = allow(path, "small", max_open_requests=1)
    large = allow(path, "large")
    body = {"model": "q", "prompt": "ECHO 3", "max_tokens": 3, "temperature": 0}
    async with (
        Gateway(redis_url, keys_file=path) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        broker = gateway.services.directory.broker("q")

        async def written() -> bool:
            return await broker.shares() == {"small": Share(max_open_requests=1)}

        async def open_two() -> bool:
            return [await broker.open_of(name) for name in ("small", "large")] == [
                (1, 5),
                (2, 10),
            ]  # ⌈6 characters / 4⌉ + 3

        await eventually_so(written, "the shares")
        first = asyncio.create_task(client.post("/v1/completions", json=body, headers=small))
        others = [
            asyncio.create_task(client.post("/v1/completions", json=body, headers=large)) for _ in range(2)
        ]
        await eventually_so(open_two, "three open requests")
        refused = await client.post("/v1/completions", json=body, headers=small)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.json()["error"]["details"]["reason"] == "tenant_requests"
        assert int(refused.headers["retry-after"]) >= 1
        engine.is_open = True
        for answered in (first, *others):
            assert (await answered).json()["choices"][0]["text"] == "tok0 tok1 tok2"
        assert (await client.post("/v1/completions", json=body, headers=small)).status_code == 200

        # A change counts without a restart, a tenant who is gone has no share any more, nor an answer.
        allow(path, "small", max_open_requests=7, tokens_per_day=9)
        with KeyFile.edited(path) as tenants:
            del tenants["large"]

        async def changed() -> bool:
            return await broker.shares() == {"small": Share(7, 0, 9)}

        await eventually_so(changed, "the new shares")
        assert (await client.post("/v1/completions", json=body, headers=large)).status_code == 401


async def test_without_keys_shares_are_left_to_others(redis_url: str, engine: GatedEngine) -> None:
    async with Gateway(redis_url) as gateway:
        broker = gateway.services.directory.broker("q")
        await broker.set_shares({"default": Share(5)})
        gateway.services.shares.start()
        await gateway.services.directory.cards()
        assert await broker.shares() == {"default": Share(5)}
