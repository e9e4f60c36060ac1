"""Traces from an HTTP header or a service's span through the queue to the worker, and back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest
import structlog
from opentelemetry import trace

import spans
from eventually import eventually
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired
from hired import end as end_of
from spans import Kept
from streamfleet_common import tracing
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client, blocking
from streamfleet_producer.gateway.server_spans import ServerSpans

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
CANARY = "canary-5e1f"


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    spans.forget()
    yield
    spans.forget()


@asynccontextmanager
async def hiring(url: str, name: str = "w0", **options: object) -> AsyncIterator[Hired]:
    hired = await Hired(url, name, GatedEngine(), spans=spans.worker_spans(name), **options).start()
    try:
        yield hired
    finally:
        await hired.dismiss()


@asynccontextmanager
async def traced(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway that traces."""
    gateway = Gateway(url, spans=ServerSpans(spans.service_provider()))
    async with gateway, httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        yield http


async def found(count: int = 1) -> dict[str, Kept]:
    """All spans by name, once `count` requests have theirs and the gateway's is over."""
    await eventually(
        lambda: sum(one.name == "publish" for one in spans.kept()) >= count, "the worker's spans"
    )
    await eventually(lambda: any(one.kind != "CONSUMER" for one in spans.kept()), "the gateway's span")
    return {one.name: one for one in spans.kept()}


PHASES = ("queue wait", "tokenize", "wait", "prefill", "decode", "publish")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_trace_from_the_header_to_the_worker_and_back(redis_url: str, stream: bool) -> None:
    async with hiring(redis_url), traced(redis_url) as http:
        body = {"model": "q", "prompt": f"ECHO 3 AS {CANARY}", "max_tokens": 8, "stream": stream}
        answer = await http.post("/v1/completions", json=body, headers={"traceparent": SAMPLED})
        assert answer.status_code == 200, answer.text
        await eventually(lambda: any(one.kind == "SERVER" for one in spans.kept()), "the gateway's span")
        by_name = await found()

    server, submit, request = by_name["POST /v1/completions"], by_name["submit"], by_name["request"]
    assert {one.trace_id for one in by_name.values()} == {TRACE}
    assert (server.kind, submit.kind, request.kind) == ("SERVER", "PRODUCER", "CONSUMER")
    assert (server.parent, submit.parent, request.parent) == (CALLER, server.id, submit.id)
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server.id}-01"
    rid = answer.headers["x-request-id"].partition(":")[2]
    assert {one.attributes["streamfleet.rid"] for one in (server, submit, request)} == {rid}

    phases = [by_name[name] for name in PHASES]
    assert {one.parent for one in phases} == {request.id}
    for before, after in pairwise(phases):
        assert before.began <= before.ended <= after.began <= after.ended
    # Nothing is missing between them, but what the way from the engine's thread to the event loop takes.
    assert all(before.ended == after.began for before, after in pairwise(phases[:5]))
    assert (phases[0].began, phases[-1].ended) == (request.began, request.ended)

    said = request.attributes
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["gen_ai.usage.input_tokens"] == 4  # the scripted engine counts words
    assert said["gen_ai.response.finish_reasons"] == ("eos",)
    assert (said["streamfleet.outcome"], said["streamfleet.attempt"]) == ("done", 1)
    assert said["streamfleet.batch.size"] == 1
    assert not any(one.is_error for one in by_name.values())
    assert CANARY not in repr(list(spans.kept()))


async def test_a_service_passes_its_own_span_on(redis_url: str) -> None:
    tracer = spans.service_provider().get_tracer("a service")
    async with hiring(redis_url), Client(redis_url, queue="q") as client:
        with tracer.start_as_current_span("its work") as its:
            await client.run_many([GenerateRequest(prompt=f"ECHO {n}", max_tokens=4) for n in (1, 2)])
            async with client.stream(GenerateRequest(prompt="ECHO 2", max_tokens=4)) as stream:
                assert [text async for text in stream]
        await found(3)
    its_id = f"{its.get_span_context().span_id:016x}"
    submits = [one for one in spans.kept() if one.name == "submit"]
    requests = [one for one in spans.kept() if one.name == "request"]
    assert {one.trace_id for one in spans.kept()} == {f"{its.get_span_context().trace_id:032x}"}
    assert [one.parent for one in submits] == [its_id] * 3
    assert sorted(str(one.parent) for one in requests) == sorted(one.id for one in submits)
    by_rid = {one.id: one.attributes["streamfleet.rid"] for one in submits}
    assert all(by_rid[str(one.parent)] == one.attributes["streamfleet.rid"] for one in requests)


