"""HTTP as uvicorn speaks it, for clients that may mean harm: no endless head, and nobody who sends nothing.

uvicorn's protocol keeps whatever head a client sends, and waits for the rest of it for ever, and for a client
that takes nothing of its answer. It also puts what follows a body, its trailers, behind the head, without any
bound and after the head was looked at. When a connection is lost it tells the request that came last, though
one before that may still be answered. And it sends chunks to clients of HTTP/1.0, who know none.
"""

from __future__ import annotations

import asyncio
import http
import sys
from typing import Any

from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from streamfleet_producer.gateway.gathering import Gathering

SILENCE_S = 30.0
"""How long a client may take for a head, and between two parts of a body."""
STALL_S = 60.0
"""How long a client may take nothing of what is ready for it."""
LOOK_S = 5.0
LINGER_S = 1.0
"""How long a client may go on sending after a refusal."""
LINGER_BYTES = 1_048_576
"""How much of that is read, at most."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses heads over `max_header_bytes` (431), and closes connections that keep us waiting.

    What comes with a body and is none of it, trailers above all, has the same bound, and is read by nobody.

    A class attribute, since uvicorn makes one object a connection by itself: see `bounded`.
    """

    max_header_bytes = 16_384
    silence_s = SILENCE_S
    stall_s = STALL_S
    look_s = LOOK_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False
        self._since = 0.0
        """When the head that is awaited began, or the last part of a body came."""
        self._stalled_since: float | None = None
        self._answering: RequestResponseCycle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Gathering(transport, self.loop))
        self._since = self.loop.time()
        self._looking = self.loop.call_later(self.look_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._lingering is not None:
            self._lingering.cancel()
        cycle = self._answering
        if cycle is not None and cycle is not self.cycle and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if is_old else app)

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
        if self._in_body:
            self._since = self.loop.time()
        elif not self._head_bytes:
            self._since = self.loop.time()  # the next request on a connection that was idle
        self._head_bytes += len(data)
        super().data_received(data)
        # By the pieces that came: the parser keeps a header field to itself until it has the whole of it.
        if self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
            self._refuse(431)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._in_body, self._head_bytes = True, False, 0
        super().on_message_complete()

    def _refuse(self, status: int) -> None:
        if self._in_body and self.cycle.response_started:
            self.transport.abort()
            return
        phrase = http.HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        if not self.transport.can_write_eof():  # as with TLS
            self.transport.close()
            return
        # Who closes while the client still sends resets the connection, and the client may lose the answer.
        self.transport.write_eof()
        for cycle in (self._answering, self.cycle):  # nothing can be written any more
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.close)

    def _look(self) -> None:
        # What is awaited: a first head, the rest of one, or the rest of a body. Between two requests it is
        # uvicorn's own timeout that closes.
        awaited = self._in_body or self._head_bytes > 0 or self.cycle is None
        now = self.loop.time()
        if self._stalled_since is None and self.transport.is_closing():
            self._stalled_since = now  # it is closed once its last bytes are taken, however few
        is_stalled = self._stalled_since is not None and now - self._stalled_since >= self.stall_s
        if is_stalled or (awaited and now - self._since >= self.silence_s):
            self.transport.abort()
            return
        self._looking = self.loop.call_later(self.look_s, self._look)


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """An application for a client of HTTP/1.0, who knows no chunks.

    A body without a length ends with the connection there.
    """

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        is_open = False

        async def sent(message: ASGISendEvent) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    cycle.chunked_encoding = False
                    cycle.expected_content_length = sys.maxsize
            elif is_open and message["type"] == "http.response.body" and not message.get("more_body"):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sent)

    return answer


def bounded(max_header_bytes: int, silence_s: float = SILENCE_S) -> type[BoundedProtocol]:
    """The protocol with these bounds."""
    bounds = {"max_header_bytes": max_header_bytes, "silence_s": silence_s, "look_s": min(LOOK_S, silence_s)}
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
