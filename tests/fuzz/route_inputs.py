"""Hostile requests for every route of the gateway: no crash, no hang, no endless memory, nothing left open.

    python tests/fuzz/route_inputs.py [--inputs 10000] [--seed 1]

The gateway is called as an ASGI application, over a real server and a worker with the scripted engine, so
that what is valid is answered. A status of 500 is right where the engine was told to fail, and nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog
from starlette.applications import Starlette

# Run as a script, only its own folder is found.
sys.path.insert(0, str(Path(__file__).parents[1]))

from gated_engine import GatedEngine
from hired import Hired
from mutation import Mutation
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer.gateway.app import OPERATIONS, application
from streamfleet_producer.gateway.operation import Operation
from streamfleet_producer.gateway.settings import GatewaySettings

HANG_S = 60.0
RID = "q:00" + "0" * 32
GENERATE = {"kind": "generate", "prompt": "ECHO 3", "max_tokens": 4}
TURN = {"role": "user", "content": "ECHO 2"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
BODIES: dict[str, Any] = {
    "/v1/completions": {
        "model": "q",
        "prompt": ["ECHO 2", "ECHO 1"],
        "n": 2,
        "best_of": 2,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "logit_bias": {"1": 2},
        "logprobs": 1,
        "seed": 3,
        "stream": False,
        "user": "u",
        "echo": False,
        "suffix": None,
    },
    "/v1/chat/completions": {
        "model": "q",
        "messages": [{"role": "system", "content": "s"}, TURN],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "max_completion_tokens": 4,
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "seed": 1,
    },
    "/v1/embeddings": {"model": "q", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 3},
    "/v1/requests": {"queue": "q", "request": GENERATE, "stream": True},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"], "top_n": 1},
    "/v1/classify": {"texts": ["a", "b"], "top_k": 1},
    "/v1/decide": {"state": "s", "questions": [{"id": "1", "criteria": "c", "options": ["yes", "no"]}]},
    "/v1/handlers/{name}": {"x": [1, 2.5, None, {"y": "z"}]},
    "/v1/batches": {
        "input_file_id": "file-" + "0" * 32,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    "/generate": {
        "inputs": "ECHO 3",
        "parameters": {
            "max_new_tokens": 4,
            "details": True,
            "top_n_tokens": 2,
            "temperature": 0.5,
            "do_sample": True,
            "seed": 1,
            "stop": ["x"],
            "decoder_input_details": True,
        },
    },
}
BODIES |= {"/generate_stream": BODIES["/generate"], "/": {**BODIES["/generate"], "stream": False}}
HEADERS = (
    *((b"content-type", b"application/json"), (b"accept", b"text/event-stream"), (b"x-lane", b"bulk")),
    *((b"x-lane", b"\xff"), (b"x-request-timeout", b"nan"), (b"x-request-timeout", b"-1")),
    *((b"x-request-timeout", b"1e400"), (b"idempotency-key", b"k"), (b"idempotency-key", b"x" * 300)),
    *((b"last-event-id", b"1-2"), (b"last-event-id", b"9" * 400), (b"authorization", b"Bearer \xff")),
    *(
        (b"traceparent", b"0" * 55),
        (b"content-length", b"-1"),
        (b"content-type", b"multipart/form-data; boundary="),
    ),
)
PARTS = (
    "q",
    RID,
    "chatcmpl-" + RID,
    "x",
    "..",
    "%00",
    "a/b",
    "é",
    "file-" + "0" * 32,
    "batch_" + "0" * 32,
    "9" * 5000,
)
QUERIES = (
    b"",
    b"wait=0.01",
    b"wait=nan",
    b"wait=1e9",
    b"limit=0",
    b"limit=99999999999",
    b"after=x",
    b"last_event_id=1-1",
    b"%ff=%ff",
    b"order=up",
)


class Attack:
    """Requests of all operations, told by a seed, one after the other."""

    def __init__(self, app: Starlette, seed: int) -> None:
        self._app = app
        self._mutation = Mutation(seed)
        self._operations = list(OPERATIONS)
        self.statuses: Counter[int] = Counter()

    async def one(self) -> None:
        """Send one, and judge its answer.

        Raises:
            AssertionError: a status that is not ours on purpose, or an answer that is none.
        """
        operation = self._mutation.one_of(self._operations)
        body = self._body(operation)
        status, content = await self._send(operation, self._path(operation), body)
        self.statuses[status] += 1
        where = f"{operation.method} {operation.path} with {body[:2000]!r}"
        if status == 500:
            # The scripted engine fails where a prompt tells it to, and a changed one may.
            assert b"generation_failed" in content or b"generation" in content, f"{where}: {content!r}"
            assert b"the gateway failed" not in content, where
        else:
            assert status in STATUSES, f"{where}: status {status}, {content[:500]!r}"
        if status >= 400 and operation.path != "/static/{name}":
            assert "error" in json.loads(content), f"{where}: {content[:500]!r}"

    def _path(self, operation: Operation) -> str:
        path = operation.path
        for place in ("{model:path}", "{id}", "{name}", "{file_id}", "{batch_id}"):
            path = path.replace(place, quote(self._mutation.one_of(PARTS), safe="%/"))
        return path

    def _body(self, operation: Operation) -> bytes:
        good = BODIES.get(operation.path)
        if good is None:
            return b"" if self._mutation.happens(0.5) else self._mutation.data(b"--x\r\n\r\n--x--")
        if self._mutation.happens(0.1):
            return json.dumps(good).encode()
        data = json.dumps(self._mutation.value(good)).encode()
        return self._mutation.data(data) if self._mutation.happens(0.3) else data

    async def _send(self, operation: Operation, path: str, body: bytes) -> tuple[int, bytes]:
        headers = [(b"host", b"x"), (b"x-request-timeout", b"20")]
        while self._mutation.happens(0.4):
            headers.append(self._mutation.one_of(HEADERS))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": operation.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": self._mutation.one_of(QUERIES),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        leaves = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        if self._mutation.happens(0.1):
            # Gone at once, or in the middle of the body.
            messages = messages[:0] if self._mutation.happens(0.5) else [{**messages[0], "more_body": True}]
            leaves.set()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await leaves.wait()
            return {"type": "http.disconnect"}

        status, content = 0, b""

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, content
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                content += message.get("body", b"")
                if not message.get("more_body", False):
                    leaves.set()

        async with asyncio.timeout(HANG_S):
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        if status == 0:
            assert leaves.is_set(), f"no answer: {operation.method} {path}"
            status = 499
            content = b'{"error": null}'
        return status, content


STATUSES = frozenset({200, 202, 400, 404, 405, 409, 413, 422, 424, 429, 431, 499, 503, 504})


async def run(redis_url: str, inputs: int, seed: int) -> dict[str, Any]:
    """All inputs; gives what became of them, and what was left open."""
    failures: list[Any] = []

    def note(_logger: Any, _method: str, event: Any) -> Any:
        if event.get("exc_info") or event.get("event") == "the gateway failed on a request":
            failures.append((event, sys.exc_info()[1]))
        raise structlog.DropEvent

    structlog.configure(processors=[note])
    hired = await Hired(redis_url, "w", GatedEngine(max_batch_size=64), max_queue_depth=100_000).start()
    with tempfile.TemporaryDirectory() as folder:
        app = application(
            GatewaySettings(redis_url=redis_url, files_dir=Path(folder), max_file_bytes=100_000)
        )
        async with app.router.lifespan_context(app):
            attack = Attack(app, seed)
            for _ in range(min(500, inputs)):
                await attack.one()
            gc.collect()
            tasks, before = len(asyncio.all_tasks()), _memory()
            for _ in range(max(0, inputs - 500)):
                await attack.one()
            services = app.state.services
            depth = services.directory.broker("q").depth
            async with asyncio.timeout(HANG_S):
                while (left := await depth()).open:  # noqa: ASYNC110 (the server has no event for it)
                    await asyncio.sleep(0.05)
            found = {
                "inputs": inputs,
                "statuses": dict(sorted(attack.statuses.items())),
                "grown_kib": _memory() - before,
                "new_tasks": len(asyncio.all_tasks()) - tasks,
                "open_http": services.metrics.open_requests,
                "open_requests": left.open,
                "failures": [repr(failure)[:2000] for failure in failures],
            }
    await hired.dismiss()
    return found


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Hostile requests for the gateway's routes.")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with EmbeddedBroker() as broker:
        found = asyncio.run(run(broker.url, options.inputs, options.seed))
    print(json.dumps(found, indent=2), f"\n{time.monotonic() - began:.0f} s")
    if found["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
