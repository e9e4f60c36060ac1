"""The client for programs without an event loop: the same methods, without `await`.

::

    with Client("redis://localhost:6379/0", queue="smollm2") as fleet:
        with fleet.stream(GenerateRequest(prompt="The capital of France is", max_tokens=32)) as tokens:
            for delta in tokens:
                print(delta.text, end="")

It is a thin face over the async client, which runs on an event loop in a thread of its own; there is no
second protocol.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, overload

from streamfleet_common.cards import Card
from streamfleet_common.depth import Depth
from streamfleet_common.errors import Cancelled, StreamfleetError
from streamfleet_common.schemas import Delta, End, GenerateRequest, Request, State
from streamfleet_common.settings import Durability
from streamfleet_producer import client as asynchronous
from streamfleet_producer import token_stream
from streamfleet_producer.blocking_one_shot import OneShot
from streamfleet_producer.event_reader import MAX_BYTES, MAX_FRAMES
from streamfleet_producer.ticket import Options, Status, Ticket
from streamfleet_producer.token_counter import TokenCounter
from streamfleet_producer.transcript import StreamEvent

_T = TypeVar("_T")


class Settings(TypedDict, total=False):
    """What the async `Client` takes by keyword."""

    tenant: str
    secret: bytes | str | None
    max_request_bytes: int
    max_connections: int
    silence_s: float
    grace_s: float
    outage_s: float
    card_life_s: float
    durability: Durability
    tokenizer: TokenCounter | str | Path | None


class LoopThread:
    """An event loop in a thread, for callers in any other thread of the same process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ended = False
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a program that forgets to close the client can still end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="streamfleet", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def is_ours(self) -> bool:
        """Whether the thread is one of this process: a fork does not take it along."""
        return self._process == os.getpid()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine there and wait for what it gives or raises.

        Raises:
            RuntimeError: from another process, from the loop's own thread, or after the end.
            Cancelled: the client was closed meanwhile.
        """
        try:
            future = self._begin(work)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed while this was waited for") from None
        except BaseException:
            # Ctrl-C comes to the waiting thread; the work must not go on without it.
            future.cancel()
            raise

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, cancel what is left, end the thread."""
        with self._lock:
            if self._ended:
                last.close()
                return
            self._ended = True
            future = asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        try:
            future.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            await last
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if not self.is_ours:
            raise RuntimeError(
                "this client was opened before a fork, and its thread stayed with the parent: "
                "open a new one in each process"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "the blocking client cannot be called from its own event loop: use the async client there"
            )
        with self._lock:
            if self._ended:
                raise RuntimeError("the client is closed: open it again")
            return asyncio.run_coroutine_threadsafe(work, self._loop)


