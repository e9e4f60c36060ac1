"""The producers of a run: every wish through the real client, and all that comes of it into the history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from chaos.history import History, Order, Probe, Reading, Reply
from chaos.plan import TENANTS, Plan, Wish
from streamfleet_common.errors import (
    BrokerUnavailable,
    Conflict,
    QueueFull,
    StreamfleetError,
)
from streamfleet_common.schemas import Delta, GenerateRequest, Restart
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_producer import Client, TokenStream
from streamfleet_producer.ticket import Options

SECRET = "of this run"
ASK_AGAIN_S = 0.3


class Producers:
    """One client for each tenant, all on one URL; an async context manager."""

    def __init__(self, url: str, queue: str, plan: Plan, history: History) -> None:
        self._plan = plan
        self._history = history
        self._wishes = {wish.word: wish for wish in plan.wishes}
        self._clients = {
            tenant: Client(url, queue, tenant=tenant, secret=SECRET, silence_s=1.0, outage_s=60.0)
            for tenant in TENANTS
        }
        self._replies = 0

    async def __aenter__(self) -> Producers:
        for client in self._clients.values():
            await client.open()
            self._record_replies(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    async def run(self) -> None:
        """Ask for everything at its time; returns when everybody has been told."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for wish in self._plan.wishes:
                await asyncio.sleep(began + wish.at_s - loop.time())
                group.create_task(self._ask(wish), name=wish.word)

    # --- one wish

    async def _ask(self, wish: Wish) -> None:
        client = self._clients[wish.tenant]
        request = GenerateRequest(prompt=wish.prompt)
        options: Options = {"lane": wish.lane, "deadline_s": wish.deadline_s, "on_restart": wish.on_restart}
        if wish.twist == "again":
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(client, wish, request, options))
                group.create_task(self._read(client, wish, request, options))
        else:
            await self._read(client, wish, request, options)
        if wish.twist == "conflict":
            other = GenerateRequest(prompt=f"{wish.prompt} OTHER")
            await self._insist(
                lambda: client.submit(other, idempotency_key=wish.word, **options), wanted=Conflict
            )

    async def _read(self, client: Client, wish: Wish, request: GenerateRequest, options: Options) -> None:
        key = wish.word if wish.is_keyed else None
        while True:
            reading = Reading("", wish.tenant, "answer")
            aside: asyncio.Task[None] | None = None
            try:
                if wish.how in ("events", "deltas"):
                    stream = client.stream(request, idempotency_key=key, **options)
                    reading.how = "events" if wish.how == "events" else "deltas"
                    async with stream as tokens:
                        aside = self._aside(client, wish, tokens.id)
                        await self._follow(tokens, reading, wish)
                elif wish.how == "answer" and key is not None and not wish.twist:
                    reading.rid = client._intake.rid(key)
                    reading.end = await client.run(request, idempotency_key=key, **options)
                else:
                    ticket = await client.submit(request, stream=wish.streams, idempotency_key=key, **options)
                    aside = self._aside(client, wish, ticket.id)
                    await self._later(client, wish, ticket.id, reading)
            except (QueueFull, BrokerUnavailable) as error:
                if wish.is_keyed or not reading.rid:
                    # What was accepted all the same is found again by its key, or has nobody who asks for it.
                    await asyncio.sleep(ASK_AGAIN_S)
                    continue
                self._told(reading, error)
            except StreamfleetError as error:
                self._told(reading, error)
            finally:
                if aside is not None:
                    await aside
            self._history.readings.append(reading)
            return

    def _told(self, reading: Reading, error: StreamfleetError) -> None:
        reading.error = error.code
        reading.is_retryable = error.retryable

    async def _later(self, client: Client, wish: Wish, rid: str, reading: Reading) -> None:
        if wish.how != "attach":
            reading.rid = rid
            reading.end = await client.result(rid)
            return
        reading.how = "events"
        async with client.attach(rid) as tokens:
            await self._follow(tokens, reading, wish)

    async def _follow(self, tokens: TokenStream, reading: Reading, wish: Wish) -> None:
        reading.rid = tokens.id
        if reading.how == "events":
            async for event in tokens.events():
                if isinstance(event, Restart):
                    reading.shown.clear()
                    reading.restarts += 1
                elif isinstance(event, Delta):
                    reading.shown.append(event.text)
                    if self._leaves(reading, wish):
                        return
        else:
            async for delta in tokens:
                reading.shown.append(delta.text)
                if self._leaves(reading, wish):
                    return
        reading.end = tokens.result

    def _leaves(self, reading: Reading, wish: Wish) -> bool:
        reading.gave_up = wish.twist == "leave" and len(reading.shown) >= 2
        return reading.gave_up

    def _aside(self, client: Client, wish: Wish, rid: str) -> asyncio.Task[None] | None:
        """What else is done to a request that was accepted."""
        if wish.twist == "cancel":
            return asyncio.create_task(self._cancel(client, wish, rid))
        if wish.twist == "foreign":
            return asyncio.create_task(self._probe(wish, rid))
        return None

    async def _cancel(self, client: Client, wish: Wish, rid: str) -> None:
        await asyncio.sleep(wish.twist_s)
        await self._insist(lambda: client.cancel(rid))

    async def _probe(self, wish: Wish, rid: str) -> None:
        asker = TENANTS[(TENANTS.index(wish.tenant) + 1) % len(TENANTS)]
        foreign = self._clients[asker]
        for ask in (foreign.status, foreign.cancel, foreign.result):
            answer = await self._insist(lambda ask=ask: ask(rid), wanted=StreamfleetError)
            self._history.probes.append(Probe(asker, rid, answer))

    async def _insist(self, call: Any, wanted: type[StreamfleetError] | None = None) -> str:
        """Ask until Redis answers; gives the code of the error, or what came instead of one."""
        while True:
            try:
                return f"{await call()!r}"
            except (BrokerUnavailable, QueueFull):
                await asyncio.sleep(ASK_AGAIN_S)
            except StreamfleetError as error:
                if wanted is None or not isinstance(error, wanted):
                    raise
                return error.code

    # --- what the queue said

    def _record_replies(self, client: Client) -> None:
        broker = client._open_link().broker
        submit = broker.submit

        async def recording(submissions: Sequence[Submission], **options: Any) -> list[Submitted]:
            for submission in submissions:
                self._order(submission)
            outcomes = await submit(submissions, **options)
            for submission, submitted in zip(submissions, outcomes, strict=True):
                self._replies += 1
                reply = Reply(
                    self._replies,
                    submission.envelope.rid,
                    submission.digest,
                    submitted.outcome,
                    submitted.depth,
                )
                self._history.replies.append(reply)
            return outcomes

        broker.submit = recording  # type: ignore[method-assign]

    def _order(self, submission: Submission) -> None:
        envelope = submission.envelope
        request = envelope.request
        assert isinstance(request, GenerateRequest)
        words = (request.prompt or "").split()
        wish = self._wishes[words[3]]
        if wish.prompt == request.prompt:
            self._history.orders.setdefault(
                envelope.rid,
                Order(
                    rid=envelope.rid,
                    tenant=envelope.tenant,
                    word=wish.word,
                    count=wish.count,
                    digest=submission.digest,
                    stream=envelope.stream,
                    is_signed=wish.is_signed,
                    is_poison=wish.is_poison,
                    fates=_fates(wish),
                    deadline_ms=envelope.deadline_ms,
                ),
            )


def _fates(wish: Wish) -> frozenset[str]:
    # Two attempts with different texts fail a stream of one text; its caller leaves, and that cancels it.
    return wish.fates | {"cancelled"} if wish.how == "deltas" and wish.is_signed else wish.fates
