"""Every Redis key, stream and channel name is made here.

All names of one shard of a queue begin with its hash tag, so that a cluster keeps them in one slot and
the scripts may touch them together.
"""

from __future__ import annotations

from typing import Literal

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

QUEUES = "streamfleet:queues"
"""Hash of all queues: name to the time (server ms) at which a worker last announced itself there."""

GROUP = "w"
"""The one consumer group of every work stream."""


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

    def stream(self, stream: Stream) -> str:
        """A stream of work."""
        return f"{self.tag}:s:{stream}"

    def record(self, rid: str) -> str:
        """The state of a request while it is open, its end afterwards."""
        return f"{self.tag}:r:{rid}"

    def log(self, rid: str) -> str:
        """The events of a streaming request."""
        return f"{self.tag}:ev:{rid}"

    def channel(self, tenant: str, rid: str) -> str:
        """The channel on which the events of a request are published."""
        return f"{self.tag}:c:{tenant}:{rid}"
