"""`streamfleet usage`: what each tenant has used, by day, and in all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date, datetime
from functools import reduce
from operator import add
from typing import Annotated, Any

import typer

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import ModelNotFound
from streamfleet_common.usage import Usage
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_json, print_table, run, say

_COUNTS = ("requests", "failed", "prompt_tokens", "completion_tokens", "tokens")
_HEADS = ("day", "queue", "tenant", "requests", "failed", "prompt", "completion", "tokens")
_RIGHT = set(_HEADS[3:])


def usage(
    *,
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", help="Of this queue alone; else of all.", show_default=False),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Of this tenant alone; else of all.", show_default=False)
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="From this day on; else today's alone.", show_default=False),
    ] = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Show what tenants have used: requests and tokens, by day.

    Days are those of UTC, by Redis's clock. FAILED are those of the requests that failed.
    """
    rows = run(_ledger(redis_url, queue, tenant, since.date() if since else None))
    if json:
        print_json([_shown(row) for row in rows])
    elif rows:
        _table(rows)
    else:
        say("nothing was used")


async def _ledger(redis_url: str, queue: str | None, tenant: str | None, since: date | None) -> list[Usage]:
    connections = Connections.open(redis_url)
    try:
        names = await Broker(connections, queue or "any").queues()
        if queue is not None:
            if queue not in names:
                raise ModelNotFound(
                    f"there is no queue {queue!r}: `streamfleet queues` lists them", known=names
                )
            names = [queue]
        found = await asyncio.gather(
            *(Broker(connections, name).usage(since=since, tenant=tenant) for name in names)
        )
    finally:
        await connections.close()
    return sorted((row for rows in found for row in rows), key=lambda row: (row.day, row.queue, row.tenant))


def _shown(row: Usage) -> dict[str, Any]:
    named = {"day": row.day.isoformat(), "queue": row.queue, "tenant": row.tenant}
    return {**named, **{name: getattr(row, name) for name in _COUNTS}}


def _table(rows: Sequence[Usage]) -> None:
    lines = [[row.day.isoformat(), row.queue, row.tenant, *_numbers(row)] for row in rows]
    if len(rows) > 1:
        lines.append(["all", "", "", *_numbers(reduce(add, rows))])
    print_table(_HEADS, lines, _RIGHT)


def _numbers(row: Usage) -> list[str]:
    return [f"{getattr(row, name):,}" for name in _COUNTS]
