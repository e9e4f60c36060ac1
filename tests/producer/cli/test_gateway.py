"""`streamfleet gateway` as a process: what stops it from starting, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from command import LIMIT_S, Running, environment, running
from hand_worker import HandWorker, Work, delta
from hired import eventually_so
from sse_reader import sent_events
from streamfleet_common.settings import misspelled
from streamfleet_producer import Client
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.cli.gateway_process import COMMAND
from streamfleet_producer.gateway.settings import GatewaySettings

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}

# --- its start


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        (
            {"STREAMFLEET_MAX_HEADERS": "1", "STREAMFLEET_NO_WORKER": "cry"},
            2,
            ("STREAMFLEET_MAX_HEADERS: ", "STREAMFLEET_NO_WORKER: "),
        ),
        ({"STREAMFLEET_KEYS_FILE": "/no/such.json"}, 2, ("no key file /no/such.json: make one with",)),
        ({"STREAMFLEET_KEYS_FILE": "{folder}/broken.json"}, 2, ("broken.json: ", "tenants.acme")),
        ({"STREAMFLEET_REDIS_URL": "http://redis"}, 2, ("'http://redis' is no Redis URL",)),
        ({"STREAMFLEET_TOKENIZERS": '{"q": "/no/tokenizer.json"}'}, 2, ("/no/tokenizer.json",)),
        ({"STREAMFLEET_FILES_DIR": "/dev/null/files"}, 2, ("files_dir /dev/null/files cannot be made: ",)),
        (
            {"STREAMFLEET_TLS_CERTIFICATE": "/no/cert.pem", "STREAMFLEET_TLS_KEY": "/no/key.pem"},
            2,
            ("/no/cert.pem, STREAMFLEET_TLS_KEY /no/key.pem: of no use (No such file or directory)",),
        ),
        (
            {"STREAMFLEET_GATEWAY_HOST": "no-such-host.invalid"},
            1,
            ("cannot listen on no-such-host.invalid:0 (",),
        ),
        (
            {"STREAMFLEET_GATEWAY_PORT": "{taken}"},
            1,
            ("cannot listen on 127.0.0.1:{taken} (Address already in use): choose another",),
        ),
    ],
)
def test_what_stops_it_from_starting_is_said_in_one_line(
    settings: dict[str, str], status: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text('{"tenants": {"acme": {"secret": "short"}}}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        known = {"{folder}": str(tmp_path), "{taken}": str(taken.getsockname()[1])}

        def filled(text: str) -> str:
            for name, value in known.items():
                text = text.replace(name, value)
            return text

        told = {name: filled(value) for name, value in settings.items()}
        # What the command becomes.
        done = subprocess.run(
            COMMAND,
            env=environment(**{"STREAMFLEET_GATEWAY_PORT": "0", **told}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert done.returncode == status
    (line,) = (done.stdout + done.stderr).splitlines()
    for word in words:
        assert filled(word) in line


def test_no_part_s_setting_is_taken_for_a_misspelled_one_of_the_gateway() -> None:
    from streamfleet_worker.settings import WorkerSettings  # noqa: PLC0415

    others = {*BulkSettings.model_fields, *WorkerSettings.model_fields}
    assert misspelled(GatewaySettings, [f"STREAMFLEET_{name.upper()}" for name in others]) == {}


# --- its end


@contextmanager
def serving(redis_url: str, **settings: str) -> Iterator[tuple[Running, str]]:
    """A gateway's process and its URL."""
    env = environment(
        STREAMFLEET_REDIS_URL=redis_url,
        STREAMFLEET_GATEWAY_PORT="0",
        STREAMFLEET_LOG_FORMAT="json",
        **settings,
    )
    with running("gateway", env=env) as gateway:
        listening = json.loads(gateway.wait_for("gateway listens"))
        assert listening["keys"] == "none"
        yield gateway, listening["url"]


def told_to_end(gateway: Running) -> None:
    os.kill(gateway.process.pid, signal.SIGTERM)
    gateway.wait_for("the gateway ends")


async def ended(gateway: Running) -> list[str]:
    """Wait until it has ended in peace; gives all it said."""
    status, said = await asyncio.to_thread(gateway.end)
    assert status == 0
    assert not [line for line in said if json.loads(line)["level"] in ("error", "critical")]
    return said


async def is_cancelled(redis_url: str, work: Work) -> None:
    async with Client(redis_url, "q") as client:

        async def so() -> bool:
            return (await client.status(work.rid)).state == "cancelled"

        await eventually_so(so, "the cancellation")


async def test_what_is_under_way_goes_on_and_nothing_new_is_taken(redis_url: str) -> None:
    async with HandWorker(redis_url) as hand:
        await hand.announce()
        with serving(redis_url) as (gateway, url):
            async with (
                httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http,
                httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as late,
                http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response,
            ):
                answer = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
                streamed, plain = await hand.take(2)
                if not streamed.envelope.stream:
                    streamed, plain = plain, streamed
                await hand.emit(streamed, delta("a"))
                await asyncio.to_thread(told_to_end, gateway)

                async def refused() -> bool:
                    try:
                        await late.get("/healthz")
                    except httpx.ConnectError:
                        return True
                    except httpx.TransportError:
                        pass  # it was connected while nobody had taken it yet, and is hung up on
                    return False

                await eventually_so(refused, "the end of its listening")
                await hand.emit(streamed, delta("b", 1))
                await hand.finish(streamed, "ab")
                await hand.finish(plain, "c")
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
                assert lines[-1] == "data: [DONE]"
                texts = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines[:-1]]
                assert "".join(filter(None, texts)) == "ab"
                assert (await answer).json()["choices"][0]["message"]["content"] == "c"
            await ended(gateway)


async def test_what_is_not_done_in_time_is_told_so_and_cancelled(redis_url: str) -> None:
    async with HandWorker(redis_url) as hand:
        await hand.announce()
        with serving(redis_url, STREAMFLEET_DRAIN_TIMEOUT_S="0.5") as (gateway, url):
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
                body: dict[str, Any] = {"model": "m", "stream": True, "request": {"prompt": "kept"}}
                kept = (await http.post("/v1/requests", json=body)).json()["id"]
                answer = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
                async with (
                    http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as chat,
                    http.stream("GET", f"/v1/requests/{kept}/events") as events,
                ):
                    works = await hand.take(3)
                    (read,) = (work for work in works if work.prompt == "kept")
                    asked = [work for work in works if work is not read]
                    for work in works:
                        await hand.emit(work, delta("a"))
                    await asyncio.to_thread(told_to_end, gateway)

                    *_, last = [line async for line in chat.aiter_lines() if line]
                    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "gateway_ending"
                    *_, broken = [event async for event in sent_events(events)]
                    assert (broken.name, broken.data["error"]["code"]) == ("error", "gateway_ending")
                response = await answer
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "gateway_ending"
                assert int(response.headers["retry-after"]) >= 1
            await ended(gateway)
            for work in asked:
                await is_cancelled(redis_url, work)
        # Whoever reads events leaves the request alone: another gateway has the rest of them.
        await hand.emit(read, delta("b", 1))
        assert await hand.finish(read, "ab")


async def test_without_requests_it_ends_at_once(redis_url: str) -> None:
    with serving(redis_url, STREAMFLEET_DRAIN_TIMEOUT_S="3600") as (gateway, url):
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/healthz")).text == "ok\n"  # its connection stays open
            os.killpg(gateway.process.pid, signal.SIGINT)
            await ended(gateway)
