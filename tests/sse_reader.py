"""Server-sent events, read as a browser reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Sent:
    """One event; `last_id` is what a client would come back with after it."""

    name: str
    data: Any
    last_id: str


def sent_events(response: httpx.Response, last_id: str = "") -> AsyncIterator[Sent]:
    """The events of a response to a request that came with this `Last-Event-ID`."""
    return events_in(response.aiter_lines(), last_id)


async def events_in(lines: AsyncIterator[str], last_id: str = "") -> AsyncIterator[Sent]:
    """The events in lines, as the HTML standard says they are to be read. Comments are left out."""
    name = ""
    data: list[str] = []
    async for line in lines:
        if not line:
            if data:
                yield Sent(name or "message", json.loads("\n".join(data)), last_id)
            name, data = "", []
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            last_id = value


def text_of(events: list[Sent]) -> str:
    """The text that stands: what came since the last restart."""
    text = ""
    for event in events:
        if event.name == "restart":
            text = ""
        elif event.name == "delta":
            text += "".join(event.data["texts"])
    return text
