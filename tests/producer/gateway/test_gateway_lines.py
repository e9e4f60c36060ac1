"""What the gateway's log says of a request: who asked for what, and what became of it; never a text."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import structlog

from gateway_process import Gateway
from hired import Hired
from streamfleet_producer.gateway import openai_completions
from streamfleet_producer.gateway.openai_told import CompletionTold

CANARY = "canary-c3"
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BODY = {"model": "q", "prompt": f"ECHO 2 AS {CANARY}", "max_tokens": 4}


@pytest.fixture(autouse=True)
def _all_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever an earlier test has set up: each logger may have kept the level of its first use."""
    structlog.reset_defaults()
    for name, module in list(sys.modules.items()):
        if name.startswith("streamfleet_") and "log" in vars(module):
            monkeypatch.setattr(module, "log", structlog.get_logger())
    yield
    structlog.reset_defaults()


@pytest.fixture
async def http(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        Gateway(redis_url, log_level="debug") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        yield http


async def lines_of(http: httpx.AsyncClient, *asked: tuple[str, str, Any]) -> list[dict[str, Any]]:
    with structlog.testing.capture_logs() as said:
        for method, path, body in asked:
            await http.request(method, path, json=body, headers=HEADERS)
    assert CANARY not in repr(said)
    # The worker's are among them, which runs in this process, too.
    return [dict(line) for line in said if line["log_level"] != "info" and "epoch" not in line]


async def test_a_line_a_request_at_debug(hired: Hired, http: httpx.AsyncClient) -> None:
    asked = [
        ("POST", "/v1/completions", BODY),
        ("POST", "/v1/completions", BODY | {"stream": True}),
        ("POST", "/v1/completions", BODY | {"prompt": ["ECHO 1", "ECHO 2"]}),
        ("POST", "/v1/completions", BODY | {"prompt": f"ECHO 2 AS {CANARY} RAISE@1"}),
        ("POST", "/v1/completions", BODY | {"model": CANARY}),
        ("GET", f"/v1/requests/q:{'0' * 34}?wait=0", None),
        ("GET", f"/{CANARY}", None),
        ("GET", "/healthz", None),
    ]
    lines = [line for line in await lines_of(http, *asked) if line["event"] == "answered"]
    assert [(line["route"], line["status"], line.get("code")) for line in lines] == [
        ("/v1/completions", 200, None),
        ("/v1/completions", 200, None),
        ("/v1/completions", 200, None),
        ("/v1/completions", 500, "generation_failed"),
        ("/v1/completions", 404, "model_not_found"),
        ("/v1/requests/{id}", 404, "request_not_found"),
        ("", 404, None),
        ("/healthz", 200, None),
    ]
    assert [line.get("requests") for line in lines] == [None, None, 2, None, None, None, None, None]
    for line in lines[:4]:
        assert (line["queue"], len(line["rid"])) == ("q", 34)
        assert (line["tenant"], line["method"], line["trace_id"]) == ("default", "POST", TRACE)
        assert line["seconds"] > 0
    assert len({line["rid"] for line in lines[:4]}) == 4
    assert "rid" not in lines[4]
    assert lines[5]["rid"] == "0" * 34


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_names_its_request_and_quotes_nothing(
    hired: Hired, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError(CANARY)

    # Once the request is accepted.
    monkeypatch.setattr(openai_completions, "completion_answer", broken)
    monkeypatch.setattr(CompletionTold, "take", broken)
    lines = await lines_of(http, ("POST", "/v1/completions", BODY | {"stream": stream}))
    (fault,) = [line for line in lines if line["log_level"] == "error"]
    assert (fault["kind"], fault["route"], fault["tenant"]) == ("ValueError", "/v1/completions", "default")
    assert (fault["queue"], len(fault["rid"]), fault["trace_id"]) == ("q", 34, TRACE)
    assert "broken" in fault["at"][-1]


async def test_nothing_is_said_of_each_above_debug(hired: Hired, redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        assert await lines_of(http, ("POST", "/v1/completions", BODY)) == []
