"""How deep a queue is, and how deep it may be."""

from __future__ import annotations

from dataclasses import dataclass

MAX_QUEUE_DEPTH = 1024
"""How many requests a queue holds, accepted and unfinished, where no worker has said otherwise."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Accepted and unfinished requests of a queue."""

    queued: int
    running: int
    limit: int
    dead: int

    @property
    def open(self) -> int:
        return self.queued + self.running
