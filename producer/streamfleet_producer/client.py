"""Client: what a service talks to the fleet with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, get_args, overload

from streamfleet_common import codec
from streamfleet_common.cards import Card
from streamfleet_common.connections import Connections
from streamfleet_common.depth import Depth
from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, GenerateRequest, Request, State
from streamfleet_common.settings import Durability
from streamfleet_producer.answer import Answer, Answers, end_of
from streamfleet_producer.catalogue import CARD_LIFE_S
from streamfleet_producer.event_reader import MAX_BYTES, MAX_FRAMES, EventReader
from streamfleet_producer.giving_up import Until, given_up_at
from streamfleet_producer.handler_calls import HandlerCalls
from streamfleet_producer.handler_values import plain_input
from streamfleet_producer.hub import Hub
from streamfleet_producer.intake import Intake, checked, not_found
from streamfleet_producer.link import GRACE_S, OUTAGE_S, SILENCE_S, Link, Patience
from streamfleet_producer.many import Many
from streamfleet_producer.one_shot import OneShot
from streamfleet_producer.opening import opening
from streamfleet_producer.place import Place
from streamfleet_producer.ticket import DEADLINE_S, Options, Status, Ticket
from streamfleet_producer.token_counter import TokenCounter
from streamfleet_producer.token_stream import PartStream, TokenStream


class Client(OneShot, HandlerCalls):
    """Submits requests to one queue and reads their answers; `async with` it, or `open` and `close`.

    It connects when it is first used. All times are seconds. Safe for any number of tasks on one event loop.

    `secret` is the tenant's, for the ids of requests with an idempotency key; without one the ids follow from
    the tenant's name and the key, so that whoever knows both knows the id. `max_request_bytes` bounds an
    encoded request, as the workers' own limits do. `silence_s`: after so long without a message the record is
    asked, in case one was lost. `grace_s`: how long after its deadline an answer is waited for. `outage_s`:
    how long Redis may be away while an accepted request is waited for. `card_life_s`: how long the workers'
    cards are believed. `durability`: what a request outlives once it is accepted (see docs/delivery.md): a
    restart of Redis ("fast"), any crash of it ("safe"), the loss of it ("replicated"). `tokenizer`: the
    tokenizer.json of the model that is served, its folder, or a `TokenCounter`; requests can then be counted,
    and what is too long is refused before it is queued.

    Raises:
        InvalidRequest: the queue's or the tenant's name, or the level of durability, is none.
        Unsupported, TokenizerFailed: the tokenizer cannot be read; see `TokenCounter.from_file`.
        BrokerUnavailable: from every method, if Redis cannot be reached or refuses to work.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        queue: str = "default",
        *,
        tenant: str = "default",
        secret: bytes | str | None = None,
        max_request_bytes: int = codec.MAX_REQUEST_BYTES,
        max_connections: int = 16,
        silence_s: float = SILENCE_S,
        grace_s: float = GRACE_S,
        outage_s: float = OUTAGE_S,
        card_life_s: float = CARD_LIFE_S,
        durability: Durability = "fast",
        tokenizer: TokenCounter | str | Path | None = None,
        hub: Hub | None = None,
    ) -> None:
        self._intake = Intake(queue, tenant, secret, max_request_bytes, tokenizer)
        if durability not in get_args(Durability):
            fault = f"durability: one of {', '.join(get_args(Durability))} is wanted"
            raise InvalidRequest(fault, problems=[fault])
        self.url = url if hub is None else hub.url
        self.queue = queue
        self.tenant = tenant
        self._max_connections = max_connections
        self._patience = Patience(silence_s, grace_s, outage_s)
        self._card_life_s = card_life_s
        self._durability: Durability = durability
        self._hub = hub
        self._link: Link | None = None

    # --- life

    async def open(self) -> Self:
        """Make ready; nothing connects before it is used."""
        if self._link is None:
            hub = self._hub
            if hub is None:
                connections = Connections.open(self.url, max_connections=self._max_connections)
            else:
                connections = hub.connections
            self._link = Link(
                connections,
                self.queue,
                self.tenant,
                patience=self._patience,
                card_life_s=self._card_life_s,
                durability=self._durability,
                subscriber=None if hub is None else hub.subscriber,
            )
        return self

    async def close(self, within_s: float | None = None) -> None:
        """Close the connections. Whoever still waits gets `Cancelled`, and his request is cancelled.

        If Redis is away, that is tried for `within_s` seconds, by default five.
        """
        link, self._link = self._link, None
        if link is not None:
            await link.close(within_s)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- the answer as it comes

    def stream(
        self,
        request: GenerateRequest,
        *,
        idempotency_key: str | None = None,
        max_buffered_frames: int = MAX_FRAMES,
        max_buffered_bytes: int = MAX_BYTES,
        **options: Unpack[Options],
    ) -> TokenStream:
        """Submit a request when entered, and give its events as they come; see `TokenStream` and `Options`.

        With an idempotency key that was used before, the existing request is joined: its events come from
        the first one on, and leaving early does not cancel it. What a slow reader leaves lying is kept up to
        the two bounds, and read from the log beyond them.

        Raises, when entered:
            ModelNotFound, Unsupported, InvalidRequest, TooLong: no worker would take it.
            QueueFull: try again after `retry_after` seconds.
            Conflict: the idempotency key was used for another request.
        """
        link = self._open_link()
        bounds = (max_buffered_frames, max_buffered_bytes)
        return TokenStream(
            *opening(link, self._intake, request, key=idempotency_key, options=options, bounds=bounds)
        )

    def call_stream(
        self,
        handler: str,
        input: Any,  # noqa: A002 (the field's word)
        *,
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> PartStream:
        """Call a handler when entered, and give the parts of its output as they come; see `PartStream`.

        Raises, when entered, as `stream` does: see `HandlerCalls` also.
        """
        request = CallRequest(handler=handler, input=plain_input(input))
        link = self._open_link()
        return PartStream(*opening(link, self._intake, request, key=idempotency_key, options=options))

    def attach(
        self,
        id: str,  # noqa: A002 (the word of the whole API)
        *,
        after: str | None = None,
        max_buffered_frames: int = MAX_FRAMES,
        max_buffered_bytes: int = MAX_BYTES,
    ) -> TokenStream:
        """The events of a request that was submitted before, from the first one on.

        They are kept in a log if it was submitted to stream, until a minute after its end; of any other the
        whole text comes as one delta. What a handler gives is among its `events()`, as `Parts`. Leaving early
        does not cancel the request. The bounds are those of `stream`.

        `after` is the `place` of an earlier stream of the same request, wherever that was read: what was
        shown up to there does not come again, and nothing that follows is missing. Of a later attempt that is
        the same to the bit only what is new comes, else a `Restart` and all of it; so it is, too, when the
        log is gone, unless nothing but the end is missing.

        Raises, when entered:
            RequestNotFound: the tenant has no such request, or its result has expired.
            InvalidRequest: `after` is no place of an event of this request.
        """
        link = self._open_link()
        reader = EventReader(link, max_frames=max_buffered_frames, max_bytes=max_buffered_bytes)

        async def joining() -> Ticket:
            record = await self._record(link, id)
            place = None if after is None else Place.parse(after)
            await reader.listen(id)
            try:
                if place is not None:
                    await reader.resume(place, record)
            except BaseException:
                await reader.leave()
                raise
            reader.arm(deadline_at=_deadline_at(link, record), doubtful=True)
            return Ticket(id, record.state, duplicate=True, depth=0)

        return TokenStream(reader, joining)

    # --- the answer when it is there

    async def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (asyncio's own could not tell the fleet to stop)
        idempotency_key: str | None = None,
        **options: Unpack[Options],
    ) -> End:
        """Submit a request and wait for its answer; see `Options`.

        After `timeout` seconds the request is given up and cancelled; no worker begins it later than that.
        With an idempotency key that was used before, the existing request's answer is waited for.

        Raises:
            ModelNotFound, Unsupported, InvalidRequest, TooLong: no worker would take it, or could do it.
            QueueFull: try again after `retry_after` seconds.
            Conflict: the idempotency key was used for another request.
            DeadlineExceeded: no answer before the timeout, or before the deadline and its grace.
            Cancelled, GenerationFailed, IncompleteGeneration: how it ended.
        """
        late_at = _late_at(self._open_link(), timeout)
        if timeout is not None:
            options.setdefault("deadline_s", timeout)
        return (await self._run(request, idempotency_key, options, late_at))[1]

    async def run_with_id(
        self, request: Request, *, idempotency_key: str | None = None, **options: Unpack[Options]
    ) -> tuple[str, End]:
        """As `run`, for whoever tells others of the request: its id, too."""
        return await self._run(request, idempotency_key, options, math.inf)

    async def _run(
        self, request: Request, key: str | None, options: Options, late_at: float
    ) -> tuple[str, End]:
        link = self._open_link()
        given_up = min(late_at, given_up_at(link, options))
        if given_up == math.inf:
            return await self._run_on(link, request, key, options, late_at)  # a timer for each is not free
        async with Until(link, given_up):
            return await self._run_on(link, request, key, options, late_at)

    async def _run_on(
        self, link: Link, request: Request, key: str | None, options: Options, late_at: float
    ) -> tuple[str, End]:
        # One task wakes once for a request: what becomes of its submission is told to the answer.
        submission = await self._intake.prepare(
            link.catalogue, request, stream=False, key=key, options=options, rids=link.rids
        )
        answer = Answer(link, submission.envelope.rid)
        try:
            if not link.hear(answer.rid, answer):
                await link.listen([(answer.rid, answer)])
            link.waiting.add(answer)
            deadline_s = options.get("deadline_s", DEADLINE_S)
            answer.submit(submission, keyed=key is not None, deadline_s=deadline_s, late_at=late_at)
            return answer.rid, await answer.future
        finally:
            answer.leave()

    @overload
    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: Literal[False] = False,
        **options: Unpack[Options],
    ) -> list[End]: ...

    @overload
    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: Literal[True],
        **options: Unpack[Options],
    ) -> list[End | StreamfleetError]: ...

    async def run_many(
        self,
        requests: Sequence[Request],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        idempotency_keys: Sequence[str] | None = None,
        return_exceptions: bool = False,
        **options: Unpack[Options],
    ) -> list[End] | list[End | StreamfleetError]:
        """Submit requests together and wait for all answers, in the order of the requests.

        One round trip subscribes, one submits (up to 512 requests or 8 MiB). With `return_exceptions` a
        failure takes the place of its answer; otherwise the first one is raised, and what is still open is
        cancelled. Raises as `run` does.
        """
        link = self._open_link()
        late_at = _late_at(link, timeout)
        if timeout is not None:
            options.setdefault("deadline_s", timeout)
        many = Many(requests, idempotency_keys, excuse=return_exceptions)
        async with Until(link, late_at):
            return await many.run(self._intake, link, options, late_at)

    # --- now, and later

    async def submit(
        self,
        request: Request,
        *,
        idempotency_key: str | None = None,
        stream: bool = False,
        **options: Unpack[Options],
    ) -> Ticket:
        """Submit a request and come back for it later, with the ticket's `id`; see `Options`.

        `stream` keeps a log of its events, to be read with `attach`.

        Raises:
            ModelNotFound, Unsupported, InvalidRequest, TooLong: no worker would take it.
            QueueFull: try again after `retry_after` seconds.
            Conflict: the idempotency key was used for another request.
        """
        link = self._open_link()
        submission = await self._intake.prepare(
            link.catalogue, request, stream=stream, key=idempotency_key, options=options
        )
        return Ticket.of(submission.envelope.rid, await link.submit(submission))

    async def result(
        self,
        id: str,  # noqa: A002
        timeout: float | None = None,  # noqa: ASYNC109 (asyncio's own would not read the record once more)
    ) -> End:
        """The answer of a request submitted before; waits for it, for `timeout` seconds at most.

        Raises:
            RequestNotFound: the tenant has no such request, or its result has expired.
            DeadlineExceeded: no answer in time. The request goes on: ask again, or cancel it.
            Cancelled, GenerationFailed, InvalidRequest, …: how it ended.
        """
        link = self._open_link()
        late_at = _late_at(link, timeout)
        async with Until(link, late_at):
            record = await self._record(link, id)
            async with Answers(link, [id]) as (answer,):
                deadline_at = _deadline_at(link, record)
                late_at = min(late_at, deadline_at + self._patience.grace_s)
                answer.arm(deadline_at=deadline_at, late_at=late_at, doubtful=True)
                return await answer.future

    async def cancel(self, id: str) -> State:  # noqa: A002
        """Cancel a request, waiting or running. Gives "cancelled", or how it had ended before.

        Raises:
            RequestNotFound: the tenant has no such request, or its result has expired.
        """
        link = self._open_link()
        state = await link.cancels.put(checked(id))
        if state is None:
            raise not_found()
        return state

    async def status(self, id: str) -> Status:  # noqa: A002
        """Where a request stands.

        Raises:
            RequestNotFound: the tenant has no such request, or its result has expired.
        """
        return (await self.status_with_end(id))[0]

    async def status_with_end(self, id: str) -> tuple[Status, End | None]:  # noqa: A002
        """As `status`, and the end once there is one, also of a request that failed."""
        record = await self._record(self._open_link(), id)
        return Status.of(id, self.queue, record), None if record.end is None else end_of(record.end)

    # --- the fleet

    async def count_tokens(self, request: Request) -> int:
        """Tokens of a request, control tokens included: the `prompt_tokens` of its answer's usage.

        Raises:
            TooLong: the workers would refuse it.
            ModelNotFound, InvalidRequest: no worker would take it.
            Unsupported: the client has no `tokenizer`, or what it cannot count: chat messages, a handler's
                input, or anything while no worker lives.
        """
        return await self._intake.lengths.count(self._open_link().catalogue, request)

    async def models(self) -> list[Card]:
        """The cards of the workers that live now: what they serve, with their limits."""
        return list(await self._open_link().catalogue.read())

    async def depth(self) -> Depth:
        """Accepted and unfinished requests of the queue."""
        return await self._open_link().broker.depth()

    async def queues(self) -> list[str]:
        """Every queue that a worker has ever announced, by name."""
        return await self._open_link().broker.queues()

    # --- parts

    async def max_bytes(self, request: Request) -> int:
        """How many bytes such a request may have, encoded. Raises as `submit`, if no worker would take it."""
        return await self._intake.max_bytes(self._open_link().catalogue, request)

    def _open_link(self) -> Link:
        if self._link is None:
            raise RuntimeError("the client is not open: use `async with Client(…)`, or await its open()")
        return self._link

    async def _record(self, link: Link, rid: str) -> Record:
        record = await link.record(checked(rid))
        if record is None:
            raise not_found()
        return record


def _late_at(link: Link, timeout: float | None) -> float:
    return math.inf if timeout is None else link.now() + timeout


def _deadline_at(link: Link, record: Record) -> float:
    # The server's clock is not ours: the whole span, counted from now on, is an upper bound.
    return link.now() + max(0, record.deadline_at_ms - record.accepted_at_ms) / 1000
