"""Options that several commands share, one name and one help text each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from streamfleet_common.connections import redacted
from streamfleet_common.errors import InvalidRequest, ModelNotFound
from streamfleet_common.schemas import Lane
from streamfleet_common.settings import FleetSettings, read
from streamfleet_producer.client import Client

DEFAULT_URL = "redis://localhost:6379/0"

RedisUrl = Annotated[
    str,
    typer.Option("--redis-url", envvar="STREAMFLEET_REDIS_URL", help="Where Redis is."),
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        envvar="STREAMFLEET_QUEUE",
        help="The queue; if there is only one, that one.",
        show_default=False,
    ),
]
Id = Annotated[
    str, typer.Argument(metavar="ID", help="The request's id, as `submit` printed it.", show_default=False)
]
QueueLane = Annotated[Lane, typer.Option("--lane", help="How urgent it is.")]
Deadline = Annotated[float, typer.Option("--deadline", help="Seconds after which it is given up.")]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(help="Sent twice with the same key, it runs once.", show_default=False),
]


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["json"] = value  # errors are said as JSON then, too
    return value


Json = Annotated[bool, typer.Option("--json", help="JSON, for scripts.", callback=_remember)]
JsonErrors = Annotated[bool, typer.Option("--json", help="Say errors as JSON too.", callback=_remember)]
"""Of a command whose results are JSON always."""


@asynccontextmanager
async def open_client(redis_url: str, queue: str | None) -> AsyncIterator[Client]:
    """A client of the queue, or of the only queue there is.

    Raises:
        InvalidRequest: there are several queues to choose from.
        ModelNotFound: there is none.
    """
    if queue is None:
        async with Client(redis_url) as anybody:
            names = await anybody.queues()
        if not names:
            raise ModelNotFound(
                f"no worker has ever served a queue at {redacted(redis_url)}: "
                "start one with `streamfleet up`, or check the URL",
                known=[],
            )
        if len(names) > 1:
            raise InvalidRequest(f"there are several queues: choose one with --queue ({', '.join(names)})")
        queue = names[0]
    async with Client(redis_url, queue, durability=read(FleetSettings).durability) as client:
        yield client
