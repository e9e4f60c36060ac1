"""How answers are read for OpenAI's routes: several requests at once, whole or as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Delta, GenerateRequest, Prefill, Restart
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.event_stream import OPENED
from streamfleet_producer.gateway.openai_answers import Outcome
from streamfleet_producer.gateway.openai_key import keys_of
from streamfleet_producer.shown import Shown
from streamfleet_producer.ticket import Options
from streamfleet_producer.token_stream import TokenStream

_T = TypeVar("_T")

FIRST_NEWS_S = 1.0
"""After so long without an event a waiting client is told its place in the queue, then ever more rarely.

So long what the worker refuses has a status, too.
"""
UNSERVED_NEWS_S = 0.05
"""The same, where no worker lives."""
MOST_NEWS_S = 8.0


# --- whole answers


async def outcomes(
    client: Client,
    requests: Sequence[GenerateRequest],
    key: str | None,
    options: Options,
    *,
    by_token: bool,
) -> list[Outcome]:
    """The answers to all of them, in order; `by_token` reads the text of each token, too.

    Raises as `Client.run`: what fails first fails all, and the others are cancelled.
    """
    read = _read_by_token if by_token else _read
    keys = keys_of(key, len(requests))
    return await together(
        [read(client, request, one, options) for request, one in zip(requests, keys, strict=True)]
    )


async def together(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """The results of all, in order; the first failure is raised once all others are cancelled."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _ended(tasks)


async def _read(client: Client, request: GenerateRequest, key: str | None, options: Options) -> Outcome:
    rid, end = await client.run_with_id(request, idempotency_key=key, **options)
    return Outcome(f"{client.queue}:{rid}", end)


async def _read_by_token(
    client: Client, request: GenerateRequest, key: str | None, options: Options
) -> Outcome:
    shown, prefill = Shown(), None
    async with client.stream(request, idempotency_key=key, **options) as tokens:
        async for event in tokens.events():
            if isinstance(event, Restart):
                shown, prefill = Shown(), None
            elif isinstance(event, Prefill):
                prefill = event
            elif isinstance(event, Delta):
                shown.add(event)
        return Outcome(f"{client.queue}:{tokens.id}", tokens.result, shown.lines, prefill)


# --- answers as they come


@asynccontextmanager
async def opened(
    client: Client, requests: Sequence[GenerateRequest], key: str | None, options: Options
) -> AsyncIterator[list[TokenStream]]:
    """The streams of all of them, submitted together. Raises as `Client.stream`."""
    streams = [
        client.stream(request, idempotency_key=one, **options)
        for request, one in zip(requests, keys_of(key, len(requests)), strict=True)
    ]
    if len(streams) == 1:
        async with streams[0]:
            yield streams
        return
    async with AsyncExitStack() as stack:
        entering = [asyncio.ensure_future(stack.enter_async_context(stream)) for stream in streams[1:]]
        try:
            await stack.enter_async_context(streams[0])
            await asyncio.gather(*entering)
        finally:
            await _ended(entering)
        yield streams


async def events_of(
    tokens: TokenStream,
    position: Callable[[], Awaitable[int | None]],
    *,
    with_prompt: bool = False,
    is_served: bool = True,
) -> AsyncGenerator[Delta | Prefill | bytes]:
    """The deltas of one answer, and while none comes `OPENED`, or comments that say that it is queued.

    Args:
        tokens: the stream, entered.
        position: its place in the queue; None once it has left that, or while nobody can tell.
        with_prompt: give the prompt's tokens, too.
        is_served: a worker lives that could take it.
    """
    read = _whole(tokens) if with_prompt else _deltas(tokens)
    pause_s = FIRST_NEWS_S if is_served else UNSERVED_NEWS_S
    event: Delta | Prefill | None = None
    while True:
        clock = asyncio.timeout(pause_s)
        try:
            async with clock:
                event = await read()
            break
        except TimeoutError:
            if not clock.expired():
                raise
        place = await position()
        yield OPENED if place is None else b": queued position=%d\n\n" % place
        pause_s = min(MOST_NEWS_S, max(FIRST_NEWS_S, 2 * pause_s))
    while event is not None:
        yield event
        event = await read()


async def merged(sources: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[tuple[int, _T]]:
    """What all of them give, as it comes, each with the place of its source.

    A source is not asked for more before what it gave was taken. The first failure is raised.
    """
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    given: asyncio.Queue[tuple[int, _T] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(place: int, source: AsyncGenerator[_T]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    await given.put((place, item))
        except Exception as error:  # noqa: BLE001 (it is raised again, where it is read)
            await given.put(error)
        else:
            await given.put(None)

    pumps = [asyncio.create_task(pump(place, source), name="prompt") for place, source in enumerate(sources)]
    try:
        left = len(pumps)
        while left:
            told = await given.get()
            if isinstance(told, BaseException):
                raise told
            if told is None:
                left -= 1
            else:
                yield told
    finally:
        await _ended(pumps)


def _deltas(tokens: TokenStream) -> Callable[[], Awaitable[Delta | None]]:
    async def read() -> Delta | None:
        return await anext(tokens, None)

    return read


def _whole(tokens: TokenStream) -> Callable[[], Awaitable[Delta | Prefill | None]]:
    has_shown = False

    async def read() -> Delta | Prefill | None:
        nonlocal has_shown
        while True:
            event = await tokens.next_event()
            if isinstance(event, Restart) and has_shown:
                raise GenerationFailed(
                    "the worker was lost, and what was shown is void: send the request again", retryable=True
                )
            if event is None or isinstance(event, Delta | Prefill):
                has_shown = True
                return event

    return read


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
