"""`streamfleet explain`: what became of a request, and where its time went."""

from __future__ import annotations

import sys
from typing import Any

from streamfleet_producer.cli import options
from streamfleet_producer.cli.operating import operator
from streamfleet_producer.cli.request_ids import named
from streamfleet_producer.cli.terminal import print_json, run
from streamfleet_producer.operations.advice import advice
from streamfleet_producer.operations.flight import Flight, gather
from streamfleet_producer.operations.flight_story import story
from streamfleet_producer.operations.phases import percentages, phases_of


def explain(
    id: options.Id,  # noqa: A002 (the word of the whole API)
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Explain what became of a request, whoever sent it.

    Where its time went, which batch it ran in and why that was launched just then, who else was in it, what
    came of earlier attempts. Of one that waits: its place in line, and who serves it. Of one without an
    answer: why, and what to do. Neither prompt nor answer is shown.
    """
    rid, its_queue = named(id, queue)

    async def work() -> Flight:
        async with operator(redis_url, its_queue, rid=rid) as broker:
            return await gather(broker, rid)

    flight = run(work())
    if json:
        print_json(document(flight))
        return
    for line in story(flight, full=_full()):
        print(line)


def document(flight: Flight) -> dict[str, Any]:
    """All of it for scripts; times are milliseconds, absolute ones on the server's clock."""
    record, end, line = flight.record, flight.end, flight.line
    phases = [] if end is None else phases_of(end)
    shares = percentages([phase.ms for phase in phases])
    return {
        "id": flight.id,
        "queue": flight.queue,
        "tenant": record.tenant,
        "state": record.state,
        "accepted_at_ms": record.accepted_at_ms,
        "started_at_ms": record.started_at_ms,
        "ended_at_ms": record.end.times[2] if record.end is not None else 0,
        "deadline_at_ms": record.deadline_at_ms,
        "phases": [
            {"name": phase.name, "ms": round(phase.ms, 3), "percent": share}
            for phase, share in zip(phases, shares, strict=True)
        ],
        "batch": None if end is None or end.batch is None else end.batch.model_dump(mode="json"),
        "neighbours": None
        if flight.note is None
        else {"count": flight.neighbour_count, "ids": list(flight.neighbours)},
        "attempts": record.attempts,
        "crashes": record.crashes,
        "starts": None
        if flight.starts is None
        else [{"worker": start.worker, "at_ms": start.started_at_ms} for start in flight.starts],
        "usage": None if end is None else end.usage.model_dump(mode="json"),
        "model": "" if end is None else end.model,
        "revision": "" if end is None else end.revision,
        "worker": record.owner if end is None else end.worker,
        "error": None if end is None or end.error is None else end.error.model_dump(mode="json"),
        "advice": "" if record.end is None else advice(flight),
        "lane": record.lane,
        "line": None
        if line is None
        else {"lane": line.lane, "place": line.place, "waiting": line.waiting, "others": dict(flight.others)},
        "next_try_at_ms": flight.next_try_at_ms,
        "is_paused": flight.is_paused,
        "workers": {"ready": list(flight.ready), "draining": list(flight.draining)},
    }


def _full() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"
