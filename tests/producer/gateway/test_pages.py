"""The pages in a real browser, over a gateway with a live worker."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from browser import BINARY, Browser
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired, eventually_so
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, hash_of, new_tenant

needs_browser = pytest.mark.skipif(BINARY is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[Hired]:
    hired = await Hired(redis_url, "w", GatedEngine(is_open=True)).start()
    yield hired
    await hired.dismiss()


@pytest.fixture
async def gateway(redis_url: str, worker: Hired) -> AsyncIterator[Gateway]:
    async with Gateway(redis_url) as running:
        yield running


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with Browser() as started:
        yield started


async def ask(browser: Browser, prompt: str) -> None:
    await browser.wait("document.querySelector('#model').options.length")
    await browser.run(f"document.querySelector('#prompt').value = {prompt!r}")
    await browser.run("document.querySelector('#send').click()")


async def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = await browser.run(
        f"[...document.querySelectorAll({selector!r})].map((one) => one.innerText)"
    )
    return found


async def none_runs(gateway: Gateway) -> bool:
    return (await gateway.services.directory.broker("q").depth()).running == 0


@needs_browser
async def test_the_fleet_is_shown_as_it_is(gateway: Gateway, browser: Browser) -> None:
    await browser.open(f"{gateway.url}/")
    await browser.wait("document.querySelector('#workers tbody tr')")
    async with httpx.AsyncClient() as client:
        (queue,) = (await client.get(f"{gateway.url}/v1/fleet")).json()["queues"]
    (worker,) = queue["workers"]
    cells = await texts(browser, "#queues tbody td")
    assert cells == ["q", "", "0", "0", str(queue["limit"]), "\N{EN DASH}", "0"]
    cells = await texts(browser, "#workers tbody td")
    assert [cells[0], cells[1], cells[2], cells[5]] == ["w", "q", worker["model"], "ready"]
    assert not await browser.run("document.querySelector('#key-form').checkVisibility()")
    assert browser.errors == []


@needs_browser
async def test_a_prompt_is_answered_as_text(gateway: Gateway, browser: Browser) -> None:
    await browser.open(f"{gateway.url}/")
    await ask(browser, "ECHO 5")
    await browser.wait("document.querySelector('#figures').innerText.startsWith('5 tokens')")
    assert await browser.text("#answer") == "tok0 tok1 tok2 tok3 tok4"
    await ask(browser, "<b onclick=evil>bold</b>")
    await browser.wait("document.querySelector('#figures').innerText.startsWith('1 tokens')")
    assert await browser.text("#answer") == "<b onclick=evil>bold</b>"
    assert await browser.run("document.querySelector('#answer').children.length") == 0
    assert browser.errors == []


@needs_browser
async def test_stopping_cancels_the_request(gateway: Gateway, worker: Hired, browser: Browser) -> None:
    await browser.open(f"{gateway.url}/")
    await ask(browser, "ECHO 1000 TICK 20")
    await browser.wait("document.querySelector('#answer').innerText.includes('tok1')")
    await browser.run("document.querySelector('#stop').click()")
    await browser.wait("document.querySelector('#figures').innerText === 'stopped'")
    await browser.wait("!document.querySelector('#send').disabled")
    await eventually_so(lambda: none_runs(gateway), "the slot of a cancelled request")


@needs_browser
async def test_with_keys_the_page_asks_for_one(
    redis_url: str, worker: Hired, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    with KeyFile.edited(path) as tenants:
        key = KeyEntry(sha256=hash_of("sf-right"), created=dt.date(2026, 1, 1))
        tenants["acme"] = new_tenant().changed({"keys": (key,)})
    async with Gateway(redis_url, keys_file=path) as gateway:
        await browser.open(f"{gateway.url}/")
        await browser.wait("document.querySelector('#key-form').checkVisibility()")
        assert await texts(browser, "tbody td") == []
        await browser.run("document.querySelector('#key').value = 'sf-right'")
        await browser.run("document.querySelector('#key-form button').click()")
        await browser.wait("document.querySelector('#workers tbody tr')")
        assert not await browser.run("document.querySelector('#key-form').checkVisibility()")


@needs_browser
async def test_the_interface_is_shown_with_all_its_operations(gateway: Gateway, browser: Browser) -> None:
    await browser.open(f"{gateway.url}/docs")
    await browser.wait("document.querySelector('details')")
    async with httpx.AsyncClient() as client:
        paths = (await client.get(f"{gateway.url}/openapi.json")).json()["paths"]
    said = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    methods_, paths_ = await texts(browser, "summary b"), await texts(browser, "summary code")
    assert sorted(map(" ".join, zip(methods_, paths_, strict=True))) == sorted(said)
    assert len(said) > 5
    assert browser.errors == []


async def test_pages_load_nothing_from_elsewhere(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for page in ("/", "/docs", "/static/fleet.js", "/static/docs.js", "/static/style.css"):
            answer = await client.get(page)
            assert answer.status_code == 200
            assert "://" not in answer.text
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        for nothing in ("/static/x.js", "/static/..%2fapp.py", "/nowhere"):
            answer = await client.get(nothing)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "no_such_path"
        answer = await client.post("/v1/models")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        assert answer.json()["error"]["code"] == "no_such_method"