async def test_so_does_one_without_an_event_loop(redis_url: str) -> None:
    def work() -> str:
        with (
            spans.service_provider().get_tracer("a service").start_as_current_span("its work") as its,
            blocking.Client(redis_url, queue="q") as client,
        ):
            client.run(GenerateRequest(prompt="ECHO 1", max_tokens=4))
            with client.stream(GenerateRequest(prompt="ECHO 2", max_tokens=4)) as stream:
                assert list(stream)
        return f"{its.get_span_context().span_id:016x}"

    async with hiring(redis_url):
        its_id = await asyncio.to_thread(work)
        await found(2)
    submits = {one.id: one for one in spans.kept() if one.name == "submit"}
    assert [one.parent for one in submits.values()] == [its_id] * 2
    assert sorted(str(one.parent) for one in spans.kept() if one.name == "request") == sorted(submits)


async def test_a_traceparent_that_is_given_counts_more_than_the_active_span(redis_url: str) -> None:
    async with hiring(redis_url), Client(redis_url, queue="q") as client:
        with spans.service_provider().get_tracer("a service").start_as_current_span("its work"):
            await client.run(GenerateRequest(prompt="ECHO 1", max_tokens=4), traceparent=SAMPLED)
        by_name = await found()
    assert (by_name["request"].trace_id, by_name["request"].parent) == (TRACE, CALLER)
    assert "submit" not in by_name


async def test_without_a_trace_the_requests_own_id_is_one(redis_url: str) -> None:
    async with hiring(redis_url) as hired, Client(redis_url, queue="q") as client:
        ticket = await client.submit(GenerateRequest(prompt="ECHO 1", max_tokens=4))
        await client.result(ticket.id)
        await eventually(lambda: any(one.name == "request" for one in spans.kept()), "its spans")
        assert hired.engine.taken
    (request,) = [one for one in spans.kept() if one.name == "request"]
    assert (request.trace_id, request.parent) == (ticket.id[2:], None)


async def test_what_is_not_sampled_is_carried_and_not_recorded(redis_url: str) -> None:
    async with hiring(redis_url) as hired, traced(redis_url) as http:
        body = {"model": "q", "prompt": "ECHO 1", "max_tokens": 4}
        answer = await http.post("/v1/completions", json=body, headers={"traceparent": UNSAMPLED})
        # The worker has told its end before the client has it, and its spans before it takes the next one.
        await http.post("/v1/completions", json=body, headers={"traceparent": SAMPLED})
        await found()
        assert hired.engine.taken
    version, trace_id, _, flags = answer.headers["traceresponse"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "00")
    rid = answer.headers["x-request-id"].partition(":")[2]
    assert all(one.attributes.get("streamfleet.rid") != rid for one in spans.kept())


async def test_each_attempt_has_a_span_linked_to_the_one_before(redis_url: str) -> None:
    async with Client(redis_url, queue="q") as client:
        async with hiring(redis_url, "w0", drain_timeout_s=0.0) as first:
            first.engine.is_open = False
            ticket = await client.submit(GenerateRequest(prompt="ECHO 1", max_tokens=4), traceparent=SAMPLED)
            await eventually(lambda: len(first.engine.added) == 1, "the first attempt")
            await first.drained()
        async with hiring(redis_url, "w1") as second:
            broker = second.worker._broker
            assert (await end_of(broker, ticket.id)).worker == "w1"
            await eventually(lambda: len([s for s in spans.kept() if s.name == "request"]) == 2, "both spans")
    one, other = [one for one in spans.kept() if one.name == "request"]
    assert one.attributes["streamfleet.outcome"] == "handed_back"
    assert (one.links, other.links) == ((), ((TRACE, one.id),))
    assert (one.parent, other.parent) == (CALLER, CALLER)
    assert [s.attributes["streamfleet.worker"] for s in (one, other)] == ["w0", "w1"]
    assert one.ended <= other.ended


