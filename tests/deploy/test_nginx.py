"""A gateway behind the proxy of the configuration: streams are not gathered, and who leaves has left."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway_process import Gateway
from hand_worker import HandWorker, delta
from hired import eventually_so
from streamfleet_producer import Client

TEXT = (Path(__file__).parents[2] / "deploy" / "nginx.conf").read_text()
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture
async def url(gateway: Gateway, tmp_path: Path) -> AsyncIterator[str]:
    """Where the proxy before the gateway listens."""
    assert NGINX is not None
    assert "listen 80;" in TEXT
    assert "server 127.0.0.1:8000;" in TEXT
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    included = TEXT.replace("listen 80;", f"listen 127.0.0.1:{port};")
    included = included.replace("127.0.0.1:8000", gateway.url.removeprefix("http://"))
    (tmp_path / "included.conf").write_text(included)
    folders = "".join(
        f"{kind}_temp_path {tmp_path / kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {tmp_path / 'pid'};\nerror_log stderr warn;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{folders}include {tmp_path / 'included.conf'};\n}}\n"
    )
    command = [NGINX, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    proxy = await asyncio.create_subprocess_exec(*command)
    try:

        async def listens() -> bool:
            assert proxy.returncode is None
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return False
            writer.close()
            return True

        await eventually_so(listens, "the proxy's start")
        yield f"http://127.0.0.1:{port}"
    finally:
        if proxy.returncode is None:
            proxy.kill()
        await proxy.wait()


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with Gateway(redis_url) as gateway:
        yield gateway


async def test_a_token_comes_through_before_the_next_one_is_made_and_who_leaves_cancels(
    redis_url: str, url: str
) -> None:
    async with (
        HandWorker(redis_url) as hand,
        Client(redis_url, "q") as client,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
    ):
        await hand.announce()
        async with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            [work] = await hand.take()
            lines = response.aiter_lines()
            for number, text in enumerate("abc"):
                await hand.emit(work, delta(text, number))
                async for line in lines:
                    if line.startswith("data: ") and json.loads(line.removeprefix("data: "))["choices"][0][
                        "delta"
                    ].get("content"):
                        break
                assert json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"] == text

        async def cancelled() -> bool:
            return (await client.status(work.rid)).state == "cancelled"

        await eventually_so(cancelled, "the cancellation")


async def test_what_is_not_for_everybody_is_not_passed_on(url: str, gateway: Gateway) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for path in ("/metrics", "/healthz", "/readyz"):
            assert (await http.get(url + path)).status_code == 404
            assert (await http.get(gateway.url + path)).status_code == 200
        assert (await http.get(url + "/openapi.json")).status_code == 200
