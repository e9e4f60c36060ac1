"""Every Redis key, stream and channel name is made here.

All names of one shard of a queue begin with its hash tag, so that a cluster keeps them in one slot and
the scripts may touch them together.
"""

from __future__ import annotations

import hashlib
import re
from datetime import date
from typing import Literal

from streamfleet_common.errors import Undecodable

Stream = Literal["high", "normal", "bulk", "high:again", "normal:again", "bulk:again", "solo"]
"""A stream of work: of a lane, of what came back to it (read first), or of suspects, which run alone."""
LETTERS: dict[Stream, str] = {
    "high": "h",
    "normal": "n",
    "bulk": "b",
    "high:again": "H",
    "normal:again": "N",
    "bulk:again": "B",
    "solo": "S",
}
"""How a place names its stream."""
STREAMS: dict[str, Stream] = {letter: stream for stream, letter in LETTERS.items()}
AGAIN: tuple[Stream, ...] = ("high:again", "normal:again", "bulk:again")
LANE_STREAMS: tuple[Stream, ...] = ("high", "normal", "bulk")
"""Those of newcomers, which may be split into sub-lanes by tenant."""
MAX_SUB_LANES = 64
_PLACE = re.compile(r"([hnb])([1-9][0-9]*)\.(.*)|([hnbHNBS])(.*)", re.DOTALL)

QUEUES = "streamfleet:queues"
"""Hash of all queues: name to the time (server ms) at which a worker last announced itself there."""

GROUP = "w"
"""The one consumer group of every work stream."""


def sub_lane_of(tenant: str, sub_lanes: int) -> int:
    """In which of so many sub-lanes of a lane a tenant's requests wait."""
    digest = hashlib.sha1(tenant.encode(), usedforsecurity=False).hexdigest()
    return int(digest[:8], 16) % sub_lanes


def all_streams(sub_lanes: int) -> list[tuple[Stream, int]]:
    """Every stream of work where each lane has so many sub-lanes."""
    split = [(stream, number) for number in range(1, sub_lanes) for stream in LANE_STREAMS]
    return [(stream, 0) for stream in LETTERS] + split


def place_of(stream: Stream, eid: str, sub_lane: int = 0) -> str:
    """Where an entry lies, as records say it."""
    return f"{LETTERS[stream]}{sub_lane}.{eid}" if sub_lane else LETTERS[stream] + eid


def parse_place(place: str) -> tuple[Stream, int, str]:
    """Stream, sub-lane and entry of a place.

    Raises:
        Undecodable: no place.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        raise Undecodable("not a place of an entry: was the record written by hand?")
    letter, number, eid, whole, its_eid = found.groups()
    return (STREAMS[letter], int(number), eid) if letter else (STREAMS[whole], 0, its_eid)


class Keys:
    """The names of one shard of one queue; `tag` is the prefix all of them share."""

    def __init__(self, queue: str, shard: int = 0) -> None:
        self.queue = queue
        self.shard = shard
        self.tag = f"{{q:{queue}:{shard}}}"
        self.open = f"{self.tag}:open"
        self.later = f"{self.tag}:later"
        self.sweep = f"{self.tag}:sweep"
        self.dead = f"{self.tag}:dead"
        self.workers = f"{self.tag}:workers"
        self.control = f"{self.tag}:control"
        self.tenants = f"{self.tag}:tenants"
        self.shares = f"{self.tag}:shares"
        self.batches = f"{self.tag}:batches"

    def stream(self, stream: Stream, sub_lane: int = 0) -> str:
        """A stream of work, of a lane the one of this sub-lane."""
        return f"{self.tag}:s:{stream}:{sub_lane}" if sub_lane else f"{self.tag}:s:{stream}"

    def usage(self, day: date) -> str:
        """The ledger of a day (UTC)."""
        return f"{self.tag}:usage:{day:%Y%m%d}"

    def record(self, rid: str) -> str:
        """The state of a request while it is open, its end afterwards."""
        return f"{self.tag}:r:{rid}"

    def log(self, rid: str) -> str:
        """The events of a streaming request."""
        return f"{self.tag}:ev:{rid}"

    def channel(self, tenant: str, rid: str) -> str:
        """The channel on which the events of a request are published."""
        return f"{self.tag}:c:{tenant}:{rid}"
