"""One request's events, in order, once each: across lost messages, lost connections and lost workers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from streamfleet_common.errors import GenerationFailed, IncompleteGeneration, StreamfleetError
from streamfleet_common.schemas import Delta, End, Parts, Restart
from streamfleet_producer.event_reader import EventReader
from streamfleet_producer.replay import Replay
from streamfleet_producer.ticket import Ticket
from streamfleet_producer.transcript import StreamEvent

_Said = TypeVar("_Said", bound=Delta | Parts)


class EventStream:
    """The events of one request: what `TokenStream`, which says how it is read, and `PartStream` share."""

    def __init__(self, reader: EventReader, opening: Callable[[], Awaitable[Ticket]]) -> None:
        self._reader = reader
        self._opening = opening
        self._ticket: Ticket | None = None
        self._replay: Replay | None = None

    @property
    def id(self) -> str:
        """The request's id, once entered."""
        return self.ticket.id

    @property
    def ticket(self) -> Ticket:
        """The receipt of the submission."""
        if self._ticket is None:
            raise RuntimeError("not submitted yet: enter the stream with `async with`")
        return self._ticket

    @property
    def result(self) -> End:
        """The final event, once the iteration is over; also of a request that failed."""
        if self._reader.end is None:
            raise RuntimeError("not ended yet: iterate the stream to its end, or `await` its `wait()`")
        return self._reader.end

    @property
    def place(self) -> str:
        """Behind all events that were given so far; "" if none was, here or before.

        `Client.attach(id, after=place)` goes on from there, in any process, at any later time. Of events that
        are one step, such as a restart and what it brings again, the last one leads there.
        """
        place = self._reader.place
        return "" if place is None else str(place)

    @property
    def is_over(self) -> bool:
        """It was to go on behind the end itself: nothing is left to be given."""
        return self._reader.is_over

    @property
    def ended(self) -> End | None:
        """The final event, if it has come; what `result` gives then."""
        return self._reader.end

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
        event = await self._reader.next()
        if isinstance(event, Restart):
            self._reader.voids.popleft()
        return event

    async def __aenter__(self) -> Self:
        self._ticket = await self._opening()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._reader.leave()

    async def _next_new(self, kind: type[_Said]) -> _Said | None:
        """The next event of this kind beyond what was shown before a restart; None when there are no more."""
        while (event := await self._reader.next()) is not None:
            if isinstance(event, kind):
                new = event if self._replay is None else self._again(event, self._replay)
                if isinstance(new, kind):
                    return new
            elif isinstance(event, Restart):
                void = self._reader.voids.popleft()
                if void is None:
                    raise self._reader.fail(
                        IncompleteGeneration(
                            "what was shown before is not known any more, since the log of the events is "
                            "gone: read `events()`, which begin anew, or the whole answer by `result`"
                        )
                    )
                self._replay = Replay(void if self._replay is None else self._replay.shown)
        if self._replay is not None and not self._replay.caught_up():
            raise self._differs()
        return None

    def _again(self, event: Delta | Parts, replay: Replay) -> Delta | Parts | None:
        try:
            return replay.take(event)
        except ValueError:
            raise self._differs() from None

    def _differs(self) -> StreamfleetError:
        return self._reader.fail(
            GenerationFailed(
                "the worker was lost, and the next attempt differs from what was shown: send the request "
                "again, or read `events()` of the stream and begin anew at each Restart",
                retryable=True,
            )
        )


class TokenStream(EventStream):
    """The events of one request: `async with` it, then iterate.

    When a worker is lost the request runs again from its first token. Where both workers promise each other's
    bits (`Start.exact`), nobody sees that: the new attempt is compared with what was shown, and goes on
    silently where that ended. Where they do not, or it differs after all, how the stream is read counts:

    `async for delta in tokens` gives the text alone, as one text that is never taken back: each `Delta` once,
    in order. The new attempt is compared all the same, tokens and text; if it differs, the iteration raises
    GenerationFailed with `retryable` set, since what was shown is void. `async for event in tokens.events()`
    gives everything, `Start` and `Prefill` included, and a `Restart`: then all text so far is to be thrown
    away, and all that the new attempt has said follows. Use one of the two.

    Each delta belongs to one answer, its `index`; those of several answers come as they are made.

    After the iteration `result` is the final `End`. Leaving the context before that cancels the request,
    unless it was joined: found by an idempotency key, or attached to. Where other callers of the client have
    joined it by its key, the last one's leaving does.

    The deltas prove to be complete by the end's count of them. If some are missing and the log no longer has
    them, the rest is made of the whole text that the end carries, as one last delta a choice, provided that
    what was shown is how that text begins; otherwise IncompleteGeneration is raised.

    Raises, while iterating or from `wait`:
        DeadlineExceeded: no end before the deadline and its grace.
        Cancelled, GenerationFailed, InvalidRequest, TooLong, Unsupported: how the request ended.
        IncompleteGeneration: part of the text is lost, or Redis forgot the request.
        BrokerUnavailable: Redis was away for longer than `outage_s`.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._next_new(Delta)
        if delta is None:
            raise StopAsyncIteration
        return delta


class PartStream(EventStream):
    """What a handler gives, part by part: `async with` it, then iterate over the parts.

    A handler whose output does not come in parts gives one. When a worker is lost the handler runs again from
    the start; its parts are compared with those shown, and the iteration goes on where they ended. If they
    differ it raises GenerationFailed with `retryable` set, since what was shown is void. All else is as said
    at `TokenStream`, with `Parts` for its events.
    """

    def __init__(self, reader: EventReader, opening: Callable[[], Awaitable[Ticket]]) -> None:
        super().__init__(reader, opening)
        self._unread: deque[Any] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while not self._unread:
            parts = await self._next_new(Parts)
            if parts is None:
                raise StopAsyncIteration
            self._unread.extend(parts.values)
        return self._unread.popleft()
