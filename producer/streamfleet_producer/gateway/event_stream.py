"""A response that goes out chunk by chunk, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import cast

import structlog
from starlette.types import Receive, Scope, Send

from streamfleet_common.errors import StreamfleetError
from streamfleet_producer.gateway.dialects import Dialect

STALLED_S = 60.0
"""After so long without taking anything a client is given up."""
HEARTBEAT = b": \n\n"
OPENED = b""
"""The first thing a generator gives: its request is accepted, and from here on errors are chunks."""

log = structlog.get_logger()


class EventStream:
    """Sends what a generator gives. Used as `return await EventStream(…).opened()`.

    The generator gives `OPENED` first, once its request is accepted; what it raises before that is raised by
    `opened`, and so still has a status. What it raises later becomes a chunk in the words of `dialect`. It is
    closed when the client goes away, and not asked for more while the client does not take what it has.

    Args:
        chunks: whole events, encoded.
        dialect: how an error is said amid the stream.
        headers: further ones of the response, in lower case; asked for once the request is accepted.
        heartbeat_s: after so many seconds without a chunk a comment is sent.
        gone: called when the client has left before the end.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        dialect: Dialect,
        *,
        headers: Callable[[], dict[str, str]] = dict,
        heartbeat_s: float = 15.0,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._chunks = chunks
        self._dialect = dialect
        self._headers = headers
        self._heartbeat_s = heartbeat_s
        self._gone = gone
        self._left = False
        self._sending_since: float | None = None
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beats: set[asyncio.Task[None]] = set()

    async def opened(self) -> EventStream:
        """Wait until the request is accepted. Raises what refuses it."""
        try:
            await anext(self._chunks)
        except BaseException:
            await self._chunks.aclose()
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        task = cast("asyncio.Task[object]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch(receive, task), name="disconnect")
        self._sent_at = loop.time()
        self._beat_later(loop, send, task)
        try:
            await self._send(loop, send, self._start())
            try:
                async for chunk in self._chunks:
                    await self._send(loop, send, _body(chunk))
            except StreamfleetError as error:
                await self._send(loop, send, _body(self._dialect.chunk(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not self._left:
                raise
            task.uncancel()
            self._gone()
        finally:
            watching.cancel()
            if self._timer is not None:
                self._timer.cancel()
            for beat in self._beats:
                beat.cancel()
            await self._chunks.aclose()

    def _start(self) -> dict[str, object]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            # Proxies that gather a response before they pass it on are told not to.
            "x-accel-buffering": "no",
            **self._headers(),
        }
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": pairs}

    async def _send(self, loop: asyncio.AbstractEventLoop, send: Send, message: dict[str, object]) -> None:
        self._sending_since = loop.time()
        await send(message)
        self._sending_since = None
        self._sent_at = loop.time()

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave(task)

    def _leave(self, task: asyncio.Task[object]) -> None:
        if not self._left:
            self._left = True
            task.cancel()

    # --- silence

    def _beat_later(self, loop: asyncio.AbstractEventLoop, send: Send, task: asyncio.Task[object]) -> None:
        self._timer = loop.call_later(self._heartbeat_s / 2, self._look, loop, send, task)

    def _look(self, loop: asyncio.AbstractEventLoop, send: Send, task: asyncio.Task[object]) -> None:
        now = loop.time()
        if self._sending_since is not None:
            if now - self._sending_since >= STALLED_S:
                self._leave(task)
                return
        elif now - self._sent_at >= self._heartbeat_s / 2:
            beat = asyncio.create_task(self._beat(send), name="heartbeat")
            self._beats.add(beat)
            beat.add_done_callback(self._beats.discard)
        self._beat_later(loop, send, task)

    async def _beat(self, send: Send) -> None:
        with contextlib.suppress(OSError):
            await send(_body(HEARTBEAT))


def _body(chunk: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
