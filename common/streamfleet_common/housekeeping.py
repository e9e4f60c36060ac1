"""The steps that keep the house: sweeps, what a lost worker held, and the cards of the living."""

from __future__ import annotations

from typing import Any

from streamfleet_common import codec
from streamfleet_common.cards import Card
from streamfleet_common.deliveries import RIDS_TOLD, HandedBack, Swept
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest
from streamfleet_common.keys import MAX_SUB_LANES, QUEUES
from streamfleet_common.schemas import End, EndState, Failure
from streamfleet_common.steps import Steps

CARD_LIFE_MS = 15_000
LEASE_MS = 15_000
"""How long a worker may be silent before its requests are given to others, where no worker said otherwise."""
AT_ONCE = 100
"""Requests that one call deals with, so that others have their turn at Redis between two calls."""


class Housekeeping(Steps):
    """Sweep, hand back, announce."""

    async def sweep(self, *, lease_ms: int = LEASE_MS, lazy: bool = False) -> Swept:
        """Do what is due: end overdue requests, and give the work of silent workers to others.

        Everybody may sweep at any time, at odds and without a lock. Nothing is taken from anybody for one
        lease after nobody has swept for half a lease: then the server itself may have stood still.
        `lease_ms` counts only where no worker has set one. With `lazy`, for those of whom there are many,
        only what is overdue is ended if somebody has swept in full within a third of a lease.
        """
        total = Swept()
        while True:
            args = [lease_ms, AT_ONCE, _OVERDUE, _LOST_PAYLOAD, _LOST_WORKER, _DEAD, int(lazy)]
            reply = await self._calls.script("sweep", args)
            expired, requeued, failed, dead, stray, more, grace, *waited, rids, buried = reply
            total = Swept(
                total.expired + expired,
                total.requeued + requeued,
                total.failed + failed,
                total.dead + dead,
                total.stray + stray,
                bool(grace),
                tuple(waited),
                _told(total.rids, rids),
                _told(total.buried, buried),
            )
            if not more:
                return total

    async def hand_back(self, owner: str, *, crashed: bool) -> HandedBack:
        """Give all that a worker held to others, at once.

        For whoever knows that the worker is gone. `crashed` counts its death against what it ran; a worker
        that was stopped on purpose is no evidence.
        """
        total = HandedBack()
        while True:
            args = [owner, int(crashed), AT_ONCE, _LOST_PAYLOAD, _LOST_WORKER, _DEAD]
            taken, rids, buried = await self._calls.script("handback", args)
            total = HandedBack(total.requests + taken, _told(total.rids, rids), _told(total.buried, buried))
            if taken < AT_ONCE:
                return total

    async def announce(
        self,
        card: Card,
        *,
        life_ms: int = CARD_LIFE_MS,
        lease_ms: int = LEASE_MS,
        keep_payload: bool = False,
        crowded: bool = False,
        sub_lanes: int = 1,
    ) -> None:
        """Show a worker's card for `life_ms`; 0 takes it down, and forgets the worker's consumers.

        `keep_payload` keeps the requests themselves in dead letters. `crowded` refuses new requests for half
        the card's life: Redis's memory is nearly full. Each lane is split into `sub_lanes` (1 to
        `MAX_SUB_LANES`), in one of which a tenant's requests wait.

        Raises:
            InvalidRequest: `sub_lanes` is out of its bounds.
        """
        if not 1 <= sub_lanes <= MAX_SUB_LANES:
            raise InvalidRequest(f"{sub_lanes} sub-lanes are not possible: take 1 to {MAX_SUB_LANES}")
        limits = card.limits
        args: list[Any] = [card.worker, codec.encode(card), life_ms, limits.max_queue_depth]
        args += [limits.max_queue_tokens, lease_ms, int(keep_payload), int(crowded), sub_lanes]
        now = await self._calls.script("announce", args)
        self._sub_lanes = max(self._sub_lanes, sub_lanes)
        await self._name_queue(int(now))

    async def announce_queue(self) -> bool:
        """Name the queue among the fleet's, for a worker that has no card yet: callers wait for it then.

        Gives whether nobody had named it before.
        """
        seconds, micros = await self._calls.ask(self._commands.time)
        return await self._name_queue(seconds * 1000 + micros // 1000)

    async def withdraw_queue(self) -> None:
        """Forget the queue's name again, unless requests are open there or a card is shown.

        Another worker that has no card yet names it once more when it has.
        """
        redis: Any = self._commands
        if await self._calls.ask(lambda: redis.zcard(self.keys.open)):
            return
        if await self._calls.ask(lambda: redis.hgetall(self.keys.workers)):
            return
        await self._calls.ask(lambda: redis.hdel(QUEUES, self.keys.queue))

    async def _name_queue(self, now: int) -> bool:
        """Whether it is a new name."""
        try:
            added = await self._calls.ask(lambda: self._commands.hset(QUEUES, self.keys.queue, str(now)))
        except BrokerUnavailable as error:
            # Cards are shown all the same. A full Redis refuses a plain command, and knows most names.
            if error.details.get("reason") != "out_of_memory":
                raise
            return False
        return bool(added)

    async def memory_used(self) -> float:
        """Redis's memory in use, as a share of its `maxmemory`; 0 where it has no limit."""
        memory: Any = await self._calls.ask(lambda: self._commands.info("memory"))
        limit = memory.get("maxmemory", 0)
        return float(memory.get("used_memory", 0)) / limit if limit else 0.0


def _told(before: tuple[str, ...], more: list[bytes]) -> tuple[str, ...]:
    return (*before, *(rid.decode() for rid in more))[:RIDS_TOLD]


def _end(state: EndState, code: str, message: str, **details: Any) -> bytes:
    return codec.encode(End(state=state, error=Failure(code=code, message=message, details=details)))


_OVERDUE = _end("expired", "deadline_exceeded", "not answered before its deadline")
_LOST_PAYLOAD = _end(
    "failed",
    "generation_failed",
    "the queue lost this request (its entry was deleted or trimmed by hand): send it again",
    retryable=True,
)
_LOST_WORKER = _end(
    "failed",
    "generation_failed",
    "its worker was lost, and the request may not be begun again: send it again",
    retryable=True,
)
_DEAD = _end(
    "dead",
    "generation_failed",
    "workers die of this request, also when they run nothing else: do not send it again as it is; "
    "it is in the dead letters",
    retryable=False,
)
