"""What the commands for operators share: a broker of the queue, opened without a client.

A client subscribes, which the role `operator` may not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import typer

from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import InvalidRequest, ModelNotFound
from streamfleet_producer.names import listed
from streamfleet_producer.operations.operator_broker import OperatorBroker
from streamfleet_producer.operations.queue_search import queue_of

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue.", show_default=False)]


@asynccontextmanager
async def operator(
    redis_url: str, queue: str | None, *, rid: str | None = None
) -> AsyncIterator[OperatorBroker]:
    """A broker of this queue; if none is named, of the only one there is, or that knows the request `rid`.

    Raises:
        InvalidRequest: there are several queues to choose from.
        ModelNotFound: there is none.
        RequestNotFound: there are several, and none knows the request.
    """
    connections = Connections.open(redis_url)
    try:
        if queue is None:
            anybody = OperatorBroker(connections, "any")
            names = await anybody.queues()
            if not names:
                raise ModelNotFound(f"no worker has ever served a queue at {redacted(redis_url)}", known=[])
            if len(names) == 1:
                (queue,) = names
            elif rid is not None:
                queue = await queue_of(anybody, rid, names)
            else:
                raise InvalidRequest(f"there are several queues: choose one with --queue ({listed(names)})")
        yield OperatorBroker(connections, queue)
    finally:
        await connections.close()