class EventStream:
    """What `TokenStream` and `PartStream` share."""

    def __init__(self, thread: LoopThread, tokens: token_stream.EventStream) -> None:
        self._thread = thread
        self._tokens = tokens

    @property
    def id(self) -> str:
        return self._tokens.id

    @property
    def ticket(self) -> Ticket:
        return self._tokens.ticket

    @property
    def result(self) -> End:
        return self._tokens.result

    @property
    def place(self) -> str:
        return self._tokens.place

    @property
    def ended(self) -> End | None:
        return self._tokens.ended

    def wait(self) -> End:
        return self._thread.call(self._tokens.wait())

    def events(self) -> Iterator[StreamEvent]:
        while (event := self._thread.call(self._tokens.next_event())) is not None:
            yield event

    def __enter__(self) -> Self:
        self._thread.call(self._tokens.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.ended:
            self._thread.call(self._tokens.__aexit__(kind, error, trace))


class TokenStream(EventStream):
    """One request's events; `with` it, then iterate. All else is said at the async `TokenStream`."""

    def __init__(self, thread: LoopThread, tokens: token_stream.TokenStream) -> None:
        super().__init__(thread, tokens)
        self._deltas = tokens

    def __iter__(self) -> Iterator[Delta]:
        while (delta := self._thread.call(_next(self._deltas))) is not None:
            yield delta[0]


class PartStream(EventStream):
    """What a handler gives; `with` it, then iterate. All else is said at the async `PartStream`."""

    def __init__(self, thread: LoopThread, parts: token_stream.PartStream) -> None:
        super().__init__(thread, parts)
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        while (part := self._thread.call(_next(self._parts))) is not None:
            yield part[0]


class Client(OneShot):
    """Submits requests to one queue and reads their answers; `with` it, or `open` and `close`.

    Every method is that of the async `Client`, with its arguments, its results and its errors. Safe for
    any number of threads of one process; a fork needs a client of its own.
    """

    def __init__(
        self, url: str = "redis://localhost:6379/0", queue: str = "default", **settings: Unpack[Settings]
    ) -> None:
        self._client = asynchronous.Client(url, queue, **settings)
        self._thread: LoopThread | None = None

    def open(self) -> Self:
        """Start the thread; nothing connects before it is used."""
        if self._thread is None:
            self._thread = LoopThread()
            try:
                self._thread.call(self._client.open())
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """Close the connections and end the thread. Whoever still waits gets `Cancelled`."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_ours:
            thread.end(self._client.close())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self,
        request: GenerateRequest,
        *,
        idempotency_key: str | None = None,
        max_buffered_frames: int = MAX_FRAMES,
        max_buffered_bytes: int = MAX_BYTES,
        **options: Unpack[Options],
    ) -> TokenStream:
        tokens = self._client.stream(
            request,
            idempotency_key=idempotency_key,
            max_buffered_frames=max_buffered_frames,
            max_buffered_bytes=max_buffered_bytes,
            **options,
        )
        return TokenStream(self._running(), tokens)

    def call_stream(
        self,
        handler: str,
        input: Any,  # noqa: A002 (the field's word)
        *,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> PartStream:
        parts = self._client.call_stream(handler, input, idempotency_key=idempotency_key, **options)
        return PartStream(self._running(), parts)

    def attach(
        self,
        id: str,  # noqa: A002
        *,
        after: str | None = None,
        max_buffered_frames: int = MAX_FRAMES,
        max_buffered_bytes: int = MAX_BYTES,
    ) -> TokenStream:
        tokens = self._client.attach(
            id,
            after=after,
            max_buffered_frames=max_buffered_frames,
            max_buffered_bytes=max_buffered_bytes,
        )
        return TokenStream(self._running(), tokens)

    def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> End:
        return self._call(
            self._client.run(request, timeout=timeout, idempotency_key=idempotency_key, **options)
        )

    def run_with_id(
        self, request: Request, *, idempotency_key: str | None = None, **options: Unpack[Options]
    ) -> tuple[str, End]:
        return self._call(self._client.run_with_id(request, idempotency_key=idempotency_key, **options))

    @overload
    def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[End]: ...

    @overload
    def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[End | StreamfleetError]: ...

    def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[End] | list[End | StreamfleetError]:
        many: Coroutine[Any, Any, list[End | StreamfleetError]] = self._client.run_many(  # type: ignore[call-overload]
            requests,
            timeout=timeout,
            idempotency_keys=idempotency_keys,
            return_exceptions=return_exceptions,
            **options,
        )
        return self._call(many)

    def submit(
        self,
        request: Request,
        *,
        idempotency_key: str | None = None,
        stream: bool = False,
        **options: Unpack[Options],
    ) -> Ticket:
        return self._call(
            self._client.submit(request, idempotency_key=idempotency_key, stream=stream, **options)
        )

    def result(self, id: str, timeout: float | None = None) -> End:  # noqa: A002
        return self._call(self._client.result(id, timeout))

    def cancel(self, id: str) -> State:  # noqa: A002
        return self._call(self._client.cancel(id))

    def status(self, id: str) -> Status:  # noqa: A002
        return self._call(self._client.status(id))

    def count_tokens(self, request: Request) -> int:
        return self._call(self._client.count_tokens(request))

    def models(self) -> list[Card]:
        return self._call(self._client.models())

    def depth(self) -> Depth:
        return self._call(self._client.depth())

    def queues(self) -> list[str]:
        return self._call(self._client.queues())

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the client is not open: use `with Client(…)`, or call its open()")
        return self._thread

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            thread = self._running()
        except RuntimeError:
            work.close()
            raise
        return thread.call(work)


async def _next(stream: AsyncIterator[_T]) -> tuple[_T] | None:
    """The next one, which may be None itself; None when there are no more."""
    async for one in stream:
        return (one,)
    return None
