"""Requests in the hands of a worker: read, started, spoken for, ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamfleet_common.keys import Stream, place_of
from streamfleet_common.schemas import End


@dataclass(slots=True)
class Entry:
    """An entry of a work stream, as read: not yet started. `rid` is "" if it is none of ours."""

    rid: str
    eid: str
    stream: Stream
    payload: bytes
    sub_lane: int = 0

    @property
    def place(self) -> str:
        """Where it lies, as records say it."""
        return place_of(self.stream, self.eid, self.sub_lane)


@dataclass(slots=True)
class Delivery:
    """A request claimed by this worker in one epoch. Times are server ms."""

    entry: Entry
    owner: str
    epoch: int
    now_ms: int
    accepted_at_ms: int
    deadline_at_ms: int
    attempts: int
    crashes: int

    @property
    def key(self) -> tuple[str, int]:
        return (self.entry.rid, self.epoch)

    @property
    def fence(self) -> str:
        """What the record must say for this worker's writes to count."""
        return f"|{self.epoch}|{self.entry.place}|{self.owner}|"


NotStarted = Literal["gone", "lost", "expired", "stray"]


@dataclass(slots=True)
class Emission:
    """An event of a running request. Without a body the fence alone is checked."""

    delivery: Delivery
    tenant: str
    seq: int
    body: bytes


@dataclass(slots=True)
class Finish:
    """The end of a running request; `retry` tries it again instead, if it may be."""

    delivery: Delivery
    end: End
    retry: bool = False
    retry_after_ms: int | None = None
    """How long it waits then; None for as long as its own policy says."""
    went_back: bool = False
    """Set by `Broker.finish`: it is tried again, so this was no end."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a worker had computed of a request by the time it heard that somebody else had ended it.

    It knows its request by a fence alone, since it may wait longer than a payload should.
    """

    rid: str
    fence: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Taken:
    """What a look for work brought."""

    started: list[tuple[Entry, Delivery | NotStarted]]
    make_room: bool
    """A suspect waits to run alone: take nothing more until nothing runs, then look again."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """Whose leases were kept."""

    ours: list[bool]
    """In the order asked; False is lost: somebody else runs the request, or it has ended."""
    drain: bool
    """This worker is asked to drain."""


RIDS_TOLD = 64
"""The ids of so many lost requests, at most, are told by one who found them."""


@dataclass(frozen=True, slots=True)
class HandedBack:
    """What a lost worker held, and what became of it."""

    requests: int = 0
    rids: tuple[str, ...] = ()
    """Of those that wait again, or have failed since they may not be begun again; `RIDS_TOLD` at most."""
    buried: tuple[str, ...] = ()
    """Of those that are in the dead letters now; `RIDS_TOLD` at most."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did; counts of requests."""

    expired: int = 0
    requeued: int = 0
    failed: int = 0
    dead: int = 0
    stray: int = 0
    grace: bool = False
    """Nothing was taken from anybody: there was a pause in which nobody could have renewed a lease."""
    waited_ms: tuple[int, ...] = (0, 0, 0)
    """How long the oldest request that waits has waited, by lane (high, normal, bulk); 0 if none waits."""
    rids: tuple[str, ...] = ()
    """Of those that wait again or have failed; `RIDS_TOLD` at most."""
    buried: tuple[str, ...] = ()
    """Of those that are in the dead letters now, dead or stray; `RIDS_TOLD` at most."""
