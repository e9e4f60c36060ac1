"""`streamfleet queues`: all queues, how full they are, and who serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_json, print_table, run, say
from streamfleet_producer.client import Client

_HEADS = ("queue", "queued", "running", "limit", "dead", "workers", "model")
_RIGHT = {"queued", "running", "limit", "dead", "workers"}


def queues(
    *,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """List the queues and who serves them.

    LIMIT is how many queued and running requests a queue takes; WORKERS are those that live now.
    """
    run(_queues(redis_url, json))


async def _queues(redis_url: str, json: bool) -> None:
    async with Client(redis_url) as fleet:
        names = await fleet.queues()
    rows = await asyncio.gather(*(_row(redis_url, name) for name in names))
    if json:
        print_json(rows)
    elif rows:
        _table(rows)
    else:
        say("no queues yet: a queue appears with its first worker")


async def _row(redis_url: str, name: str) -> dict[str, Any]:
    async with Client(redis_url, name) as fleet:
        depth, cards = await asyncio.gather(fleet.depth(), fleet.models())
    return {
        "queue": name,
        "queued": depth.queued,
        "running": depth.running,
        "limit": depth.limit,
        "dead": depth.dead,
        "workers": len(cards),
        "models": sorted({card.model for card in cards}),
    }


def _table(rows: Sequence[dict[str, Any]]) -> None:
    shown = [{**row, "model": ", ".join(row["models"]) or "-"} for row in rows]
    print_table(_HEADS, [[str(row[name]) for name in _HEADS] for row in shown], _RIGHT)
