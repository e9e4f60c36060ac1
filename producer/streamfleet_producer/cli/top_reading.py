"""What `streamfleet top` reads: the figures of queues and the cards of workers, from Redis alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from streamfleet_common import codec
from streamfleet_common.calls import Calls
from streamfleet_common.cards import Card
from streamfleet_common.connections import Connections
from streamfleet_common.control import DRAIN
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, ModelNotFound
from streamfleet_common.figures import QueueFigures
from streamfleet_common.figures_reader import FiguresReader
from streamfleet_common.keys import Keys
from streamfleet_producer.names import listed
from streamfleet_producer.operations.operator_broker import OperatorBroker

LIMIT_S = 10.0
"""How long one reading may take."""
AT_ONCE = 50
"""Queues in one pipeline, so that others have their turn at Redis between two."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that lives."""

    card: Card
    is_asked: bool
    """Whether somebody has asked it to drain."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What Redis said at one time."""

    at_ms: int
    """On the server's clock."""
    queues: tuple[QueueFigures, ...]
    workers: tuple[Member, ...]
    unread: int = 0
    """Queues that were not read: there are too many, Redis was too slow, or refused."""
    refusal: str | None = None
    """What Redis said to the last that it refused."""


class FleetReader:
    """Reads the queues whose names fit one of `patterns`, or all.

    Commands are those of the role `operator`; see `acl.py`.
    """

    def __init__(self, connections: Connections, patterns: Sequence[str] = ()) -> None:
        self._commands = connections.commands
        self._calls = Calls(connections, "")
        self._names = OperatorBroker(connections, "any")
        self._figures = FiguresReader(connections)
        self._patterns = patterns

    async def check(self) -> None:
        """Refuse a filter that no queue passes: it is misspelled, or the URL is another server's.

        Raises:
            ModelNotFound: no queue fits; `known` lists those there are.
            BrokerUnavailable: Redis did not answer.
        """
        if self._patterns and not await self._chosen():
            known = await self._names.queues()
            raise ModelNotFound(
                f"no queue is called {' or '.join(map(repr, self._patterns))}; "
                f"the queues there are: {listed(known)}",
                known=known,
            )

    async def read(self) -> Reading:
        """Look at all now.

        Raises:
            BrokerUnavailable: Redis did not answer within `LIMIT_S`, or cannot be reached.
        """
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._read()
        except TimeoutError:
            raise BrokerUnavailable(
                f"Redis did not answer within {LIMIT_S:g} s", reason="unreachable"
            ) from None

    async def _read(self) -> Reading:
        names = await self._chosen()
        if not names:
            seconds, micros = await self._calls.ask(self._commands.time)
            return Reading(int(seconds) * 1000 + int(micros) // 1000, (), ())
        figures = await self._figures.read(names, within_s=LIMIT_S)
        at_ms = 0
        members: list[Member] = []
        queues = [one.queue for one in figures.queues]
        for first in range(0, max(1, len(queues)), AT_ONCE):
            at_ms, found = await self._members(queues[first : first + AT_ONCE])
            members += found
        return Reading(
            at_ms,
            figures.queues,
            tuple(sorted(members, key=lambda member: (member.card.queue, member.card.worker))),
            sum(figures.unread.values()),
            figures.refusal,
        )

    async def _chosen(self) -> list[str]:
        names = await self._names.queues()
        if not self._patterns:
            return names
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self._patterns)]

    async def _members(self, queues: Sequence[str]) -> tuple[int, list[Member]]:
        def ask() -> Awaitable[list[Any]]:
            # Made anew for each attempt: a pipeline is empty once it has run, even in vain.
            pipe = self._commands.pipeline(transaction=False)
            pipe.time()
            for keys in map(Keys, queues):
                pipe.hgetall(keys.workers)
                pipe.hkeys(keys.control)
            return pipe.execute()

        (seconds, micros), *answers = await self._calls.ask(ask)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        members = []
        for cards, fields in zip(answers[::2], answers[1::2], strict=True):
            for name, raw in cards.items():
                until, _, data = raw.partition(b"|")
                if not until.isdigit() or int(until) < now_ms:
                    continue
                try:
                    card = codec.decode_card(data)
                except InvalidRequest:
                    continue  # of a far version
                members.append(Member(card, DRAIN.encode() + name in fields))
        return now_ms, members
