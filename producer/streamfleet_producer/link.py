"""What an open client works with: one queue's broker, its subscriptions, and the calls that gather."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import (
    Cancelled,
    Conflict,
    InvalidRequest,
    QueueFull,
    StreamfleetError,
    Undecodable,
)
from streamfleet_common.listeners import Listener
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, State
from streamfleet_common.settings import Durability
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_common.subscriber import Subscriber
from streamfleet_producer.catalogue import Catalogue
from streamfleet_producer.coalescer import Coalescer
from streamfleet_producer.rid_pool import RidPool
from streamfleet_producer.sharing import Sharing
from streamfleet_producer.watch import Watch

CLOSE_S = 5.0
"""How long a client that is closed tries to send what it still has to say."""
LEAVE_S = 1.0
"""How long whoever leaves a stream waits until its request is cancelled."""
SILENCE_S = 3.0
GRACE_S = 5.0
OUTAGE_S = 30.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to bear what; seconds."""

    silence_s: float
    """After so long without a message the record is asked, in case one was lost."""
    grace_s: float
    """How long after its deadline a request may still be answered."""
    outage_s: float
    """How long Redis may be away while an accepted request is waited for."""


class Waiting(Protocol):
    """Somebody who waits for what a closed link cannot bring."""

    def abandon(self) -> None:
        """Stop waiting, with an error. Must return at once."""


class Link:
    """The parts of an open client, wired together. All on one event loop.

    With a `subscriber` it is one of several on the same connections, and closes neither.
    """

    def __init__(
        self,
        connections: Connections,
        queue: str,
        tenant: str,
        *,
        patience: Patience,
        card_life_s: float,
        durability: Durability = "fast",
        subscriber: Subscriber | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue = queue
        self.tenant = tenant
        self.patience = patience
        self.broker = Broker(connections, queue, durability=durability)
        self._channels = self.broker.keys.channel(tenant, "")
        self.catalogue = Catalogue(self.broker, queue, life_s=card_life_s)
        self.submits: Coalescer[Submission, Submitted] = Coalescer(self._submit)
        self.cancels: Coalescer[str, State | None] = Coalescer(
            lambda rids: self.broker.cancel(rids, self.tenant)
        )
        self.records: Coalescer[str, Record | None] = Coalescer(self._records)
        self.watch = Watch(patience.silence_s, lambda: self._sweeps.post(None))
        self._sweeps: Coalescer[None, None] = Coalescer(self._sweep)
        self.is_closed = False
        self._untaken: set[str] = set()
        """Requests that were accepted, and whose submitter does not know yet: a closing link cancels them."""
        self._calls: set[asyncio.Future[Sequence[Submitted]]] = set()
        self.waiting: set[Waiting] = set()
        """Whoever has to be told when the link closes."""
        self._connections = connections
        self.sharing = Sharing()
        self._shares = subscriber is not None
        self._subscriber = Subscriber(connections) if subscriber is None else subscriber
        self.rids = RidPool(self._subscriber, self.channel)

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self._loop.time()

    def future(self) -> asyncio.Future[End]:
        return self._loop.create_future()

    # --- channels

    def channel(self, rid: str) -> str:
        return self._channels + rid

    def hear(self, rid: str, listener: Listener) -> bool:
        """Listen to the request with this id, if its channel is subscribed already; else see `listen`.

        Raises:
            Cancelled: the link is closed.
        """
        if self.is_closed:
            raise closed()
        return self.rids.hand_over(rid, listener)

    async def listen(self, listeners: Sequence[tuple[str, Listener]]) -> None:
        """Listen to the requests with these ids; confirmed by the server on return.

        Raises:
            BrokerUnavailable: not confirmed in time.
            Cancelled: the link is closed.
        """
        if self.is_closed:
            raise closed()
        await self._subscriber.subscribe([(self.channel(rid), listener) for rid, listener in listeners])

    def leave(self, rid: str, listener: Listener) -> None:
        """Stop listening. The server is told in the background."""
        self._subscriber.unsubscribe((self.channel(rid),), listener)

    # --- steps

    async def submit(self, submission: Submission) -> Submitted:
        """Submit a request, together with all others that wait.

        If the caller is cancelled while the submission is on its way, the request is cancelled after it.

        Raises:
            QueueFull, Conflict: it was not accepted.
            Cancelled: the link was closed; the request is cancelled.
            BrokerUnavailable: Redis cannot be reached, or does not confirm what `durability` asks for. It may
                have been accepted all the same.
        """
        if self.is_closed:
            raise closed()
        future = self.submits.put(submission)
        try:
            submitted = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda _: self._regret([submission]))
            raise
        self._taken([submission])
        refusal = self.refusal(submitted)
        if refusal is not None:
            raise refusal
        return submitted

    async def submit_all(self, submissions: Sequence[Submission]) -> Sequence[Submitted]:
        """Submit requests in one call of their own; gives what became of each. Else as `submit`."""
        if not submissions:
            return []
        if self.is_closed:
            raise closed()
        call = asyncio.ensure_future(self._submit(submissions))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            outcomes = await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda _: self._regret(submissions))
            raise
        self._taken(submissions)
        return outcomes

    async def _submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted]:
        try:
            outcomes = await self.broker.submit(submissions)
        except BaseException as error:
            for submission in submissions:
                if submission.watching is not None:
                    submission.watching.submitted(error)
            raise
        for submission, submitted in zip(submissions, outcomes, strict=True):
            if submission.watching is not None:
                submission.watching.submitted(submitted)
            # What is a duplicate may be somebody else's request.
            if submitted.outcome == "accepted":
                self._untaken.add(submission.envelope.rid)
        return outcomes

    def told(self, rid: str) -> None:
        """Leave a request to its submitter, who knows by now what became of it."""
        self._untaken.discard(rid)

    def _taken(self, submissions: Sequence[Submission]) -> None:
        if self.is_closed:
            raise closed()
        self._untaken.difference_update(submission.envelope.rid for submission in submissions)

    def _regret(self, submissions: Sequence[Submission]) -> None:
        if self.is_closed:
            return
        for submission in submissions:
            if submission.envelope.rid in self._untaken:
                self._untaken.discard(submission.envelope.rid)
                if not self.sharing.pass_on(submission.envelope.rid):
                    self.cancels.post(submission.envelope.rid)

    def refusal(self, submitted: Submitted) -> StreamfleetError | None:
        """Why a submission was not accepted; None if it was, now or before."""
        if submitted.outcome == "full":
            if submitted.reason == "tenant_budget" and submitted.tokens > submitted.limit:
                return InvalidRequest(  # whoever waited for another day would wait for ever
                    f"the request may take {submitted.tokens} tokens, its prompt and its longest answer, and "
                    f"its tenant has {submitted.limit} a day: ask for fewer, or have the share raised"
                )
            return _full(self.queue, submitted)
        if submitted.outcome == "conflict":
            return Conflict(
                "this idempotency key was used for another request before: "
                "use a new key, or send the same request"
            )
        return None

    async def record(self, rid: str) -> Record | None:
        return await self.records.put(rid)

    async def _records(self, rids: Sequence[str]) -> Sequence[Record | StreamfleetError | None]:
        try:
            return await self.broker.status(rids, self.tenant)
        except Undecodable as error:
            if len(rids) == 1:
                return [error]
            # One that was written by hand must not fail the others.
            return [found for rid in rids for found in await self._records([rid])]

    async def cancel_quietly(self, rid: str) -> None:
        """Cancel a request that nobody waits for any more. What stops that is no longer of interest.

        If Redis is away it is tried on in the background after `LEAVE_S`.
        """
        cancelling = self.cancels.put(rid)
        cancelling.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([cancelling], timeout=LEAVE_S)

    async def _sweep(self, asked: Sequence[None]) -> Sequence[None]:
        await self.broker.sweep(lazy=True)
        return asked

    async def close(self, within_s: float | None = None) -> None:
        """End all who wait, send what still waits to be sent, then close the connections.

        If Redis is away, what cannot be sent within `within_s`, or `CLOSE_S`, is not: those requests end by
        their deadlines.
        """
        self.is_closed = True
        for waiting in tuple(self.waiting):
            waiting.abandon()
        self.watch.close()
        await self.rids.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S if within_s is None else within_s):
                await self._send_the_last()
        for call in self._calls:
            call.cancel()
        # What these ask would otherwise ask it again, over connections made anew.
        coalescers: tuple[Coalescer[Any, Any], ...] = (self.submits, self.cancels, self.records, self._sweeps)
        for coalescer in coalescers:
            await coalescer.close(closed())
        await self.catalogue.close()
        if not self._shares:
            await self._subscriber.close()
            await self._connections.close()

    async def _send_the_last(self) -> None:
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self.submits.flush()
        await self.catalogue.settle()
        for rid in self._untaken:
            self.cancels.post(rid)
        await self.cancels.flush()