async def test_an_error_is_its_code_and_never_its_words(redis_url: str) -> None:
    async with hiring(redis_url), traced(redis_url) as http:
        body = {"model": "q", "prompt": f"ECHO 2 AS {CANARY} RAISE@1", "max_tokens": 4}
        answer = await http.post("/v1/completions", json=body, headers={"traceparent": SAMPLED})
        assert answer.status_code == 500
        await eventually(lambda: any(one.kind == "SERVER" for one in spans.kept()), "the gateway's span")
        by_name = await found()
        refused = await http.post("/v1/completions", json=body | {"model": CANARY})
        assert refused.status_code == 404
        await eventually(lambda: len([s for s in spans.kept() if s.kind == "SERVER"]) == 2, "its span")
    for name in ("POST /v1/completions", "request"):
        span = by_name[name]
        assert (span.is_error, span.error) == (True, "generation_failed"), name
        assert span.attributes["error.type"] == "generation_failed"
    last = [s for s in spans.kept() if s.kind == "SERVER"][-1]
    assert (last.is_error, last.attributes["error.type"]) == (False, "model_not_found")
    assert CANARY not in repr(list(spans.kept()))


async def test_a_submission_that_is_refused_says_so(redis_url: str) -> None:
    async with hiring(redis_url, max_queue_depth=1) as hired, Client(redis_url, queue="q") as client:
        hired.engine.is_open = False
        await client.submit(GenerateRequest(prompt="ECHO 1", max_tokens=4))
        with (
            spans.service_provider().get_tracer("a service").start_as_current_span("its work"),
            pytest.raises(Exception, match="full"),
        ):
            await client.submit(GenerateRequest(prompt="ECHO 1", max_tokens=4))
    (submit,) = [one for one in spans.kept() if one.name == "submit"]
    assert (submit.is_error, submit.attributes["error.type"]) == (True, "queue_full")


async def test_public_routes_are_not_traced(redis_url: str) -> None:
    async with traced(redis_url) as http:
        assert (await http.get("/healthz")).status_code == 200
        answer = await http.get("/v1/models")
        assert answer.status_code == 200
        await eventually(lambda: bool(list(spans.kept())), "a span")
    assert [one.name for one in spans.kept()] == ["GET /v1/models"]
    assert answer.headers["traceresponse"].split("-")[1] == next(spans.kept()).trace_id


# --- what switches it on


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_opentelemetrys_own_variables_switch_it_on(variables: dict[str, str], wanted: bool) -> None:
    assert tracing.wanted(variables) is wanted


def test_what_cannot_be_sent_is_said_and_no_reason_not_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with structlog.testing.capture_logs() as said:
        with monkeypatch.context() as here:
            here.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
            assert tracing.provider("s", "1") is None
        with monkeypatch.context() as here:
            here.setitem(sys.modules, "opentelemetry.sdk.trace", None)
            assert tracing.provider("s", "1") is None
        with monkeypatch.context() as here:
            here.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
            assert tracing.provider("s", "1") is None
    assert [line["log_level"] for line in said] == ["warning"] * 3
    assert "http/protobuf" in said[0]["event"]
    assert "streamfleet[otel]" in said[1]["event"]


def test_a_service_may_say_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for name, expected in ((None, "s"), ("theirs", "theirs")):
        if name is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        made = tracing.provider("s", "1", room="7")
        assert made is not None
        tracing.close(made)
        assert made.resource.attributes["service.name"] == expected
        assert made.resource.attributes["room"] == "7"


def test_no_span_is_active_outside_of_a_request() -> None:
    assert not trace.get_current_span().get_span_context().is_valid
