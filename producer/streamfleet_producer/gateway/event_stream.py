"""A response that goes out chunk by chunk, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import cast

from starlette.types import Receive, Scope, Send

from streamfleet_common.errors import StreamfleetError
from streamfleet_producer.gateway.dialects import Dialect
from streamfleet_producer.gateway.failures import failure_of
from streamfleet_producer.gateway.passage import Passage
from streamfleet_producer.gateway.refusals import ENDING, Ending

STALLED_S = 60.0
"""After so long without taking anything a client is given up."""
HEARTBEAT = b": \n\n"
OPENED = b""
"""From here on errors are chunks, though there is nothing to be sent yet."""


class EventStream:
    """Sends what a generator gives. Used as `return await EventStream(…).opened()`.

    What the generator raises before it gives anything is raised by `opened`, and so still has a status; what
    it raises later becomes a chunk in the words of `dialect`. `OPENED`, which is empty, opens the stream as
    well, and is not sent. The generator is closed when the client goes away, and not asked for more while the
    client does not take what it has.

    Args:
        chunks: whole events, encoded.
        dialect: how an error is said amid the stream.
        headers: further ones of the response, in lower case; asked for once the stream is opened.
        heartbeat_s: after so many seconds without a chunk a comment is sent.
        stalled_s: a client that takes nothing for so many seconds is given up.
        gone: called when the client has left before the end.
        passage: is told what goes wrong.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        dialect: Dialect,
        *,
        headers: Callable[[], dict[str, str]] = dict,
        heartbeat_s: float = 15.0,
        stalled_s: float = STALLED_S,
        gone: Callable[[], None] = lambda: None,
        passage: Passage | None = None,
    ) -> None:
        self._chunks = chunks
        self._dialect = dialect
        self._headers = headers
        self._heartbeat_s = heartbeat_s
        self._stalled_s = stalled_s
        self._gone = gone
        self._passage = Passage("GET", "") if passage is None else passage
        self._first = OPENED
        self._left = False
        self._sent_at = 0.0
        self._sending_since: dict[str, float] = {}
        """Sends that have not returned: of the stream itself, and of a heartbeat."""
        self._timer: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None

    async def opened(self) -> EventStream:
        """Wait for the first chunk. Raises what comes in its place."""
        try:
            self._first = await anext(self._chunks, OPENED)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Give up a stream that is not sent."""
        await self._chunks.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        task = cast("asyncio.Task[object]", asyncio.current_task())
        asked_before = task.cancelling()
        loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch(receive, task), name="disconnect")
        self._sent_at = loop.time()
        self._look_later(loop, send, task)
        try:
            await self._send_all(send)
        except asyncio.CancelledError:
            # The server may end at the same time; then that counts.
            if not self._left or task.cancelling() > asked_before + 1:
                raise
        finally:
            # Before anything is waited for, so that nobody cancels what is cleaned up.
            watching.cancel()
            if self._timer is not None:
                self._timer.cancel()
            if self._beating is not None:
                self._beating.cancel()
            if self._left:
                task.uncancel()
                self._gone()
            await self.aclose()

    async def _send_all(self, send: Send) -> None:
        await self._send(send, self._start())
        try:
            if self._first:
                await self._send(send, _body(self._first))
            async for chunk in self._chunks:
                if chunk:
                    await self._send(send, _body(chunk))
        except StreamfleetError as error:
            await self._send_last(send, error)
        except asyncio.CancelledError:
            if self._left:
                raise
            # The server ends, and waits for nobody any more.
            await self._send_last(send, Ending(ENDING))
        except Exception as error:  # noqa: BLE001 (whatever it is, the client has to be told)
            await self._send_last(send, failure_of(error, self._passage.about()))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_last(self, send: Send, error: StreamfleetError) -> None:
        self._passage.failed(error)
        await self._send(send, _body(self._dialect.chunk(error)))

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

    async def _send(self, send: Send, message: dict[str, object], who: str = "stream") -> None:
        now = asyncio.get_running_loop().time
        self._sending_since[who] = now()
        try:
            await send(message)
        finally:
            del self._sending_since[who]
        self._sent_at = now()

    async def _watch(self, receive: Receive, task: asyncio.Task[object]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave(task)

    def _leave(self, task: asyncio.Task[object]) -> None:
        if not self._left:
            self._left = True
            task.cancel()

    # --- silence

    def _look_later(self, loop: asyncio.AbstractEventLoop, send: Send, task: asyncio.Task[object]) -> None:
        pause_s = min(self._heartbeat_s, self._stalled_s) / 2
        self._timer = loop.call_later(pause_s, self._look, loop, send, task)

    def _look(self, loop: asyncio.AbstractEventLoop, send: Send, task: asyncio.Task[object]) -> None:
        now = loop.time()
        if self._sending_since:
            # Whoever takes nothing is sent no heartbeat either: those would only pile up.
            if now - min(self._sending_since.values()) >= self._stalled_s:
                self._leave(task)
                return
        elif now - self._sent_at >= self._heartbeat_s / 2:
            self._beating = asyncio.create_task(self._beat(send), name="heartbeat")
        self._look_later(loop, send, task)

    async def _beat(self, send: Send) -> None:
        with contextlib.suppress(OSError):
            await self._send(send, _body(HEARTBEAT), "heartbeat")


def _body(chunk: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
