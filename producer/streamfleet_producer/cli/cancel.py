"""`streamfleet cancel`: end a request early."""

from __future__ import annotations

from streamfleet_producer.cli import options
from streamfleet_producer.cli.request_ids import named
from streamfleet_producer.cli.terminal import print_json, run


def cancel(
    id: options.Id,  # noqa: A002 (the word of the whole API)
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Cancel a request.

    Prints its state: `cancelled`, or how it had ended before.
    """
    rid, queue = named(id, queue)
    run(_cancel(redis_url, queue, rid, json))


async def _cancel(redis_url: str, queue: str | None, rid: str, json: bool) -> None:
    async with options.open_client(redis_url, queue) as fleet:
        state = await fleet.cancel(rid)
    if json:
        print_json({"id": rid, "state": state})
    else:
        print(state)
