"""What Redis tells of one queue, as far as this user may ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamfleet_common.backlog import Backlog
from streamfleet_common.cards import Card
from streamfleet_common.control import Control
from streamfleet_common.depth import Depth
from streamfleet_common.housekeeping import LEASE_MS
from streamfleet_common.keys import GROUP, QUEUES
from streamfleet_producer.operations.operator_broker import OperatorBroker

GRACE_MS = 30_000
"""What is overdue for less is not yet told: a sweep comes every few seconds."""
LOOKED_AT = 100
"""Of each stream so many entries are looked at."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who has read from a stream."""

    name: str
    pending: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """One stream of work that is there."""

    name: str
    """The end of its key: `normal`, `normal:2`, `solo`."""
    has_group: bool
    consumers: tuple[Consumer, ...]
    last_read_ms: int
    """The time in the id of the entry that was read last."""
    lost: int = 0
    """Entries whose lease is over since more than another lease; up to `LOOKED_AT`."""


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What was told; None where this user may not ask."""

    name: str
    key: str
    """What all its names begin with."""
    control: Control
    cards: tuple[Card, ...]
    depth: Depth
    streams: tuple[StreamFacts, ...] | None
    sweep: Mapping[str, str] | None
    """The notes of the sweeps."""
    overdue: int | None
    """Requests past their deadline for `GRACE_MS`."""
    backlog: Backlog | None
    strays: int | None
    """Waiting entries without a record, of those that were looked at."""
    announced_ms: int
    """When a worker last announced the queue; 0 where that is not to be read."""

    @property
    def now_ms(self) -> int:
        return self.control.now_ms

    @property
    def lease_ms(self) -> int:
        return lease_of(self.control)

    @property
    def consumers(self) -> list[tuple[str, Consumer]]:
        """All who have read, with the stream that each of them read."""
        return [(one.name, consumer) for one in self.streams or () for consumer in one.consumers]


def lease_of(control: Control) -> int:
    """How long a worker may be silent, as the workers announced it."""
    lease = control.settings.get("lease_ms", "")
    return int(lease) if lease.isdigit() else LEASE_MS


class Inspector(OperatorBroker):
    """A broker that looks at its queue, and changes nothing."""

    async def facts(self) -> QueueFacts:
        """Ask Redis what there is to know about the queue.

        Raises:
            BrokerUnavailable: Redis cannot be asked, or this user may not even see the queue's depth.
        """
        control, cards, depth = await self.control(), await self.cards(), await self.depth()
        keys, permitted = self.keys, self._calls.permitted
        redis: Any = self._commands
        sweep = await permitted(lambda: redis.hgetall(keys.sweep))
        overdue = await permitted(lambda: redis.zcount(keys.open, "-inf", control.now_ms - GRACE_MS))
        announced = await permitted(lambda: redis.hget(QUEUES, keys.queue))
        backlog = await permitted(lambda: self.backlog(LOOKED_AT))
        rids = [rid for line in backlog.lines for rid in line.rids] if backlog is not None else []
        strays = await permitted(lambda: self._strays(rids)) if backlog is not None else None
        return QueueFacts(
            name=keys.queue,
            key=keys.tag,
            control=control,
            cards=tuple(cards),
            depth=depth,
            streams=await permitted(lambda: self._seen_streams(lease_of(control))),
            sweep=None if sweep is None else {_text(key): _text(value) for key, value in sweep.items()},
            overdue=None if overdue is None else int(overdue),
            backlog=backlog,
            strays=strays,
            announced_ms=int(announced) if announced and announced.isdigit() else 0,
        )

    async def _strays(self, rids: Sequence[str]) -> int:
        """How many of these have no record."""
        if not rids:
            return 0
        pipe: Any = self._commands.pipeline(transaction=False)
        for rid in rids:
            pipe.getrange(self.keys.record(rid), 0, 0)
        return sum(not found for found in await pipe.execute())

    async def _seen_streams(self, lease_ms: int) -> tuple[StreamFacts, ...]:
        found = []
        groups = await self._ask_streams(lambda pipe, name: pipe.xinfo_groups(name))
        consumers = await self._ask_streams(lambda pipe, name: pipe.xinfo_consumers(name, GROUP))
        silent = await self._ask_streams(
            lambda pipe, name: pipe.xpending_range(name, GROUP, "-", "+", LOOKED_AT, idle=2 * lease_ms)
        )
        for at, (stream, number, its_groups) in enumerate(groups):
            its_consumers, its_silent = consumers[at][2], silent[at][2]
            if isinstance(its_groups, Exception):
                if "no such key" in str(its_groups):
                    continue
                raise its_groups
            mine = [group for group in its_groups if _text(group["name"]) == GROUP]
            last = _text(mine[0]["last-delivered-id"]) if mine else "0-0"
            # Without the group, the second question has an error for an answer.
            read_by = its_consumers if mine and not isinstance(its_consumers, Exception) else ()
            found.append(
                StreamFacts(
                    name=f"{stream}:{number}" if number else stream,
                    has_group=bool(mine),
                    consumers=tuple(
                        Consumer(_text(one["name"]), int(one["pending"]), int(one["idle"])) for one in read_by
                    ),
                    last_read_ms=int(last.partition("-")[0]),
                    lost=len(its_silent) if mine and not isinstance(its_silent, Exception) else 0,
                )
            )
        return tuple(found)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
