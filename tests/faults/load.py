"""Steady load on a queue while something breaks, and the account of what became of every request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.broker import Broker
from streamfleet_common.errors import (
    BrokerUnavailable,
    IncompleteGeneration,
    ModelNotFound,
    QueueFull,
    StreamfleetError,
)
from streamfleet_common.keys import LETTERS
from streamfleet_common.records import Record
from streamfleet_common.schemas import GenerateRequest
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_producer import Client
from streamfleet_producer.intake import keyed_rid

QUEUE = "q"
TENANT = "default"
PRODUCERS = 8
AGAIN_S = 0.02
REST_S = 60.0
_TELL = (BrokerUnavailable, QueueFull, ModelNotFound)
"""What a producer meets with the same request under the same key, once more."""


@dataclass(slots=True)
class Account:
    """What became of all that was accepted."""

    accepted: int = 0
    lost: list[str] = field(default_factory=list)
    """Accepted, but it is still open, or there is no record of it and nobody was answered."""
    faded: int = 0
    """Answered, but Redis has forgotten that."""
    doubled: list[str] = field(default_factory=list)
    """Accepted more than once, or told to two callers in two ways."""
    states: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    most_attempts: int = 0
    left: int = 0
    """Entries of the streams, and places in the queue, that nobody needs any more."""
    ends: int = 0
    """Ends that were written."""

    def __str__(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        return (
            f"{self.accepted} accepted ({states}), {len(self.lost)} lost, {len(self.doubled)} doubled, "
            f"{self.crashes} crashes counted"
        )

    def is_whole(self) -> bool:
        """Nothing lost, nothing twice, nothing left; an end for each."""
        bad = self.lost or self.doubled or self.left or self.faded
        return not bad and self.ends == self.accepted


class Load:
    """Producers that ask for one request after the other, each until it is answered; a context manager.

    Half of them read streams, half wait for the answer. Whatever cannot be done is tried again under the same
    key, so nothing is given up, and what Redis forgot (`forgotten`) is sent again.
    """

    def __init__(
        self,
        url: str,
        *,
        producers: int = PRODUCERS,
        tokens: int = 4,
        tick_ms: int = 10,
        **client: Any,
    ) -> None:
        self._url = url
        self._producers = producers
        self._tokens, self._tick_ms = tokens, tick_ms
        self._options = {"silence_s": 1.0, "outage_s": 60.0} | client
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[Client] = []
        self.accepts: Counter[str] = Counter()
        self.answered: set[str] = set()
        self.answered_at: list[float] = []
        """When answers came, on the loop's clock."""
        self.took_s: list[float] = []
        """How long each answer took, all tries together."""
        self.errors: Counter[str] = Counter()
        self.forgotten: list[str] = []
        self.wrong: list[str] = []
        """Texts that are not what was asked for."""

    async def __aenter__(self) -> Load:
        self._clients = [Client(self._url, QUEUE, **self._options) for _ in range(2)]
        for client in self._clients:
            await client.open()
            self._count_accepts(client)
        self._tasks = [
            asyncio.create_task(self._produce(number), name=f"producer {number}")
            for number in range(self._producers)
        ]
        await self.served()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()
        for outcome in outcomes:
            if kind is None and isinstance(outcome, BaseException):
                raise outcome

    async def served(self, more: int = 0) -> float:
        """Wait for `more` answers than one a producer; gives how long the first one took, in seconds."""
        began = asyncio.get_running_loop().time()
        count = len(self.answered_at)
        async with asyncio.timeout(REST_S):
            while len(self.answered_at) < count + self._producers + more:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)
        return self.answered_at[count] - began

    def latency(self) -> str:
        """Of all answers, in words."""
        ordered = sorted(self.took_s)
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        return f"p50 {p50:.2f} s, p99 {p99:.2f} s"

    # --- one producer

    async def _produce(self, number: int) -> None:
        client = self._clients[number % len(self._clients)]
        count = 0
        while not self._stopping:
            count += 1
            await self._ask(client, f"{number}-{count}", streams=number % 4 < 2)

    async def _ask(self, client: Client, key: str, *, streams: bool) -> None:
        request = GenerateRequest(prompt=f"ECHO {self._tokens} AS k{key}. TICK {self._tick_ms}")
        text = " ".join(f"k{key}.{at}" for at in range(self._tokens))
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            try:
                if streams:
                    async with client.stream(request, idempotency_key=key) as tokens:
                        shown = "".join([delta.text async for delta in tokens])
                else:
                    shown = (await client.run(request, idempotency_key=key)).text
            except _TELL as error:
                self.errors[error.code] += 1
                await asyncio.sleep(AGAIN_S)
            except IncompleteGeneration:
                self.forgotten.append(rid_of(key))
            except StreamfleetError as error:
                # It has ended, in another way than it should; its record tells.
                self.errors[error.code] += 1
                return
            else:
                if shown != text:
                    self.wrong.append(f"{key}: {shown!r}")
                self.answered.add(rid_of(key))
                self.answered_at.append(now())
                self.took_s.append(now() - began)
                return

    def _count_accepts(self, client: Client) -> None:
        link = client._open_link()
        submit = link.broker.submit

        async def counting(submissions: Sequence[Submission], **options: Any) -> list[Submitted]:
            outcomes = await submit(submissions, **options)
            for submission, submitted in zip(submissions, outcomes, strict=True):
                if submitted.outcome in ("accepted", "duplicate"):
                    self.accepts[submission.envelope.rid] += submitted.outcome == "accepted"
            return outcomes

        link.broker.submit = counting  # type: ignore[method-assign]

    # --- the account

    async def account(self, broker: Broker) -> Account:
        """Wait until the queue is at rest, and look at every record."""
        await at_rest(broker)
        found = Account(accepted=len(self.accepts))
        rids = list(self.accepts)
        for rid, record in zip(rids, await broker.status(rids, TENANT), strict=True):
            if record is None and rid in self.answered:
                found.faded += 1
                continue
            if record is None or record.end is None:
                found.lost.append(rid)
                continue
            found.states[record.state] += 1
            found.crashes += record.crashes
            found.most_attempts = max(found.most_attempts, record.attempts)
        again = Counter(self.forgotten)
        found.doubled = [rid for rid, count in self.accepts.items() if count > 1 + again[rid]] + self.wrong
        raw: Any = broker._commands
        found.left = await _left(broker)
        found.ends = int(await raw.hget(broker.keys.sweep, "ended") or 0)
        return found


def rid_of(key: str) -> str:
    """The id of the request with this key."""
    return keyed_rid(TENANT.encode(), key)


async def ended(broker: Broker, rids: Sequence[str], limit_s: float = REST_S) -> list[Record]:
    """Wait until all of these have ended; gives their records."""
    async with asyncio.timeout(limit_s):
        while True:
            records = [record for record in await broker.status(rids, TENANT) if record is not None]
            assert len(records) == len(rids), "a record is lost"
            if all(record.end is not None for record in records):
                return records
            await asyncio.sleep(0.02)


def ended_at_ms(record: Record) -> int:
    """When a request ended, on the server's clock."""
    assert record.end is not None
    return record.end.times[2]


async def at_rest(broker: Broker, limit_s: float = REST_S) -> None:
    """Wait until nothing is open."""
    async with asyncio.timeout(limit_s):
        while (await broker.depth()).open:  # noqa: ASYNC110 (the server has no event for it)
            await asyncio.sleep(0.02)


async def _left(broker: Broker) -> int:
    raw: Any = broker._commands
    count: int = await raw.zcard(broker.keys.open)
    for stream in LETTERS:
        count += await raw.xlen(broker.keys.stream(stream))
    return count
