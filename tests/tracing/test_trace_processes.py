"""Traces and log lines of real processes: a gateway, a worker that is killed, and the one after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from command import Running, environment, running
from eventually import eventually
from otlp_collector import collecting
from spans import Kept

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "canary-77c0"


@contextmanager
def fleet(redis_url: str, **variables: str) -> Iterator[tuple[str, Running, Running]]:
    """A gateway's address, the gateway, and a supervisor of one worker."""
    settings = {
        "STREAMFLEET_REDIS_URL": redis_url,
        "STREAMFLEET_QUEUE": "q",
        "STREAMFLEET_LOG_FORMAT": "json",
        "STREAMFLEET_LOG_LEVEL": "debug",
        "STREAMFLEET_GATEWAY_PORT": "0",
        # What waits for a lease or a pause would make the test long.
        "STREAMFLEET_LEASE_S": "2",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        **variables,
    }
    env = environment(**settings)
    with running("worker", "--workers", "1", env=env) as worker, running("gateway", env=env) as gateway:
        worker.wait_for('"ready"')
        yield json.loads(gateway.wait_for("gateway listens"))["url"], gateway, worker


def ended(*processes: Running) -> list[dict[str, Any]]:
    """End them; gives their lines."""
    for one in processes:
        one.process.terminate()
    said = [line for one in processes for line in one.end()[1]]
    assert CANARY not in "\n".join(said)
    return [json.loads(line) for line in said if line.startswith("{")]


def one(spans: list[Kept], name: str) -> Kept:
    (found,) = [span for span in spans if span.name == name]
    return found


async def ask(url: str, prompt: str, *, stream: bool = False) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        body = {"model": "q", "prompt": prompt, "max_tokens": 8, "stream": stream}
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        return await http.post("/v1/completions", json=body, headers=headers)


async def test_a_trace_goes_through_a_crash_and_back(redis_url: str) -> None:
    with collecting() as collector:
        with fleet(redis_url, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url) as (url, gateway, worker):
            answer = await ask(url, f"ECHO 4 AS {CANARY} CRASH@1:1", stream=True)
            assert answer.status_code == 200
            # At once, so that what is not sent yet has to be sent at the end.
            lines = ended(gateway, worker)
        spans = collector.spans()
    server, submit, request = (one(spans, name) for name in ("POST /v1/completions", "submit", "request"))
    assert {span.trace_id for span in spans} == {TRACE}
    assert (server.parent, submit.parent, request.parent) == (CALLER, server.id, submit.id)
    assert [span.service for span in (server, submit, request)] == [
        "streamfleet-gateway",
        "streamfleet-gateway",
        "streamfleet-worker",
    ]
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server.id}-01"
    assert server.began <= submit.began <= submit.ended <= server.ended
    # The killed one has left no word, but its attempt can be told from the next.
    assert (request.attributes["streamfleet.attempt"], len(request.links)) == (2, 1)
    ((trace_id, before),) = request.links
    assert trace_id == TRACE
    assert before not in {span.id for span in spans}
    phases = [one(spans, name) for name in ("queue wait", "tokenize", "wait", "prefill", "decode", "publish")]
    assert {span.parent for span in phases} == {request.id}
    assert [span.began for span in phases] == sorted(span.began for span in phases)
    assert CANARY not in repr(spans)

    rid = answer.headers["x-request-id"].partition(":")[2]
    (told,) = [line for line in lines if line["event"] == "answered" and line["route"]]
    assert (told["rid"], told["queue"]) == (rid, "q")
    assert (told["tenant"], told["route"], told["status"]) == ("default", "/v1/completions", 200)
    (over,) = [line for line in lines if line["event"] == "request ended"]
    assert (over["rid"], over["queue"], over["outcome"]) == (rid, "q", "done")
    assert told["trace_id"] == over["trace_id"] == TRACE
    theirs = [line for line in lines if "worker" in line or "supervisor" in line]
    assert {line["queue"] for line in theirs} == {"q"}
    dead, alive = [line["worker"] for line in theirs if line["event"] == "worker started"]
    assert over["worker"] == alive != dead
    (handed_back,) = [line for line in theirs if line["event"] == "work handed back"]
    assert handed_back["worker"] == dead


async def test_an_engine_that_dies_says_nothing_of_what_it_ran(redis_url: str) -> None:
    with fleet(redis_url) as (url, gateway, worker):
        answer = await ask(url, f"ECHO 2 AS {CANARY} OOM@1:1")
        assert answer.status_code == 200
        assert (await ask(url, f"ECHO 2 AS {CANARY} RAISE@1")).status_code == 500
        lines = ended(gateway, worker)
    assert [line for line in lines if line["event"] == "a part of the worker died"]
    failed = [line for line in lines if line["event"] == "request ended" and line["outcome"] == "failed"]
    assert [line["code"] for line in failed] == ["generation_failed"]
    assert [line["trace_id"] for line in failed] == [TRACE]  # carried, though nobody traces


async def test_without_the_packages_all_goes_on(redis_url: str, tmp_path: Path) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry'] = None\n")
    with collecting() as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PYTHONPATH": str(tmp_path)}
        with fleet(redis_url, **variables) as (url, gateway, worker):
            answer = await ask(url, "ECHO 2")
            lines = ended(gateway, worker)
        assert collector.spans() == []
    assert answer.status_code == 200
    assert "traceresponse" not in answer.headers
    warned = [line for line in lines if "streamfleet[otel]" in line["event"]]
    assert [line["level"] for line in warned] == ["warning"] * 2
    (over,) = [line for line in lines if line["event"] == "request ended"]
    assert over["trace_id"] == TRACE


async def test_a_collector_that_is_away_holds_nobody_up(redis_url: str) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_MAX_QUEUE_SIZE": "16"}
    variables["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "8"
    with fleet(redis_url, **variables) as (url, gateway, worker):
        for _ in range(20):
            assert (await ask(url, "ECHO 2")).status_code == 200
        await eventually(lambda: gateway.process.poll() is None, "it lives")
        lines = ended(gateway, worker)
    assert (gateway.process.returncode, worker.process.returncode) == (0, 0)
    assert sum(line["event"] == "request ended" for line in lines) == 20
