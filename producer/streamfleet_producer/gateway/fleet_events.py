"""The events of a request as server-sent events, with ids that lead back to where somebody left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import End
from streamfleet_producer.gateway.dialects import OpenAIDialect, json_bytes
from streamfleet_producer.token_stream import EventStream
from streamfleet_producer.transcript import StreamEvent

FIRST_LOOK_S = 0.25
"""So long nothing is said of waiting: most requests are begun by then."""


class EventsDialect(OpenAIDialect):
    """OpenAI's form; amid events an error is one of them."""

    def chunk(self, error: StreamfleetError) -> bytes:
        return _event(b"error", json_bytes(self.body(error)), "")


EVENTS = EventsDialect()

Position = Callable[[], Awaitable[int | None]]


async def told(
    stream: EventStream, position: Position, *, is_queued: bool, look_s: float
) -> AsyncGenerator[bytes]:
    """All events of a stream that was entered, encoded, its end or its failure included.

    An event's `id` leads behind it, and behind all before it. One without an id belongs to the next that has
    one: whoever comes back amid them gets them again, and they begin with a `restart`.

    Args:
        stream: it.
        position: tells the place of the request in its line.
        is_queued: it waited when that was last known: `queued` events tell its place until it is begun.
        look_s: so often its place is asked for.
    """
    try:
        place, event = stream.place, None
        if is_queued:
            async with aclosing(_waited(stream, position, look_s)) as waiting:
                async for first in waiting:
                    if isinstance(first, bytes):
                        yield first
                    else:
                        event = first
        else:
            event = await stream.next_event()
        while event is not None:
            before, place = place, stream.place
            yield _encoded(event, place if place != before else "")
            event = await stream.next_event()
    except StreamfleetError as error:
        end = stream.ended
        if end is None or end.state == "done":
            yield EVENTS.chunk(error)
            return
    yield _encoded(stream.result, stream.place)


async def _waited(
    stream: EventStream, position: Position, look_s: float
) -> AsyncGenerator[bytes | StreamEvent | None]:
    """The changes of its position while it waits, then the first event, or None if there is none."""
    last: int | None = None
    pause_s = min(FIRST_LOOK_S, look_s)
    while True:
        clock = asyncio.timeout(pause_s)
        try:
            async with clock:
                event = await stream.next_event()
            yield event
            return
        except TimeoutError:
            if not clock.expired():
                raise
        now = await position()
        if now is not None and now != last:
            last = now
            yield _event(b"queued", b'{"type":"queued","position":%d}' % now, "")
        pause_s = look_s


def _encoded(event: StreamEvent | End, place: str) -> bytes:
    return _event(event.type.encode(), event.model_dump_json().encode(), place)


def _event(name: bytes, data: bytes, place: str) -> bytes:
    # No line feed is in it: JSON escapes them.
    head = b"id: %s\n" % place.encode() if place else b""
    return b"%sevent: %s\ndata: %s\n\n" % (head, name, data)