def _full(queue: str, submitted: Submitted) -> QueueFull:
    more = "or start more workers"
    why = f"is full: {submitted.depth} requests are accepted and unfinished, the limit is {submitted.limit}"
    if submitted.reason == "tokens":
        why = "is full: its open requests may take as many tokens as it allows (max_queue_tokens)"
    elif submitted.reason == "paused":
        why, more = "is paused", "or resume it"
    elif submitted.reason == "memory":
        why, more = "takes no requests: the memory of its Redis is nearly full", "or raise its maxmemory"
    elif submitted.reason == "tenant_requests":
        why = f"takes no more of this tenant, which has its share of {submitted.limit} open requests"
        more = "or have the share raised"
    elif submitted.reason == "tenant_tokens":
        why = f"takes no more of this tenant, whose open requests may take {submitted.limit} tokens at most"
        more = "ask for fewer tokens, or have the share raised"
    elif submitted.reason == "tenant_budget":
        why = f"takes no more of this tenant, which has {submitted.limit} tokens a day (UTC)"
        more = "ask for fewer tokens, or have the share raised"
    return QueueFull(
        f"queue {queue!r} {why}; try again in {submitted.retry_after_s:g} s, {more}",
        reason=submitted.reason,
        retry_after=submitted.retry_after_s,
        limit=submitted.limit,
        depth=submitted.depth,
        position=submitted.depth,
    )


def closed() -> Cancelled:
    """The error of whoever waits for a client that is closed."""
    return Cancelled("the client was closed while this was waited for")
