"""No prompt, answer, key or password in what the processes say: they are run, made to fail, and read.

A worker that dies of a request, one that fails, bad requests and good ones, through a gateway, a worker and a
bulk job of their own processes, all with `debug` logs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker_parts import CARD, begin_waiting, submission
from command import Running, descendants, environment, running, streamfleet
from deploy.guarded import Guarded, password
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_producer.bulk.connection import connect, reaching
from streamfleet_producer.bulk.dead_broker import DeadBroker
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, hash_of, new_key, new_tenant

PROMPT, HEADER, WRONG_KEY = "prompt-7f3a91", "header-c04e5d", "sf-wrong-5b1d22"
"""What is looked for: none is a word that anything else could say."""
PASSWORDS = ("pass-of-",)


@dataclass
class Place:
    """Where all processes run, and what they said."""

    gateway: Running
    worker: Running
    url: str
    metrics: str
    key: str

    @property
    def secrets(self) -> tuple[str, ...]:
        return (PROMPT, HEADER, WRONG_KEY, self.key, *PASSWORDS)


def url_file(folder: Path, guarded: Guarded, role: str) -> str:
    path = folder / f"{role}-url"
    path.write_text(guarded.url(role))
    return str(path)


def settings(folder: Path, guarded: Guarded, role: str, **more: str) -> dict[str, str]:
    return environment(
        STREAMFLEET_REDIS_URL_FILE=url_file(folder, guarded, role),
        STREAMFLEET_RQ_URL_FILE=url_file(folder, guarded, "bulk"),
        STREAMFLEET_QUEUE="q",
        STREAMFLEET_LOG_LEVEL="debug",
        STREAMFLEET_LOG_FORMAT="json",
        **more,
    )


@contextmanager
def placed(folder: Path, guarded: Guarded) -> Iterator[Place]:
    key, keys = new_key(), folder / "keys.json"
    entry = KeyEntry(sha256=hash_of(key), created=date(2026, 1, 1))
    KeyFile(tenants={"acme": new_tenant().model_copy(update={"keys": (entry,)})}).write(keys)
    with ExitStack() as stack:
        worker = stack.enter_context(
            running(
                "worker", "--workers", "1", env=settings(folder, guarded, "worker", STREAMFLEET_HTTP_PORT="0")
            )
        )
        listening = json.loads(worker.wait_for('"listening"'))
        worker.wait_for('"ready"')
        env = settings(
            folder,
            guarded,
            "gateway",
            STREAMFLEET_GATEWAY_PORT="0",
            STREAMFLEET_KEYS_FILE=str(keys),
            STREAMFLEET_FILES_DIR=str(folder / "files"),
        )
        gateway = stack.enter_context(running("gateway", env=env))
        url = json.loads(gateway.wait_for("gateway listens"))["url"]
        yield Place(gateway, worker, url, f"http://127.0.0.1:{listening['port']}/metrics", key)


def found(text: str, secrets: tuple[str, ...]) -> list[str]:
    return [secret for secret in secrets if secret in text]


def of_process(pid: int, what: str) -> str:
    return Path(f"/proc/{pid}/{what}").read_bytes().decode("utf-8", "replace")


async def asked(place: Place, folder: Path) -> str:
    """Send what is good and what is not; gives all errors that were answered, the metrics and pages."""
    said: list[str] = []
    headers = {"authorization": f"Bearer {place.key}", "x-note": HEADER, "idempotency-key": HEADER}
    async with httpx.AsyncClient(base_url=place.url, headers=headers, timeout=60) as http:
        good = {"model": "q", "prompt": f"{PROMPT} a b", "max_tokens": 4}
        for path, body in (
            ("/v1/completions", good),
            ("/v1/completions", {**good, "stream": True, "user": PROMPT}),
        ):
            answer = await http.post(path, json=body, headers={"idempotency-key": f"{HEADER}{len(said)}"})
            assert answer.status_code == 200, answer.text
        for prompt, status in (("ECHO 4 RAISE@1", 500), ("ECHO 4 CRASH@1:1", 200)):
            body = {"model": "q", "prompt": prompt, "stop": [PROMPT], "max_tokens": 8}
            answer = await http.post("/v1/completions", json=body, headers={"idempotency-key": prompt})
            assert answer.status_code == status, answer.text
            said.append(answer.text)
        bad: list[tuple[str, Any]] = [
            ("/v1/completions", {**good, "max_tokens": PROMPT}),
            ("/v1/completions", {**good, "prompt": [PROMPT, 7]}),
            ("/v1/completions", {**good, "stop": [PROMPT * 100]}),
            ("/v1/completions", {**good, "max_tokens": 10**9}),
            ("/v1/completions", {**good, "prompt": PROMPT * 20_000}),
            ("/v1/chat/completions", {"model": "q", "messages": [{"role": PROMPT, "content": PROMPT}]}),
            (
                "/v1/chat/completions",
                {"model": "q", "messages": [{"role": "user", "content": PROMPT}], "n": 500},
            ),
            ("/v1/rerank", {"model": "q", "query": PROMPT, "documents": [PROMPT]}),
            ("/v1/embeddings", {"model": "q", "input": PROMPT}),
            ("/generate", {"inputs": PROMPT, "parameters": {"temperature": -1}}),
            ("/v1/requests", {"queue": "q", "request": {"kind": "generate", "prompt": {PROMPT: PROMPT}}}),
            ("/v1/handlers/none", {"input": PROMPT}),
        ]
        for path, body in bad:
            answer = await http.post(path, json=body)
            assert answer.status_code >= 400, (path, answer.text)
            said.append(answer.text)
        torn = [await http.post("/v1/completions", content=text) for text in (f'{{"a": "{PROMPT}', PROMPT)]
        wrong = {"authorization": f"Bearer {WRONG_KEY}"}
        torn.append(await http.post("/v1/completions", json=good, headers=wrong))
        nowhere = (f"/v1/requests/q:{PROMPT}", f"/v1/files/{PROMPT}", f"/{PROMPT}", f"/v1/models?x={PROMPT}")
        pages = ("/metrics", "/readyz", "/v1/fleet", "/openapi.json")
        torn += [await http.get(path) for path in (*nowhere, *pages)]
        said += [answer.text for answer in torn]
        async with httpx.AsyncClient() as other:
            said.append((await other.get(place.metrics)).text)
    return "\n".join(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_that_is_said_holds_what_was_asked(guarded: Guarded, tmp_path: Path) -> None:
    with placed(tmp_path, guarded) as place:
        answered = await asked(place, tmp_path)
        assert found(answered, place.secrets) == []

        lines = [{"custom_id": "a", "request": {"kind": "generate", "prompt": PROMPT, "max_tokens": 2}}]
        lines.append(
            {"custom_id": "b", "request": {"kind": "generate", "prompt": PROMPT, "max_tokens": PROMPT}}
        )
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        env = settings(tmp_path, guarded, "bulk")
        begun = await asyncio.to_thread(
            streamfleet, "bulk", "run", "--detach", str(source), str(tmp_path / "out.jsonl"), env=env
        )
        assert begun.returncode == 0, begun.stderr
        bulk = await asyncio.to_thread(
            streamfleet, "bulk", "worker", "--folder", str(tmp_path), "--burst", env=env, limit_s=120
        )
        assert bulk.returncode == 0, bulk.stderr

        pids = [place.gateway.process.pid, place.worker.process.pid]
        pids += [pid for one in tuple(pids) for pid in descendants(one)]
        for pid in pids:
            assert found(of_process(pid, "cmdline"), place.secrets) == [], pid
            # Nor is the URL itself in the environment, which the children get.
            assert found(of_process(pid, "environ"), PASSWORDS) == [], pid

        for process in (place.gateway, place.worker):
            process.process.terminate()
        said = [line for process in (place.gateway, place.worker) for line in process.end()[1]]
        assert len(said) > 4
        texts = "\n".join([*said, begun.stdout, begun.stderr, bulk.stdout, bulk.stderr])
        assert found(texts, place.secrets) == []
    errors = (tmp_path / "out.errors.jsonl").read_text()
    assert "b" in errors
    assert found(errors, (PROMPT, *PASSWORDS)) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_dead_letter_holds_no_prompt_unless_it_is_kept(guarded: Guarded, tmp_path: Path) -> None:
    connections = Connections.open(guarded.node.url)
    broker = DeadBroker(connections, "q")
    for keep in (False, True):
        await broker.announce(CARD, keep_payload=keep)
        await broker.create_groups()
        await broker.submit([submission(prompt=PROMPT)])
        while await begin_waiting(broker):
            await broker.hand_back("w1", crashed=True)
        (raw,) = guarded.raw.xrange(broker.keys.dead)
        assert (PROMPT in str(raw)) == keep
        env = settings(tmp_path, guarded, "operator")
        for command in (("list", "--json"), ("list",), ("show", raw[0].decode())):
            shown = await asyncio.to_thread(streamfleet, "dead", *command, env=env)
            assert shown.returncode == 0, shown.stderr
            assert found(shown.stdout + shown.stderr, (PROMPT, *PASSWORDS)) == []
        await broker.drop_dead([raw[0].decode()])
    await connections.close()


def test_errors_name_no_password() -> None:
    secret = password("x")
    for url in (
        f"redis://u:{secret}@127.0.0.1:9/0",
        f"redis://127.0.0.1:9/0?password={secret}",
        f"redis://:{secret}@127.0.0.1:9/none",
        f"http://u:{secret}@host",
        f"rediss://u:{secret}@127.0.0.1:9/0?ssl_password={secret}",
    ):
        with pytest.raises(BrokerUnavailable) as caught, reaching(url):
            connect(url).ping()
        assert secret not in str(caught.value), url
