"""One request's events, in order, once each: across lost messages, lost connections and lost workers."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Literal, Self

from streamfleet_common.errors import (
    BrokerUnavailable,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    StreamfleetError,
    Undecodable,
)
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Delta, End, Prefill, Restart, Start
from streamfleet_producer.answer import end_of, too_late, vanished
from streamfleet_producer.link import Link, closed
from streamfleet_producer.ticket import Ticket, failure_of
from streamfleet_producer.transcript import Replay, Tokens, Transcript

MAX_FRAMES = 1024
MAX_BYTES = 4 * 1024 * 1024
"""What is kept for a slow reader. Beyond it the frames are dropped and read from the log when he comes."""

StreamEvent = Start | Prefill | Delta | Restart


class TokenStream:
    """The events of one request: `async with` it, then iterate.

    `async for delta in tokens` gives the text alone, as one text that is never taken back: each `Delta` once,
    in order. When a worker is lost the request runs again from its first token; the new attempt is compared
    with what was shown, token by token, and goes on silently where that ended. If it differs (as sampled text
    without a seed will), the iteration raises GenerationFailed with `retryable` set, since what was shown is
    void. `async for event in tokens.events()` gives everything, `Start` and `Prefill` included, and a
    `Restart` in place of that comparison: then all text so far is to be thrown away. Use one of the two.

    After the iteration `result` is the final `End`. Leaving the context before that cancels the request,
    unless it was joined: found by an idempotency key, or attached to.

    The deltas prove to be complete by the end's count of them. If some are missing and the log no longer has
    them, the rest is made of the whole text that the end carries, as one last delta a choice, provided that
    what was shown is how that text begins; otherwise IncompleteGeneration is raised.

    Raises, while iterating or from `wait`:
        DeadlineExceeded: no end before the deadline and its grace.
        Cancelled, GenerationFailed, InvalidRequest, TooLong, Unsupported: how the request ended.
        IncompleteGeneration: part of the text is lost, or Redis forgot the request.
        BrokerUnavailable: Redis was away for longer than `outage_s`.
    """

    def __init__(
        self,
        link: Link,
        opening: Callable[[TokenStream], Awaitable[Ticket]],
        *,
        on_restart: Literal["restart", "fail"] = "restart",
        max_frames: int = MAX_FRAMES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.id = ""
        """The request's id, once entered."""
        self.owned = False
        """Leaving early cancels the request."""
        self.heard_at = 0.0
        self.deadline_at = math.inf
        self.late_at = math.inf
        self._link = link
        self._opening = opening
        self._on_restart = on_restart
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._ticket: Ticket | None = None
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._doubt = False
        """Something may be missing: the log and the record are to be read before anything else."""
        self._gap = False
        """The doubt is about an event that must have come before one that did."""
        self._is_late = False
        self._outage_since = math.inf
        self._transcript = Transcript()
        self._log_at = (0, 0)
        self._ready: deque[StreamEvent] = deque()
        self._voids: deque[Tokens] = deque()
        """What each restart in `_ready` takes back."""
        self._replay: Replay | None = None
        self._end: End | None = None
        self._error: StreamfleetError | None = None

    # --- for the caller

    @property
    def ticket(self) -> Ticket:
        """The receipt of the submission."""
        if self._ticket is None:
            raise RuntimeError("not submitted yet: enter the stream with `async with`")
        return self._ticket

    @property
    def result(self) -> End:
        """The final event, once the iteration is over; also of a request that failed."""
        if self._end is None:
            raise RuntimeError("not ended yet: iterate the stream to its end, or `await tokens.wait()`")
        return self._end

    async def wait(self) -> End:
        """Skip to the end. Raises as the iteration does."""
        while await self.next_event() is not None:
            pass
        return self.result

    async def events(self) -> AsyncIterator[StreamEvent]:
        """All events, restarts included; see the class."""
        while (event := await self.next_event()) is not None:
            yield event

    async def next_event(self) -> StreamEvent | None:
        """The next of all events; None when there are no more."""
        event = await self._next()
        if isinstance(event, Restart):
            self._voids.popleft()
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while (event := await self._next()) is not None:
            if isinstance(event, Delta):
                if self._replay is None:
                    return event
                new = self._again(event, self._replay)
                if new is not None:
                    return new
            elif isinstance(event, Restart):
                void = self._voids.popleft()
                self._replay = Replay(void if self._replay is None else self._replay.shown.or_longer(void))
        if self._replay is not None and not self._replay.caught_up():
            raise self._fail(_differs())
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self._ticket = await self._opening(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
        if self.owned and self._end is None:
            await self._link.cancel_quietly(self.id)

    async def release(self) -> None:
        """Stop listening."""
        self._link.waiting.discard(self)
        self._link.watch.discard(self)
        await self._link.leave([(self.id, self)])
        self._frames.clear()

    def abandon(self) -> None:
        if self.owned and self._end is None:
            self._link.cancels.post(self.id)
            self.owned = False
        self._error = self._error or closed()
        self._wake()

    # --- for whoever opens it

    def arm(self, *, deadline_at: float, late_at: float, doubtful: bool = False) -> None:
        """Begin to worry: the request exists. Times are the loop's; `doubtful` reads the log at once."""
        self.heard_at = self._link.now()
        self.deadline_at, self.late_at = deadline_at, late_at
        self._doubt = self._doubt or doubtful
        if self._link.is_closed:
            self.abandon()
            return
        self._link.watch.add(self)
        self._link.waiting.add(self)

    # --- a Listener, and Watched

    def heard(self, data: bytes) -> None:
        self.heard_at = self._link.now()
        self._frames.append(data)
        self._bytes += len(data)
        if len(self._frames) > self._max_frames or self._bytes > self._max_bytes:
            self._frames.clear()
            self._bytes = 0
            self._doubt = True
        self._wake()

    def missed(self) -> None:
        self._doubt = True
        self._wake()

    def silent(self) -> None:
        self._doubt = True
        self._wake()

    def late(self) -> None:
        self._is_late = self._doubt = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the order of things

    async def _next(self) -> StreamEvent | None:
        while True:
            if self._ready:
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            if self._end is not None:
                return None
            if self._doubt:
                await self._catch_up()
            elif self._frames:
                data = self._frames.popleft()
                self._bytes -= len(data)
                self._take_live(data)
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    def _take_live(self, data: bytes) -> None:
        try:
            frame = Frame.parse(data)
            verdict = "next" if frame.is_end else self._transcript.judge(frame)
            if verdict == "old" or (verdict == "gap" and self._transcript.hole):
                return
            if verdict == "gap":
                self._doubt = self._gap = True
            elif not frame.body:
                self._doubt = True  # too large for a channel: the log has it, or the record
            elif frame.is_end:
                self._take_end(frame, last_word=False)
            else:
                self._apply(frame)
        except (Undecodable, InvalidRequest):
            self._doubt = True  # noise on the channel; should the log say the same, it is raised there

    def _apply(self, frame: Frame) -> None:
        event = frame.event()
        restart = self._transcript.apply(frame, event)
        if restart is not None:
            self._restart(restart)
        if not isinstance(event, Restart | End) and self._error is None:
            self._ready.append(event)

    def _restart(self, restart: Restart) -> None:
        if self._on_restart == "fail":
            self._error = GenerationFailed(
                f"{restart.reason}, and the request asked to fail rather than begin its text again: "
                "send it again",
                retryable=True,
            )
            return
        self._ready.append(restart)
        self._voids.append(self._transcript.void)

    def _take_end(self, frame: Frame, *, last_word: bool) -> None:
        if frame.epoch < self._transcript.epoch:
            return
        end = end_of(frame)
        failure = failure_of(end)
        if failure is None and not self._transcript.proves(end):
            if not last_word:
                self._doubt = True  # read the log up to its own copy of this end
                return
            try:
                missing = self._transcript.complete(end)
            except ValueError:
                failure = IncompleteGeneration(
                    "part of the text is lost, and what was shown is not how the answer begins: "
                    "read the whole answer from `result`, or send the request again"
                )
            else:
                for event in missing:
                    if isinstance(event, Restart):
                        self._restart(event)
                    elif self._error is None:
                        self._ready.append(event)
        self._end = end
        self._error = self._error or failure

    async def _catch_up(self) -> None:
        """Read a page of the log; when it has no more, the record."""
        self._doubt = False  # first, so that a doubt that comes meanwhile is not lost
        try:
            after = max(self._log_at, (self._transcript.epoch, self._transcript.seq))
            page = await self._link.broker.events(self.id, "{}-{}".format(*after) if any(after) else "-")
            for frame in page:
                self._log_at = (frame.epoch, frame.seq)
                self._take_logged(frame)
            if page:
                self._doubt = True  # there may be more
            else:
                await self._ask_record()
            self._outage_since = math.inf
        except BrokerUnavailable as error:
            now = self._link.now()
            self._outage_since = min(self._outage_since, now)
            if self._is_late:
                self._error = too_late()
            elif now - self._outage_since >= self._link.patience.outage_s:
                self._error = error
            # Otherwise the watch, or the subscriber when it is back, comes again.
        except InvalidRequest as error:
            self._error = error  # the log or the record holds what no peer of this version wrote

    def _take_logged(self, frame: Frame) -> None:
        if self._end is not None or self._error is not None:
            return
        if frame.is_end:
            self._take_end(frame, last_word=True)
            return
        verdict = self._transcript.judge(frame, logged=True)
        if verdict == "next":
            self._apply(frame)
        elif verdict == "gap":
            self._transcript.hole = True

    async def _ask_record(self) -> None:
        record = await self._link.record(self.id)
        if record is None:
            self._error = vanished()
        elif record.end is not None:
            self._take_end(record.end, last_word=True)
        elif self._is_late:
            self._error = too_late()
        elif self._gap:
            self._transcript.hole = True  # the log does not have what is missing
        self._gap = False

    # --- restarts, for readers of deltas

    def _again(self, delta: Delta, replay: Replay) -> Delta | None:
        try:
            return replay.take(delta)
        except ValueError:
            raise self._fail(_differs()) from None

    def _fail(self, error: StreamfleetError) -> StreamfleetError:
        self._error = error
        self._ready.clear()
        return error


def _differs() -> GenerationFailed:
    return GenerationFailed(
        "the worker was lost, and the text of the next attempt differs from what was shown: send the request "
        "again, or read `tokens.events()` and begin the text anew at each Restart",
        retryable=True,
    )
