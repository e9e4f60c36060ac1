"""`streamfleet result`: fetch the answer of a request that was submitted before."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_choices, print_json, printable, run

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
    """Print the answer of a submitted request, once it is there."""
    run(_result(redis_url, queue, id, timeout, json))


async def _result(redis_url: str, queue: str | None, rid: str, limit_s: float | None, json: bool) -> None:
    async with options.open_client(redis_url, queue) as fleet:
        end = await fleet.result(rid, timeout=limit_s)
        if json:
            print_json(end.model_dump(mode="json"))
        elif len(end.choices) > 1:
            print_choices([choice.text for choice in end.choices])
        else:
            print(printable(end.text) if sys.stdout.isatty() else end.text)
