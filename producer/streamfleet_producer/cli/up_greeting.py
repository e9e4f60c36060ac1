"""What `streamfleet up` says once all is ready: where to point a client, and what to try."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamfleet_common.connections import redacted
from streamfleet_producer.cli.example_input import example_input
from streamfleet_producer.cli.options import DEFAULT_URL
from streamfleet_producer.cli.terminal import program
from streamfleet_producer.client import Client

HOST = "127.0.0.1"
QUESTION = "What is the capital of France?"
TEXT = "A text of yours"
UNKNOWN = '"…"'

Line = tuple[str, str]
"""Words and their style."""


@dataclass(frozen=True, slots=True)
class Example:
    """Something that the workers can answer.

    `wanted` is an input of the handler, as JSON, if it is one that they serve.
    """

    task: str
    queue: str
    model: str
    wanted: str = UNKNOWN

    @classmethod
    async def of(cls, url: str, queue: str, facts: Mapping[str, Any]) -> Example:
        """For workers that serve a queue; `facts` is what one has logged of itself when it was ready."""
        task, model = str(facts["tasks"][0]), str(facts["model"])
        if task != "call":
            return cls(task, queue, model)
        async with Client(url, queue) as fleet:
            return cls(task, queue, model, example_input(await fleet.models(), model) or UNKNOWN)

    def command(self) -> str:
        """The arguments of `streamfleet`, but for queue and URL."""
        match self.task:
            case "call":
                return f"call {shlex.quote(self.model)} {shlex.quote(self.wanted)}"
            case "embed" | "classify":
                return f'{self.task} "{TEXT}"'
            case "rerank":
                return 'rerank "a query" documents.txt'
            case _:
                return f'stream "{QUESTION}"'

    def request(self) -> tuple[str, str]:
        """The path and the body of a POST."""
        match self.task:
            case "call":
                return f"/v1/handlers/{self.model}", self.wanted
            case "embed":
                return "/v1/embeddings", self._body(input=TEXT)
            case "classify":
                return "/v1/classify", self._body(texts=[TEXT])
            case "rerank":
                return "/v1/rerank", self._body(query="a query", documents=["a document", "another"])
            case _:
                return "/v1/chat/completions", self._body(
                    messages=[{"role": "user", "content": QUESTION}], temperature=0
                )

    def _body(self, **fields: object) -> str:
        return json.dumps({"model": self.queue, **fields}, ensure_ascii=False)


def greeting(url: str, example: Example, gateway: str | None, *, wants_keys: bool = False) -> Iterator[Line]:
    """The lines to print.

    Args:
        url: of the broker.
        example: what to try.
        gateway: the URL of the gateway, without a slash at its end; None if there is none.
        wants_keys: requests to it have to bring an API key.
    """
    here = local(url)
    ask = f"{program()} {example.command()} --queue {example.queue}"
    if here != os.environ.get("STREAMFLEET_REDIS_URL", DEFAULT_URL):
        ask += f" --redis-url {shlex.quote(redacted(here))}"
    yield "", ""
    yield "Ready. Point a client at", ""
    yield f"  url     {redacted(here)}", ""
    yield f"  queue   {example.queue}", ""
    if gateway is not None:
        yield f"  openai  {local(gateway)}/v1", ""
        yield f"  page    {local(gateway)}", ""
    yield "and try, in a second terminal,", ""
    yield f"  {ask}", "cyan"
    if gateway is not None:
        path, body = example.request()
        key = " -H 'Authorization: Bearer KEY'" if wants_keys else ""
        yield f"  curl {local(gateway)}{path}{key} -d {shlex.quote(body)}", "cyan"
    yield "Ctrl-C ends all.", "dim"


def local(url: str) -> str:
    """The URL as a person types it."""
    return url.replace(f"//{HOST}:", "//localhost:").replace("//0.0.0.0:", "//localhost:")
