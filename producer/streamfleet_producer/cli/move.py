"""`streamfleet move`: waiting requests to another lane."""

from __future__ import annotations

from typing import Annotated

import typer

from streamfleet_common.schemas import Lane
from streamfleet_producer.cli import options
from streamfleet_producer.cli.operating import QueueName, operator
from streamfleet_producer.cli.request_ids import named
from streamfleet_producer.cli.terminal import FAILED, print_json, run, say
from streamfleet_producer.operations import lanes
from streamfleet_producer.operations.lanes import Moves


def move(
    queue: QueueName,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="These; else all that --from names.", show_default=False),
    ] = None,
    *,
    to: Annotated[Lane, typer.Option("--to", help="Where they shall wait.", show_default=False)],
    source: Annotated[
        Lane | None,
        typer.Option(
            "--from", help="Those that wait here alone; needed if no ID is given.", show_default=False
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Those of this tenant alone.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many, the next ones first.", show_default=False)
    ] = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Move waiting requests to another lane.

    They go behind those that wait there. What a worker has is left alone. What came back from a worker stays
    before the newcomers, and what waits for its next try comes back to the other lane. Prints how many were
    moved. If requests were named and one was not moved, the exit status is 1.
    """
    rids = [named(id, queue)[0] for id in ids or ()]  # noqa: A001 (the word of the whole API)

    async def work() -> Moves:
        async with operator(redis_url, queue) as broker:
            return await lanes.move(broker, to=to, source=source, tenant=tenant, limit=limit, rids=rids)

    found = run(work())
    if json:
        print_json({"queue": queue, "from": source, "to": to, "moved": found.moved, "left": found.left})
    else:
        print(f"moved {len(found.moved):,} to {to}")
        if found.left:
            say(f"left where they are: {found.words}")
    if ids and found.left:
        raise typer.Exit(FAILED)
