"""A service of one's own in front of a fleet: summaries, whole or as they are written, and moods of texts.

uvicorn app:app
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from streamfleet_producer import (
    BrokerUnavailable,
    ChatMessage,
    Client,
    Conflict,
    DeadlineExceeded,
    GenerateRequest,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    StreamfleetError,
    TokenStream,
    TooLong,
)

TIMEOUT_S = 20.0
"""How long a caller waits at most; what is not answered by then is cancelled, and no worker begins it."""
MAX_TOKENS = 200
HANG_UP = 499
"""What the log says of callers who have gone; nobody reads it."""

STATUS: list[tuple[type[StreamfleetError], int]] = [
    (TooLong, 413),
    (InvalidRequest, 400),
    (Conflict, 409),
    (QueueFull, 429),
    (DeadlineExceeded, 504),
    (ModelNotFound, 503),
    (BrokerUnavailable, 503),
]
"""What an error is in HTTP; any other is 502. The first that fits counts."""

_T = TypeVar("_T")


class Text(BaseModel):
    """A text to be summed up."""

    text: str = Field(min_length=1, max_length=50_000)

    def request(self) -> GenerateRequest:
        turns = [
            ChatMessage(role="system", content="Sum the text up in two sentences."),
            ChatMessage(role="user", content=self.text),
        ]
        return GenerateRequest(messages=turns, max_tokens=MAX_TOKENS)


class Texts(BaseModel):
    """Texts whose moods are wanted."""

    texts: list[str] = Field(max_length=1000)


def service(writer: Callable[[], Client], judge: Callable[[], Client]) -> FastAPI:
    """The service. Its clients are made when it starts: of a queue that writes, of one that classifies."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with writer() as app.state.writer, judge() as app.state.judge:
            yield

    app = FastAPI(title="Summaries and moods", lifespan=life)

    @app.exception_handler(StreamfleetError)
    async def refused(request: Request, error: StreamfleetError) -> JSONResponse:
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 502)
        headers = {}
        if isinstance(error, QueueFull):
            headers["Retry-After"] = str(math.ceil(error.retry_after))
        body = {"error": {"code": error.code, "message": str(error)}}
        return JSONResponse(body, status, headers)

    @app.exception_handler(HungUp)
    async def hung_up(request: Request, error: HungUp) -> JSONResponse:
        return JSONResponse(None, HANG_UP)

    @app.post("/summaries")
    async def summary(
        request: Request, body: Text, idempotency_key: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        """A summary, when it is there. With an `Idempotency-Key` a request may be repeated."""
        fleet: Client = request.app.state.writer
        running = fleet.run(body.request(), timeout=TIMEOUT_S, idempotency_key=idempotency_key)
        end = await unless_hung_up(request, running)
        return {"summary": end.text, "cut": end.finish_reason == "length"}

    @app.post("/summaries/stream")
    async def stream(request: Request, body: Text) -> StreamingResponse:
        """A summary as it is written: server-sent events, the last one `end` or `error`."""
        fleet: Client = request.app.state.writer
        tokens = fleet.stream(body.request(), deadline_s=TIMEOUT_S)
        # Entered before the response begins, so that a refusal still has a status of its own.
        await tokens.__aenter__()
        return TokenResponse(tokens)

    @app.post("/moods")
    async def moods(request: Request, body: Texts) -> list[dict[str, Any]]:
        """The likeliest label of each text."""
        fleet: Client = request.app.state.judge
        found = await unless_hung_up(
            request, fleet.classify(body.texts, top_k=1, truncate=True, timeout=TIMEOUT_S)
        )
        return [{"mood": one.label, "score": round(one.labels[0].score, 3)} for one in found]

    return app


class TokenResponse(StreamingResponse):
    """A stream's texts as server-sent events. However it ends, the stream is left, its request cancelled."""

    def __init__(self, tokens: TokenStream) -> None:
        super().__init__(told(tokens), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._tokens.__aexit__(None, None, None)


async def told(tokens: TokenStream) -> AsyncIterator[str]:
    """The server-sent events of a stream."""
    try:
        async for delta in tokens:
            yield sse(text=delta.text)
    except StreamfleetError as error:
        # The status is long sent. What was shown is void if another attempt said something else.
        yield sse("error", code=error.code, message=str(error), retryable=bool(error.retryable))
    else:
        usage = tokens.result.usage
        yield sse("end", reason=tokens.result.finish_reason, tokens=usage.completion_tokens)


def sse(event: str = "", **data: Any) -> str:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n"


class HungUp(Exception):
    """The caller has gone."""


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What the work gives. If the caller goes it is cancelled, and with it what it has submitted.

    Raises:
        HungUp: the caller has gone.
    """
    working = asyncio.create_task(work)
    hanging_up = asyncio.create_task(hang_up(request))
    try:
        await asyncio.wait({working, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        for task in (working, hanging_up):
            task.cancel()
        await asyncio.gather(working, hanging_up, return_exceptions=True)


async def hang_up(request: Request) -> None:
    """Wait until the caller has gone; the body of the request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client(queue: str) -> Client:
    """A client of a queue, where the environment says that Redis is."""
    return Client(os.environ.get("REDIS_URL", "redis://localhost:6379/0"), queue)


app = service(lambda: client("smollm2"), lambda: client("moods"))
