"""HTTP as uvicorn speaks it, for clients that may mean harm: no endless head, and nobody who sends nothing.

uvicorn's protocol keeps whatever head a client sends, and waits for the rest of it for ever.
"""

from __future__ import annotations

import asyncio
import http
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SILENCE_S = 30.0
"""How long a client may take for a head, and between two parts of a body."""
LOOK_S = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """Refuses heads over `max_header_bytes` (431), and closes connections that keep us waiting.

    A class attribute, since uvicorn makes one object a connection by itself: see `bounded`.
    """

    max_header_bytes = 16_384
    silence_s = SILENCE_S
    look_s = LOOK_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._in_body = False
        self._since = 0.0
        """When the head that is awaited began, or the last part of a body came."""
        self._looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._looking = self.loop.call_later(self.look_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_body:
            self._since = self.loop.time()
        elif not self._head_bytes:
            self._since = self.loop.time()  # the next request on a connection that was idle
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # By the pieces that came: the parser keeps a header field to itself until it has the whole of it.
        if self._in_head and self._head_bytes > self.max_header_bytes:
            self._refuse(431)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._in_body = True, False
        super().on_message_complete()

    def _refuse(self, status: int) -> None:
        phrase = http.HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def _look(self) -> None:
        # What is awaited: a first head, the rest of one, or the rest of a body. Between two requests it is
        # uvicorn's own timeout that closes.
        awaited = self._in_body or self._head_bytes > 0 or self.cycle is None
        if awaited and self.loop.time() - self._since >= self.silence_s:
            self.transport.abort()
            return
        self._looking = self.loop.call_later(self.look_s, self._look)


def bounded(max_header_bytes: int, silence_s: float = SILENCE_S) -> type[BoundedProtocol]:
    """The protocol with these bounds."""
    bounds = {"max_header_bytes": max_header_bytes, "silence_s": silence_s, "look_s": min(LOOK_S, silence_s)}
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
