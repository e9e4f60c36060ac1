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
    deadline_at_ms: int
    """0 once it has ended."""
    owner: str
    """The worker that runs it, or ""."""
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
                state, epoch, started, attempts, _, _, accepted, _, _, _, tenant, _ = fields
                return cls(
                    STATES[state[1:]],
                    int(epoch),
                    tenant,
                    int(accepted),
                    int(started),
                    int(attempts),
                    0,
                    "",
                    Frame.parse(frame) if newline else None,
                )
            first, epoch, _, owner, started, attempts, _, _, accepted, _, _, _, tenant, _ = fields
            return cls(
                STATES[first[0]],
                int(epoch),
                tenant,
                int(accepted),
                int(started),
                int(attempts),
                int(first[1:]),
                owner,
                None,
            )
        except (ValueError, KeyError, IndexError):
            raise Undecodable("not a request's record: was the key written by hand?") from None
