"""Requests in the hands of a worker: read, started, spoken for, ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamfleet_common.schemas import End, Lane


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a work stream, as read: not yet started. `rid` is "" if it is none of ours."""

    rid: str
    eid: str
    lane: Lane
    payload: bytes


@dataclass(frozen=True, slots=True)
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
        return f"|{self.epoch}|{self.entry.eid}|{self.owner}|"


NotStarted = Literal["gone", "lost", "expired", "stray"]


@dataclass(frozen=True, slots=True)
class Emission:
    """An event of a running request. Without a body the fence alone is checked."""

    delivery: Delivery
    tenant: str
    seq: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a running request."""

    delivery: Delivery
    end: End
