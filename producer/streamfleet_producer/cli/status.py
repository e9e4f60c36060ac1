"""`streamfleet status`: where a request stands."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from streamfleet_producer.cli import options
from streamfleet_producer.cli.request_ids import named
from streamfleet_producer.cli.terminal import print_json, run
from streamfleet_producer.ticket import Status


def status(
    id: options.Id,  # noqa: A002 (the word of the whole API)
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Show where a request stands.

    It is queued, running, done, failed, cancelled, expired or dead. Times are those of the Redis server.
    """
    rid, queue = named(id, queue)
    run(_status(redis_url, queue, rid, json))


async def _status(redis_url: str, queue: str | None, rid: str, json: bool) -> None:
    async with options.open_client(redis_url, queue) as fleet:
        found = await fleet.status(rid)
    if json:
        print_json(asdict(found))
        return
    for name, value in _rows(found):
        if value:
            print(f"{name:<9} {value}")


def _rows(found: Status) -> list[tuple[str, str]]:
    return [
        ("state", found.state),
        ("queue", found.queue),
        ("worker", found.worker),
        ("attempt", str(found.attempt) if found.attempt else ""),
        ("accepted", _clock(found.accepted_at_ms)),
        ("started", _clock(found.started_at_ms)),
        ("ended", _clock(found.ended_at_ms)),
        ("deadline", _clock(found.deadline_at_ms)),
    ]


def _clock(at_ms: int) -> str:
    if not at_ms:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
