"""Waiting requests, moved to another lane."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from streamfleet_common.keys import AGAIN, LETTERS, parse_place
from streamfleet_common.records import STATES
from streamfleet_common.schemas import Lane, State
from streamfleet_common.steps import Steps

LOOKED_AT = 500
"""Records that are read at once."""
COMPANY = 2
"""From so many lost workers on a request runs alone, as the scripts have it."""
HEAD_BYTES = 1024
"""No record of an open request has a longer head."""
_QUEUED = re.compile(
    rb"Q[0-9]+\|[0-9]+\|(?P<place>[^|]*)\|\|[0-9]+\|[0-9]+\|(?P<crashes>[0-9]+)\|[0-9]+\|(?P<accepted>[0-9]+)"
    rb"\|(?P<lane>[hnb])\|[s-]\|[0-9]+\|[^|]*\|[0-9]+\|(?P<tenant>[^|\n]+)\|"
)
Outcome = Literal["moved", "there", "elsewhere", "suspect", "running", "lost", "ended", "gone"]
"""* `moved`: it waits in the other lane now
* `there`: it did already, or since an earlier try of this very call whose reply was lost
* `elsewhere`: it waits in another lane than the one named
* `suspect`: workers died under it, so it runs alone, in no lane
* `running`: a worker has it
* `lost`: somebody deleted its entry by hand; a sweep will end it
* `ended`: there is nothing left to move
* `gone`: the tenant has no such request, or its result has expired
"""


@dataclass(frozen=True, slots=True)
class Move:
    """What became of one request."""

    rid: str
    outcome: Outcome
    state: State | None = None
    """Of one that has ended."""


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A request that nobody runs; they are ordered as they will be taken."""

    turn: tuple[int, int, int]
    """What came back from a worker (0), newcomers (1), what waits for its next try (2); then when it came."""
    rid: str
    tenant: str


class MoveSteps(Steps):
    """Look for what waits, and move it."""

    async def move(
        self, rids: Sequence[str], *, to: Lane, source: Lane | None = None, tenant: str | None = None
    ) -> list[Move]:
        """Let these requests wait in another lane, behind those that wait there; in this order.

        Each is moved wholly or not at all, and what a worker has is left alone. What came back from a worker
        stays before the newcomers, and what waits for its next try comes back to that lane.

        Args:
            rids: of the requests.
            to: where they shall wait.
            source: move those alone that wait in this lane.
            tenant: move those alone that are this tenant's.

        Raises:
            BrokerUnavailable: `reason="out_of_memory"` where Redis is full; nothing was moved by that call.
        """
        head = [LETTERS[source] if source else "", LETTERS[to], tenant or ""]
        replies = await self._calls.script_in_batches("move", head, [(rid,) for rid in rids])
        return [_move(rid, reply) for rid, reply in zip(rids, replies, strict=True)]

    async def waiting(self, lane: Lane, *, tenant: str | None = None) -> list[Waiting]:
        """What waits in a lane, in its order: what came back, newcomers, what waits for its next try.

        Suspects are in no lane. One that comes or goes meanwhile may be missed or told.
        """
        found: list[Waiting] = []
        async for rids in self._open_rids():
            names = [self.keys.record(rid) for rid in rids]
            for rid, record in zip(rids, await self._heads(names), strict=True):
                one = _waiting(rid, record, LETTERS[lane])
                if one is not None and tenant in (None, one.tenant):
                    found.append(one)
        return sorted(set(found))

    async def _open_rids(self) -> AsyncIterator[list[str]]:
        # By ZSCAN: what is open all the time is told at least once, whatever comes and goes meanwhile.
        cursor = 0
        while True:
            found: Any = await self._calls.ask(
                lambda cursor=cursor: self._commands.zscan(self.keys.open, cursor, count=LOOKED_AT)  # type: ignore[misc]
            )
            cursor, pairs = found
            rids = [rid.decode() for rid, _ in pairs]
            for start in range(0, len(rids), LOOKED_AT):
                yield rids[start : start + LOOKED_AT]
            if not int(cursor):
                return

    async def _heads(self, names: Sequence[str]) -> list[bytes]:
        def ask() -> Awaitable[list[Any]]:
            # Not whole records: one that waits for its next try holds its payload.
            pipe = self._commands.pipeline(transaction=False)
            for name in names:
                pipe.getrange(name, 0, HEAD_BYTES - 1)
            return pipe.execute()

        return cast("list[bytes]", await self._calls.ask(ask))


def _move(rid: str, reply: bytes) -> Move:
    outcome, _, letter = reply.decode().partition("|")
    if outcome == "already":
        return Move(rid, "ended", STATES.get(letter))
    return Move(rid, cast("Outcome", outcome))


def _waiting(rid: str, head: bytes, letter: str) -> Waiting | None:
    """The request, if it waits in the lane of this letter; `head` begins its record."""
    found = _QUEUED.match(head)
    if found is None or found["lane"].decode() != letter or int(found["crashes"]) >= COMPANY:
        return None
    tenant = found["tenant"].decode("utf-8", "replace")
    if not found["place"]:
        return Waiting((2, int(found["accepted"]), 0), rid, tenant)
    stream, _, eid = parse_place(found["place"].decode())
    ms, _, number = eid.partition("-")
    return Waiting((0 if stream in AGAIN else 1, int(ms), int(number)), rid, tenant)
