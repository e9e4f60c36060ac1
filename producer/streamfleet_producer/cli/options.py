"""Options that several commands share, one name and one help text each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import InvalidRequest, ModelNotFound, Unsupported
from streamfleet_common.schemas import Lane
from streamfleet_common.secret_files import secret_of
from streamfleet_common.settings import FleetSettings, read
from streamfleet_producer.client import Client
from streamfleet_producer.names import MOST_NAMES, listed

DEFAULT_URL = "redis://localhost:6379/0"
CLOSE_S = 1.0
"""How long a command that ends tries to reach a Redis that is away: somebody has pressed Ctrl-C."""
MOST_QUEUES = 1000
"""So many are looked at for one that does what is asked."""
AT_ONCE = 16


def _from_file(value: str) -> str:
    # Whatever was said, and be it the default, was said instead.
    return value if value != DEFAULT_URL else secret_of("STREAMFLEET_REDIS_URL") or value


RedisUrl = Annotated[
    str,
    typer.Option("--redis-url", envvar="STREAMFLEET_REDIS_URL", help="Where Redis is.", callback=_from_file),
]
Queue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        "-q",
        envvar="STREAMFLEET_QUEUE",
        help="The queue; else the only one, or the only one that serves this now.",
        show_default=False,
    ),
]
Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The request's id, as `submit` printed it, or as a gateway shows it.",
        show_default=False,
    ),
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
async def open_client(
    redis_url: str, queue: str | None, *, kind: str | None = None, model: str | None = None
) -> AsyncIterator[Client]:
    """A client of the queue; if none is named of the only one there is, or that does this work now.

    `kind` and `model` say what will be asked for: "call" and a handler's name, say. If the queue does not do
    it, the error says where it was asked, and which queue does.

    Raises:
        InvalidRequest: there are several queues to choose from.
        ModelNotFound: there is none.
    """
    wish = None if kind is None else Wish(kind, model)
    if queue is None:
        queue = await _only_queue(redis_url, wish)
    client = await Client(redis_url, queue, durability=read(FleetSettings).durability).open()
    try:
        yield client
    except (ModelNotFound, Unsupported) as error:
        if wish is None or any(map(wish.suits, await client.models())):
            raise
        others = await wish.queues(redis_url, await client.queues())
        does = f"; queue {' and '.join(map(repr, others[:MOST_NAMES]))} does it" if others else ""
        raise type(error)(
            f"{error.message} (asked at {redacted(redis_url)}{does})", **error.details
        ) from None
    finally:
        await client.close(within_s=CLOSE_S)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a queue: a kind of work, by any model or by this one (or by this handler)."""

    kind: str
    model: str | None

    def suits(self, card: Card) -> bool:
        return self.kind in card.tasks and self.model in (None, card.model)

    async def queues(self, redis_url: str, names: Sequence[str]) -> list[str]:
        """Those of some queues, of `MOST_QUEUES` at most, that do it now."""
        suiting: list[str] = []
        connections = Connections.open(redis_url)
        try:
            for start in range(0, min(len(names), MOST_QUEUES), AT_ONCE):
                some = names[start : min(start + AT_ONCE, MOST_QUEUES)]
                cards = await asyncio.gather(*(Broker(connections, name).cards() for name in some))
                suiting += [
                    name for name, found in zip(some, cards, strict=True) if any(map(self.suits, found))
                ]
        finally:
            await connections.close()
        return suiting


async def _only_queue(redis_url: str, wish: Wish | None) -> str:
    async with Client(redis_url) as anybody:
        names = await anybody.queues()
    if not names:
        raise ModelNotFound(
            f"no worker has ever served a queue at {redacted(redis_url)}: "
            "start one with `streamfleet up`, or check the URL",
            known=[],
        )
    if len(names) == 1:
        return names[0]
    why = "there are several queues"
    if wish is not None:
        suiting = await wish.queues(redis_url, names)
        if len(suiting) == 1 and len(names) <= MOST_QUEUES:
            return suiting[0]
        looked = min(len(names), MOST_QUEUES)
        does = "do" if len(suiting) > 1 else "does"
        why += f", and {len(suiting) or 'none'} of the {looked:,} looked at {does} this now"
        names = suiting or names
    raise InvalidRequest(f"{why}: choose one with --queue ({listed(names)})")
