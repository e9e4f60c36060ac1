"""Requests that several callers of a client wait for, by one idempotency key."""

from __future__ import annotations

from typing import Protocol


class Sharer(Protocol):
    """Waits for a request that somebody else has submitted."""

    def inherit(self) -> None:
        """The request is yours to cancel from now on: who had it has left."""


class Sharing:
    """Who shares which request. Whoever submitted it may leave; only the last one's leaving cancels it.

    It knows the callers of one client, not those of another process.
    """

    def __init__(self) -> None:
        self._sharers: dict[str, dict[Sharer, None]] = {}

    def __len__(self) -> int:
        """How many requests are shared."""
        return len(self._sharers)

    def join(self, rid: str, sharer: Sharer) -> None:
        """Wait for a request of somebody else, until `leave`."""
        self._sharers.setdefault(rid, {})[sharer] = None

    def leave(self, rid: str, sharer: Sharer) -> None:
        """Wait no more. Nothing happens if it never joined, or has inherited the request."""
        sharers = self._sharers.get(rid)
        if sharers is not None:
            sharers.pop(sharer, None)
            if not sharers:
                del self._sharers[rid]

    def pass_on(self, rid: str) -> bool:
        """Give a request to whoever joined it first. False if nobody shares it."""
        sharers = self._sharers.get(rid)
        if sharers is None:
            return False
        sharer = next(iter(sharers))
        self.leave(rid, sharer)
        sharer.inherit()
        return True
