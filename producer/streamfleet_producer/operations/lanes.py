"""Waiting requests of a queue, moved to another lane."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.moves import Move, Outcome
from streamfleet_common.schemas import Lane
from streamfleet_common.shares import check_tenant
from streamfleet_producer.operations.control import known
from streamfleet_producer.operations.operator_broker import OperatorBroker

LEFT: dict[Outcome, str] = {
    "elsewhere": "in another lane",
    "there": "there already",
    "suspect": "suspects, which run alone",
    "running": "with a worker",
    "lost": "without their entry, which a sweep will end",
    "ended": "ended",
    "gone": "not to be found",
}
"""Why a request was left where it is."""
_RID = re.compile(r"[0-9a-f]{34}")


@dataclass(frozen=True, slots=True)
class Moves:
    """What became of all that were to be moved, in their order."""

    queue: str
    to: Lane
    moves: tuple[Move, ...]

    @property
    def moved(self) -> list[str]:
        """The ids of those that wait in the other lane now."""
        return [one.rid for one in self.moves if one.outcome == "moved"]

    @property
    def left(self) -> dict[Outcome, list[str]]:
        """The ids of all others, by reason."""
        return {
            why: [one.rid for one in self.moves if one.outcome == why]
            for why in LEFT
            if any(one.outcome == why for one in self.moves)
        }

    @property
    def words(self) -> str:
        """Why others were left, in words; empty where none was."""
        counts = Counter(one.outcome for one in self.moves)
        return ", ".join(f"{counts[why]:,} {words}" for why, words in LEFT.items() if counts[why])


async def move(
    broker: OperatorBroker,
    *,
    to: Lane,
    source: Lane | None = None,
    tenant: str | None = None,
    limit: int | None = None,
    rids: Sequence[str] = (),
) -> Moves:
    """Let waiting requests wait in another lane, behind those that wait there.

    Args:
        broker: of the queue.
        to: where they shall wait.
        source: the lane they wait in; wanted unless `rids` are named.
        tenant: only those of this tenant.
        limit: at most so many, those first that would be taken first.
        rids: these; else all that wait in `source` when the call begins.

    Raises:
        InvalidRequest: neither lane nor requests are named, or what is named cannot be.
        ModelNotFound: no worker has ever announced this queue.
        BrokerUnavailable: `reason="out_of_memory"`: Redis is full. What was moved before that stays moved.
    """
    if tenant is not None:
        check_tenant(tenant)
    if source == to:
        raise InvalidRequest(f"both lanes are {to}: name two")
    if source is None and not rids:
        raise InvalidRequest("say what is to be moved: --from LANE, or the ids of requests")
    bad = [rid for rid in rids if not _RID.fullmatch(rid)]
    if bad:
        raise InvalidRequest("an id has 34 hex digits, as `submit` prints it", problems=[bad[0][:80]])
    await known(broker)
    chosen = list(dict.fromkeys(rids))
    is_listed = not chosen
    if is_listed and source is not None:
        chosen = [one.rid for one in await broker.waiting(source, tenant=tenant)]
    moves = await broker.move(chosen[:limit], to=to, source=source, tenant=tenant)
    if is_listed:
        # They waited in the other lane a moment ago: the reply that told of their move was lost.
        moves = [Move(one.rid, "moved") if one.outcome == "there" else one for one in moves]
    return Moves(broker.keys.queue, to, tuple(moves))
