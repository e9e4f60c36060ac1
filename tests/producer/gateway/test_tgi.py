"""TGI's routes over a real server: with a worker moved by hand, and with one that does as the prompt says."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eventually import eventually
from gated_engine import GatedEngine
from gateway_process import Gateway
from hand_worker import HandWorker, Work
from hired import Hired, eventually_so
from streamfleet_common.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    IncompleteGeneration,
    StreamfleetError,
    TooLong,
    Unsupported,
)
from streamfleet_common.schemas import Choice, Delta, GenerateRequest, Prefill, Timing, Usage
from streamfleet_common.token_layout import TokenLayout
from streamfleet_producer import Client
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, new_tenant


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[HandWorker]:
    """A worker of a model, moved by hand."""
    async with HandWorker(redis_url) as worker:
        await worker.announce(layout=TokenLayout())
        yield worker


@pytest.fixture
async def gateway(redis_url: str, worker: HandWorker) -> AsyncIterator[Gateway]:
    async with Gateway(redis_url) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        yield http


def asking(http: httpx.AsyncClient, path: str, **body: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(http.post(path, json={"inputs": "In", **body}))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line[6:]) for line in lines]


async def say(worker: HandWorker, work: Work, *texts: str, first: int = 0, index: int = 0) -> None:
    """Tokens numbered from `first`; each place's log-probability tells the answer and the number."""
    ids = tuple(range(first, first + len(texts)))
    request = work.envelope.request
    assert isinstance(request, GenerateRequest)
    logprobs = tuple(-(index + 1) * (token_id + 1) / 4 for token_id in ids)
    likeliest = tuple(
        tuple((token_id + rank, logprob - rank) for rank in range(request.top_logprobs))
        for token_id, logprob in zip(ids, logprobs, strict=True)
    )
    await worker.emit(
        work,
        Delta(
            index=index,
            token_ids=ids,
            texts=texts,
            logprobs=logprobs if request.logprobs else (),
            top_logprobs=likeliest if request.top_logprobs else (),
        ),
    )


def choice(text: str, count: int, reason: Any, *, index: int = 0, seed: int | None = None) -> Choice:
    return Choice(
        index=index,
        text=text,
        token_ids=tuple(range(count)),
        logprobs=tuple(-(index + 1) * (place + 1) / 4 for place in range(count)),
        finish_reason=reason,
        seed=seed,
    )


# --- the whole answer


async def test_without_details_there_is_the_text_alone_and_times_in_the_header(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    asked = asking(http, "/generate")
    (work,) = await worker.take()
    assert not work.envelope.stream
    assert work.envelope.request == GenerateRequest(prompt="In", max_tokens=100)
    await worker.finish(
        work,
        "put",
        usage=Usage(prompt_tokens=2, completion_tokens=3),
        timing=Timing(wait_ms=2.0, prefill_ms=20.0, decode_ms=40.0),
    )
    answer = await asked
    assert (answer.status_code, answer.json()) == (200, {"generated_text": "put"})
    headers = answer.headers
    assert headers["x-request-id"] == f"q:{work.rid}"
    assert (headers["x-inference-time"], headers["x-time-per-token"]) == ("60", "20")
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("2", "3")
    assert headers["x-compute-characters"] == "2"
    assert int(headers["x-queue-time"]) >= 2
    assert int(headers["x-total-time"]) >= int(headers["x-validation-time"]) >= 0
    assert abs(float(headers["x-compute-time"]) * 1000 - int(headers["x-total-time"])) <= 0.501


async def test_details_tell_every_token(worker: HandWorker, http: httpx.AsyncClient) -> None:
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "return_full_text": True}
    asked = asking(http, "/generate", parameters=parameters)
    (work,) = await worker.take()
    await worker.emit(work, Prefill(token_ids=(7, 8), texts=("I", "n"), logprobs=(None, -0.5)))
    await say(worker, work, "p", "u")
    await say(worker, work, "t", "", first=2)
    await worker.finish(work, "put", choices=(choice("put", 4, "eos"),))
    answer = (await asked).json()
    assert answer["generated_text"] == "Input"
    details = answer["details"]
    tokens = details.pop("tokens")
    top_tokens = details.pop("top_tokens")
    assert details == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "seed": None,
        "prefill": [{"id": 7, "text": "I", "logprob": None}, {"id": 8, "text": "n", "logprob": -0.5}],
    }
    assert tokens == [
        {"id": 0, "text": "p", "logprob": -0.25, "special": False},
        {"id": 1, "text": "u", "logprob": -0.5, "special": False},
        {"id": 2, "text": "t", "logprob": -0.75, "special": False},
        {"id": 3, "text": "", "logprob": -1.0, "special": True},
    ]
    assert top_tokens[1] == [
        {"id": 1, "text": "u", "logprob": -0.5, "special": False},
        {"id": 2, "text": "", "logprob": -1.5, "special": False},
    ]


