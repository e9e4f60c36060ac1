"""What happened in a run, as everybody saw it: the checker judges from this and from nothing else.

Plain values, so that a test can write a history by hand. Times are milliseconds on the server's clock, unless
said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import End

SUB_LANES = 4
"""Of each lane, in the runs that split them."""
LANES = ("high", "normal", "bulk")
WORK_STREAMS = (
    *(*LANES, "high:again", "normal:again", "bulk:again", "solo"),
    *(f"{lane}:{number}" for lane in LANES for number in range(1, SUB_LANES)),
)

Cause = Literal["poison", "kill", "stop", "cut"]
"""Why a worker was lost: by a request, by a signal, by a pause or a cut line longer than its lease."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a producer wants: `count` tokens that begin with `word`, which no other order has."""

    rid: str
    tenant: str
    word: str
    count: int
    digest: str = ""
    stream: bool = False
    is_signed: bool = False
    """Each token tells the epoch and the process that made it."""
    is_poison: bool = False
    """It takes every worker down that runs it."""
    fates: frozenset[str] = frozenset({"done"})
    """How it may end."""
    deadline_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a submission. `at` is the order in which the answers came."""

    at: int
    rid: str
    digest: str
    outcome: str
    depth: int = 0


@dataclass(slots=True)
class Reading:
    """What one caller of the client got: the text as it came, and how it ended."""

    rid: str
    tenant: str
    how: Literal["events", "deltas", "answer"]
    """Whether restarts were shown, or hidden by one text that is never taken back; or the end alone."""
    shown: list[str] = field(default_factory=list)
    """Texts of deltas since the last restart."""
    restarts: int = 0
    end: End | None = None
    error: str | None = None
    """The code of the error it got."""
    is_retryable: bool = False
    gave_up: bool = False
    """The caller went away by itself."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A frame that was heard on a channel, by a listener who knows no client."""

    tenant: str
    rid: str
    frame: Frame


@dataclass(slots=True)
class Loss:
    """A worker that was lost with what it ran."""

    worker: str
    cause: Cause
    held: dict[str, int] = field(default_factory=dict)
    """What it ran, as far as it was seen: rid to epoch."""
    freed_ms: dict[str, float] = field(default_factory=dict)
    """How long after the loss each of those was seen in nobody's or somebody else's hands."""
    outages: int = 0
    """How often Redis was away or still until then, or owners were given grace since nobody had swept."""
    is_watched: bool = True
    """Whether `freed_ms` was measured: a paused worker may come back and finish."""


@dataclass(frozen=True, slots=True)
class Glimpse:
    """The queue at one moment, all of it at once."""

    at_ms: int
    open: int
    limit: int
    waiting: int
    """Entries of all work streams, given out or not."""
    later: int
    grace_until_ms: int = 0
    """Until when nothing is taken from anybody."""
    running: dict[str, tuple[int, str]] = field(default_factory=dict)
    """rid to epoch and owner."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One tenant asked for another tenant's request; `answer` is the error's code, or what it got."""

    asker: str
    rid: str
    answer: str


@dataclass(slots=True)
class Stream:
    """A work stream at the end."""

    length: int = 0
    pending: int = 0
    consumers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Remains:
    """What is left in Redis when all have gone home."""

    records: dict[str, Record] = field(default_factory=dict)
    logs: dict[str, list[Frame]] = field(default_factory=dict)
    """As they were soon after the end."""
    grown_logs: set[str] = field(default_factory=set)
    """Those that had become other ones when they were read again."""
    streams: dict[str, Stream] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    later: int = 0
    tenants: dict[str, int] = field(default_factory=dict)
    booked: dict[str, int] = field(default_factory=dict)
    """How many ends of each tenant's requests the ledger knows."""
    charged: dict[str, int] = field(default_factory=dict)
    """How many tokens of answers it has charged each tenant with."""
    dead: list[dict[str, str]] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)
    """Every key of the queue, without its tag, and what it has left to live; -1 is for ever."""
    clients: int = 0
    clients_before: int = 0
    stale_consumers_allowed: set[str] = field(default_factory=set)
    """Workers that were killed, and that nobody handed back."""

    def record(self, rid: str) -> Record | None:
        return self.records.get(rid)


@dataclass(slots=True)
class History:
    """All of it."""

    seed: int = 0
    lease_ms: int = 2000
    outage_ms: int = 0
    """How long Redis was away or still, all together."""
    orders: dict[str, Order] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    sightings: list[Sighting] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    glimpses: list[Glimpse] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    remains: Remains = field(default_factory=Remains)
    diary: list[str] = field(default_factory=list)
    """The faults, in words, as they were done."""

    def ends(self, rid: str) -> Iterator[Frame]:
        """The frames of all ends of a request that anybody heard."""
        return (seen.frame for seen in self.sightings if seen.rid == rid and seen.frame.is_end)

    def accepted(self) -> set[str]:
        """Requests that somebody was told are in the queue."""
        return {reply.rid for reply in self.replies if reply.outcome in ("accepted", "duplicate")}

    def write(self, path: Path) -> None:
        """Keep it in a file, one JSON object a line."""
        with path.open("w") as file:
            for one in fields(self):
                value = getattr(self, one.name)
                for item in value if isinstance(value, list) else [value]:
                    file.write(json.dumps({one.name: _plain(item)}) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, End):
        return value.model_dump(exclude_defaults=True)
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value
