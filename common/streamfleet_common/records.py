"""The record of a request, as the scripts write it (see `lua/record.lua`)."""

from __future__ import annotations

from dataclasses import dataclass

from streamfleet_common.errors import Undecodable
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import LANES, Lane, State

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
_LANES: dict[str, Lane] = {lane[0]: lane for lane in LANES}


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
    lane: Lane | None = None
    """None once it has ended, as the two below say nothing then."""
    place: str = ""
    """Of its entry; "" while it waits for the time of its next try."""
    is_stream: bool = False

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """Read a record.

        Raises:
            Undecodable: no record.
        """
        # An open request that waits for its next try has its payload behind the line feed.
        head, _, rest = data.partition(b"\n")
        fields = head.decode("utf-8", "replace").split("|")
        try:
            if fields[0].startswith("E"):
                return cls._ended(fields, Frame.parse(rest))
            state, epoch, place, owner, started, attempts, crashes, solo, *meta = fields
            accepted, lane, stream, _, _, _, tenant, digest = meta
            return cls(
                state=STATES[state[:1]],
                epoch=int(epoch),
                tenant=tenant,
                accepted_at_ms=int(accepted),
                started_at_ms=int(started),
                attempts=int(attempts),
                crashes=int(crashes),
                solo_losses=int(solo),
                deadline_at_ms=int(state[1:]),
                owner=owner,
                digest=digest,
                end=None,
                lane=_LANES.get(lane),
                place=place,
                is_stream=stream == "s",
            )
        except (ValueError, KeyError, IndexError):
            raise Undecodable("not a request's record: was the key written by hand?") from None

    @classmethod
    def _ended(cls, fields: list[str], end: Frame) -> Record:
        # Before the crashes may stand a sign, which is for whoever ran it.
        state, crashes, solo, tenant, digest = fields
        accepted, started, _, attempts = end.times
        return cls(
            state=STATES[state[1:]],
            epoch=end.epoch,
            tenant=tenant,
            accepted_at_ms=accepted,
            started_at_ms=started,
            attempts=attempts,
            crashes=int(crashes),
            solo_losses=int(solo),
            deadline_at_ms=0,
            owner="",
            digest=digest,
            end=end,
        )
