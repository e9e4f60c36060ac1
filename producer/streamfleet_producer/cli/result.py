"""`streamfleet result`: fetch the answer of a request that was submitted before."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from streamfleet_common.schemas import End
from streamfleet_producer.cli import options
from streamfleet_producer.cli.request_ids import named
from streamfleet_producer.cli.terminal import print_choices, print_json, printable, run
from streamfleet_producer.cli.worker_watch import WorkerWatch

Timeout = Annotated[
    float | None,
    typer.Option(min=0.0, help="Wait so many seconds at most; the request goes on.", show_default=False),
]


def result(
    id: options.Id,  # noqa: A002 (the word of the whole API)
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    timeout: Timeout = None,
    json: options.Json = False,
) -> None:
    """Print the answer of a submitted request, once it is there.

    That is its text, or of other requests JSON: a handler's output, or a line for each item.
    """
    rid, queue = named(id, queue)
    run(_result(redis_url, queue, rid, timeout, json))


async def _result(redis_url: str, queue: str | None, rid: str, limit_s: float | None, json: bool) -> None:
    async with options.open_client(redis_url, queue) as fleet:
        async with WorkerWatch(fleet):
            end = await fleet.result(rid, timeout=limit_s)
        if json:
            print_json(_document(end))
        elif len(end.choices) > 1:
            print_choices([choice.text for choice in end.choices])
        elif end.choices:
            print(printable(end.text) if sys.stdout.isatty() else end.text)
        elif end.outputs:
            print_json(end.output)
        else:
            document = _document(end)
            for name in ("embeddings", "classifications", "ranking", "answers"):
                for one in document[name]:
                    print_json(one)


def _document(end: End) -> dict[str, Any]:
    vectors = [embedding.numbers for embedding in end.embeddings]
    return {**end.model_dump(mode="json", exclude={"embeddings"}), "embeddings": vectors}
