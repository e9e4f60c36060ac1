"""The record of a request, as the scripts write it (see `lua/record.lua`)."""

from __future__ import annotations

from dataclasses import dataclass

from streamfleet_common.errors import Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import State

STATES: dict[str, State] = {
    "Q": "queued",
    "R": "running",
    "D": "done",
    "F": "failed",
    "C": "cancelled",
    "X": "expired",
    "P": "dead",
}
LETTERS: dict[State, str] = {state: letter for letter, state in STATES.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """Where a request stands. Times are server ms; `started_at_ms` is 0 if no worker started it."""

    state: State
    epoch: int
    tenant: str
    accepted_at_ms: int
    started_at_ms: int
    attempts: int
    crashes: int
    """Workers that were lost while they ran it."""
    solo_losses: int
    """Those of them that ran nothing else."""
    deadline_at_ms: int
    """0 once it has ended."""
    owner: str
    """The worker that runs it, or ""."""
    digest: str
    end: Frame | None
    """The frame of its end event, once it has ended."""

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Read a record.

        Raises:
            Undecodable: no record.
        """
        head, newline, frame = data.partition(b"\n")
        fields = head.decode("utf-8", "replace").split("|")
        try:
            if fields[0].startswith("E"):
                state, deadline, owner = fields[0][1:], "0", ""
                _, epoch, started, attempts, crashes, solo, *meta = fields
            else:
                state, deadline = fields[0][:1], fields[0][1:]
                _, epoch, _, owner, started, attempts, crashes, solo, *meta = fields
            accepted, _, _, _, _, _, tenant, digest = meta
            ended = fields[0].startswith("E")
            return cls(
                state=STATES[state],
                epoch=int(epoch),
                tenant=tenant,
                accepted_at_ms=int(accepted),
                started_at_ms=int(started),
                attempts=int(attempts),
                crashes=int(crashes),
                solo_losses=int(solo),
                deadline_at_ms=int(deadline),
                owner=owner,
                digest=digest,
                # A request that waits for its next try has its payload behind the line feed.
                end=Frame.parse(frame) if ended and newline else None,
            )
        except (ValueError, KeyError, IndexError):
            raise Undecodable("not a request's record: was the key written by hand?") from None