async def test_the_best_is_the_likeliest_by_token_and_the_others_are_told(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    parameters = {"best_of": 3, "do_sample": True, "details": True, "return_full_text": True}
    asked = asking(http, "/generate", parameters=parameters)
    (work,) = await worker.take()
    # Three likely tokens, one likelier, and two unlikely ones: on average -0.5, -0.5 and -1.125.
    await say(worker, work, "a", "b", "c")
    await say(worker, work, "d", index=1)
    await say(worker, work, "e", "f", index=2)
    choices = (
        choice("abc", 3, "length", seed=5),
        choice("d", 1, "stop", index=1, seed=6),
        choice("ef", 2, "length", index=2, seed=7),
    )
    await worker.finish(work, "", choices=choices)
    details = (await asked).json()["details"]
    others = details["best_of_sequences"]
    assert [details["seed"], *(other["seed"] for other in others)] == [5, 6, 7]
    assert [(other["generated_text"], other["finish_reason"]) for other in others] == [
        ("Ind", "stop_sequence"),
        ("Inef", "length"),
    ]
    assert [token["text"] for token in others[1]["tokens"]] == ["e", "f"]

    # By the mean, and not by the sum, the longer answer wins.
    asked = asking(http, "/generate", parameters={"best_of": 2, "do_sample": True})
    (work,) = await worker.take()
    short = Choice(text="short", token_ids=(1,), logprobs=(-0.5,), finish_reason="length")
    long = Choice(index=1, text="long", token_ids=(1, 2), logprobs=(-0.4, -0.4), finish_reason="length")
    await worker.finish(work, "", choices=(short, long))
    assert (await asked).json() == {"generated_text": "long"}


async def test_what_was_gathered_of_a_lost_attempt_is_thrown_away(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    asked = asking(http, "/generate", parameters={"details": True})
    (work,) = await worker.take()
    await say(worker, work, "a", "b", "c")
    await worker.lose(work)
    (work,) = await worker.take()
    await say(worker, work, "x")
    await worker.finish(work, "x", choices=(choice("x", 1, "length"),))
    details = (await asked).json()["details"]
    assert [token["text"] for token in details["tokens"]] == ["x"]


async def test_the_root_decides_by_stream_gives_a_list_and_begins_with_the_prompt(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    asked = asking(http, "/")
    (work,) = await worker.take()
    await worker.finish(work, "put")
    assert (await asked).json() == [{"generated_text": "Input"}]

    asked = asking(http, "/", stream=True, parameters={"max_new_tokens": 1}, options={"use_cache": False})
    (work,) = await worker.take()
    await say(worker, work, "put")
    await worker.finish(work, "put")
    (event,) = events_of(await asked)
    assert event["generated_text"] == "Input"


# --- the stream


async def test_a_stream_has_an_event_for_each_token(worker: HandWorker, http: httpx.AsyncClient) -> None:
    asked = asking(
        http, "/generate_stream", parameters={"details": True, "max_new_tokens": 3, "top_n_tokens": 1}
    )
    (work,) = await worker.take()
    assert work.envelope.stream
    await say(worker, work, "p", "u")
    await say(worker, work, "t", first=2)
    await worker.finish(work, "put", usage=Usage(prompt_tokens=2, completion_tokens=3))
    answer = await asked
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == f"q:{work.rid}"
    assert answer.headers["x-compute-characters"] == "2"
    events = events_of(answer)
    assert [event["index"] for event in events] == [1, 2, 3]
    assert [event["token"]["text"] for event in events] == ["p", "u", "t"]
    assert events[0] == {
        "index": 1,
        "token": {"id": 0, "text": "p", "logprob": -0.25, "special": False},
        "top_tokens": [{"id": 0, "text": "p", "logprob": -0.25, "special": False}],
        "generated_text": None,
        "details": None,
    }
    assert events[2]["generated_text"] == "put"
    assert events[2]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 3,
        "seed": None,
        "input_length": 2,
    }


async def test_a_token_is_there_before_the_next_one(worker: HandWorker, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        streaming = http.stream("POST", "/generate_stream", json={"inputs": "In"})
        async with streaming as response:
            lines = response.aiter_lines()
            (work,) = await worker.take()
            await say(worker, work, "p")
            assert json.loads((await anext(lines))[5:])["token"]["text"] == "p"
            await say(worker, work, "", first=1)
            await worker.finish(work, "p", choices=(choice("p", 2, "eos"),))
            assert await anext(lines) == ""
            last = json.loads((await anext(lines))[5:])
    assert (last["generated_text"], last["token"]["special"]) == ("p", True)


async def test_a_stream_goes_on_where_a_lost_attempt_was_repeated(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    asked = asking(http, "/generate_stream", parameters={"max_new_tokens": 3})
    (work,) = await worker.take()
    await say(worker, work, "p", "u")
    await worker.lose(work)
    (work,) = await worker.take()
    await say(worker, work, "p")
    await say(worker, work, "u", "t", first=1)
    await worker.finish(work, "put", choices=(choice("put", 3, "length"),))
    events = events_of(await asked)
    assert [event["token"]["text"] for event in events] == ["p", "u", "t"]


# --- errors


ERRORS: tuple[tuple[StreamfleetError, int, str, str], ...] = (
    (TooLong(prompt_tokens=5, max_tokens=300, limit=256), 422, "validation", "`max_new_tokens` of 300"),
    (TooLong(prompt_tokens=500, max_tokens=1, limit=256), 422, "validation", "below the limit of 256"),
    (Unsupported("no guides here", feature="guide"), 422, "validation", "no guides here"),
    (GenerationFailed("it broke"), 424, "generation", "it broke"),
    (IncompleteGeneration("cut"), 500, "incomplete_generation", "cut"),
    (DeadlineExceeded("late"), 504, "timeout", "late"),
    (Cancelled("taken back"), 499, "cancelled", "taken back"),
)


async def test_errors_have_tgis_form(worker: HandWorker, http: httpx.AsyncClient) -> None:
    for error, status, kind, says in ERRORS:
        asked = asking(http, "/generate")
        streamed = asking(http, "/generate_stream")
        works = await worker.take(2)
        (streaming,) = [work for work in works if work.envelope.stream]
        await say(worker, streaming, "p")
        for work in works:
            await worker.fail(work, error)
        answer = await asked
        assert answer.status_code == status
        assert answer.json().keys() == {"error", "error_type"}
        assert answer.json()["error_type"] == kind
        assert says in answer.json()["error"]

        first, last = events_of(await streamed)
        assert first["token"]["text"] == "p"
        within = "incomplete_generation" if kind in ("timeout", "cancelled") else kind
        assert (last["error_type"], last["error"]) == (within, answer.json()["error"])


async def test_what_is_not_valid_is_refused_before_a_worker_sees_it(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    parameters = {"temperature": 0, "top_p": 1.5, "nonsense": 1}
    for path in ("/generate", "/generate_stream", "/"):
        answer = await http.post(path, json={"inputs": "In", "parameters": parameters})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        for name in parameters:
            assert f"parameters.{name}" in answer.json()["error"]
    answer = await http.post("/generate", content=b"{")
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    answer = await http.post("/generate_stream", json={"inputs": "In", "parameters": {"best_of": 2}})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert (await worker.broker.depth()).open == 0


async def test_a_full_queue_is_overloaded(worker: HandWorker, http: httpx.AsyncClient) -> None:
    await worker.announce(layout=TokenLayout(), max_queue_depth=1)
    held = asking(http, "/generate")
    (work,) = await worker.take()
    for path in ("/generate", "/generate_stream"):
        answer = await http.post(path, json={"inputs": "In"})
        assert (answer.status_code, answer.json()["error_type"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
    await worker.finish(work, "put")
    assert (await held).status_code == 200


# --- what is served


async def test_info_tells_the_model_and_its_limits(worker: HandWorker, http: httpx.AsyncClient) -> None:
    answer = await http.get("/info")
    assert answer.status_code == 200
    told = answer.json()
    assert (told["model_id"], told["model_pipeline_tag"]) == ("m", "text-generation")
    assert (told["max_total_tokens"], told["max_input_tokens"]) == (1000, 999)
    assert (told["max_concurrent_requests"], told["max_stop_sequences"]) == (1000, 8)
    assert (await http.get("/health")).status_code == 200
    answer = await http.post("/generate", json={"inputs": "In", "parameters": {"truncate": 1000}})
    assert answer.status_code == 422
    assert "1000" in answer.json()["error"]


async def test_where_several_queues_generate_the_setting_says_which(
    redis_url: str, worker: HandWorker, http: httpx.AsyncClient
) -> None:
    async with HandWorker(redis_url, "other", "w2") as other:
        await other.announce(model="n")
        answer = await http.get("/info")  # from a moment ago, or from now
        if answer.status_code == 200:
            assert answer.json()["model_id"] == "m"
        async with Gateway(redis_url) as gateway, httpx.AsyncClient(base_url=gateway.url) as fresh:
            answer = await fresh.post("/generate", json={"inputs": "In"})
            assert (answer.status_code, answer.json()["error_type"]) == (404, "not_found")
            assert "STREAMFLEET_TGI_MODEL" in answer.json()["error"]
            assert (await fresh.get("/health")).status_code == 503
        async with (
            Gateway(redis_url, tgi_model="n") as gateway,
            httpx.AsyncClient(base_url=gateway.url) as chosen,
        ):
            assert (await chosen.get("/info")).json()["model_id"] == "n"
            asked = asking(chosen, "/generate")
            (work,) = await other.take()
            await other.finish(work, "put")
            assert (await asked).json() == {"generated_text": "put"}


async def test_health_is_bad_while_nobody_serves(redis_url: str) -> None:
    async with Gateway(redis_url) as gateway, httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()) == (
            503,
            {"error": "unhealthy", "error_type": "healthcheck"},
        )


# --- a worker that does as the prompt says


async def test_a_client_that_leaves_cancels_its_request(redis_url: str) -> None:
    engine = GatedEngine(is_open=False)
    hired = await Hired(redis_url, "w1", engine).start()
    try:
        async with (
            Gateway(redis_url) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            details = {"details": True}
            asked = [
                asking(http, "/generate"),
                asking(http, "/generate", parameters=details),
                asking(http, "/generate_stream"),
                asking(http, "/", stream=True),
            ]
            await eventually(lambda: len(engine.added) == len(asked), "all requests")
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            assert all(each.cancelled() for each in asked)
            await eventually(lambda: set(engine.added) == set(engine.cancelled), "their cancellation")
    finally:
        await hired.dismiss()


async def test_texts_that_end_anywhere_limits_and_the_name_that_chats_use(redis_url: str) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine()).start()
    try:
        async with (
            Gateway(redis_url) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            chat = {"model": "tgi", "messages": [{"role": "user", "content": "ECHO 2"}]}
            said = (await http.post("/v1/chat/completions", json=chat)).json()
            assert said["choices"][0]["message"]["content"] == "tok0 tok1"
            chat["model"] = "nobody"
            assert (await http.post("/v1/chat/completions", json=chat)).status_code == 404

            asked = {"inputs": "ECHO 3", "parameters": {"details": True, "stop": ["tok7"]}}
            events = events_of(await http.post("/generate_stream", json=asked))
            assert [event["token"]["text"] for event in events] == ["tok0", " tok1", " tok2"]
            assert events[-1]["generated_text"] == "tok0 tok1 tok2"
            assert events[-1]["details"]["finish_reason"] == "eos_token"

            asked["inputs"] = "ECHO 9"
            whole = (await http.post("/generate", json=asked)).json()
            assert whole["generated_text"].endswith(" tok7")
            assert whole["details"]["finish_reason"] == "stop_sequence"
            assert "".join(token["text"] for token in whole["details"]["tokens"]) == whole["generated_text"]

            asked["parameters"] = {"max_new_tokens": 5000}
            refused = await http.post("/generate", json=asked)
            assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
            assert "`inputs` of 2 tokens + `max_new_tokens` of 5000" in refused.json()["error"]
            assert "4096" in refused.json()["error"]
    finally:
        await hired.dismiss()


async def test_keys_are_asked_for_in_tgis_form(redis_url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    with KeyFile.edited(keys) as tenants:
        hashed = hashlib.sha256(b"secret").hexdigest()
        day = dt.date(2027, 1, 31)
        tenants["acme"] = new_tenant().changed({"keys": (KeyEntry(sha256=hashed, created=day),)})
    async with (
        HandWorker(redis_url) as worker,
        Gateway(redis_url, keys_file=keys) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        await worker.announce()
        for path in ("/generate", "/generate_stream", "/"):
            answer = await http.post(path, json={"inputs": "In"})
            assert (answer.status_code, answer.json()["error_type"]) == (401, "authentication")
        assert (await http.get("/info")).status_code == 401
        assert (await http.get("/health")).status_code == 200
        http.headers["authorization"] = "Bearer secret"
        asked = asking(http, "/generate")
        (work,) = await worker.take()
        assert work.envelope.tenant == "acme"
        await worker.finish(work, "put")
        assert (await asked).json() == {"generated_text": "put"}


async def test_an_idempotency_key_answers_twice_with_one_request(
    worker: HandWorker, http: httpx.AsyncClient
) -> None:
    asked = [
        asyncio.create_task(
            http.post("/generate", json={"inputs": "In"}, headers={"idempotency-key": "once"})
        )
        for _ in range(2)
    ]
    (work,) = await worker.take()
    await worker.finish(work, "put")
    answers = [await each for each in asked]
    assert [answer.json() for answer in answers] == [{"generated_text": "put"}] * 2
    assert {answer.headers["x-request-id"] for answer in answers} == {f"q:{work.rid}"}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_the_key_of_a_request_that_was_given_up_is_free_again(
    worker: HandWorker, gateway: Gateway, http: httpx.AsyncClient, path: str
) -> None:
    def asked() -> asyncio.Task[httpx.Response]:
        posted = http.post(path, json={"inputs": "In"}, headers={"idempotency-key": "k"})
        return asyncio.ensure_future(posted)

    leaving = asked()
    await worker.take()
    leaving.cancel()
    async with Client(gateway.services.hub.url, queue="q") as fleet:

        async def given_up() -> bool:
            return (await fleet.depth()).open == 0

        await eventually_so(given_up, "the cancellation")
    again = asked()
    (work,) = await worker.take()
    await say(worker, work, "yes")
    await worker.finish(work, "yes")
    told = await again
    assert told.status_code == 200
    assert "yes" in told.text
