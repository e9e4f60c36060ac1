"""`streamfleet queues`: all queues, how full they are, and who serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from streamfleet_common.connections import Connections
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_json, print_table, run, say
from streamfleet_producer.operations.operator_broker import OperatorBroker

_HEADS = ("queue", "queued", "running", "limit", "dead", "workers", "draining", "state", "model")
_RIGHT = {"queued", "running", "limit", "dead", "workers", "draining"}


def queues(
    *,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """List the queues and who serves them.

    LIMIT is how many queued and running requests a queue takes; WORKERS are those that live now, DRAINING
    those of them that take nothing new. A queue that is paused refuses new requests.
    """
    rows = run(_queues(redis_url))
    if json:
        print_json(rows)
    elif rows:
        _table(rows)
    else:
        say("no queues yet: a queue appears with its first worker")


async def _queues(redis_url: str) -> list[dict[str, Any]]:
    connections = Connections.open(redis_url)
    try:
        names = await OperatorBroker(connections, "any").queues()
        return await asyncio.gather(*(_row(OperatorBroker(connections, name)) for name in names))
    finally:
        await connections.close()


async def _row(broker: OperatorBroker) -> dict[str, Any]:
    depth, cards, control = await asyncio.gather(broker.depth(), broker.cards(), broker.control())
    draining = [card for card in cards if card.state == "draining" or card.worker in control.drains]
    return {
        "queue": broker.keys.queue,
        "queued": depth.queued,
        "running": depth.running,
        "limit": depth.limit,
        "dead": depth.dead,
        "workers": len(cards),
        "draining": len(draining),
        "state": "paused" if control.is_paused else "open",
        "models": sorted({card.model for card in cards}),
    }


def _table(rows: Sequence[dict[str, Any]]) -> None:
    shown = [{**row, "model": ", ".join(row["models"]) or "-"} for row in rows]
    print_table(_HEADS, [[str(row[name]) for name in _HEADS] for row in shown], _RIGHT)
