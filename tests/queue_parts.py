"""Of what the model of a queue is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamfleet_common.submissions import Submission


@dataclass(eq=False)
class Item:
    """An entry of a stream. `request` is None for garbage, `owner` "" for what nobody has read."""

    request: Request | None
    stream: str
    """The end of its key: `normal`, `normal:2`, `solo`."""
    made_ms: int
    eid: str = ""
    owner: str = ""
    heard_ms: int = 0
    """When its owner last showed that it lives."""
    is_there: bool = True
    """Whether the entry itself is still in its stream."""


@dataclass(eq=False)
class Request:
    """One that was accepted."""

    submission: Submission
    deadline_ms: int
    state: str = "Q"
    epoch: int = 0
    owner: str = ""
    attempts: int = 0
    crashes: int = 0
    solo: int = 0
    seq: int = 0
    item: Item | None = None
    """None while it waits for its next try, and after the end."""
    due_ms: int = 0
    events: list[str] = field(default_factory=list)
    """The ids of everything that was to be published."""
    unbilled: int | None = None
    """The epoch in which it ran when somebody else ended it, until what that took is in the ledger."""
    lane: str = ""
    """The one it waits in, or comes back to."""

    def __post_init__(self) -> None:
        self.lane = self.lane or self.submission.envelope.lane

    @property
    def is_open(self) -> bool:
        return self.state in "QR"

    @property
    def rid(self) -> str:
        return self.submission.envelope.rid

    @property
    def tenant(self) -> str:
        return self.submission.envelope.tenant

    def is_run_by(self, owner: str, epoch: int, item: Item | None) -> bool:
        """Whether a write in this name may count."""
        mine = (self.state, self.epoch, self.owner) == ("R", epoch, owner)
        return mine and item is not None and item is self.item

    @property
    def is_shown(self) -> bool:
        """Whether a text has begun in the present epoch that its reader would not have begin anew."""
        envelope = self.submission.envelope
        return envelope.on_restart == "fail" and envelope.stream and self.seq > 0


@dataclass
class Counts:
    """What a sweep did."""

    expired: int = 0
    requeued: int = 0
    failed: int = 0
    dead: int = 0
    stray: int = 0
    is_grace: bool = False
