"""Where a reader stands in a request's events, as text that he may keep and come back with."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from streamfleet_common.errors import InvalidRequest

_PLACE = re.compile(r"([1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,3}))?")


class Place(NamedTuple):
    """All events up to one were shown: that of this number in this epoch, both as the log counts.

    What a worker never told as events is made of the end, and then comes before it: with `part` so many of
    these were shown, and the end itself was not.
    """

    epoch: int
    seq: int
    part: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one.

        Raises:
            InvalidRequest: it is none; the message does not repeat it.
        """
        found = _PLACE.fullmatch(text)
        if found is None:
            raise unknown()
        epoch, seq, part = found.groups()
        return cls(int(epoch), int(seq), int(part or 0))

    @property
    def at(self) -> tuple[int, int]:
        """The event's place in the log."""
        return self.epoch, self.seq

    def covers(self, other: Place) -> bool:
        """Whether all that came with an event was shown to who stands here."""
        return other.at < self.at or (other.at == self.at and not self.part)

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}" + (f".{self.part}" if self.part else "")


def unknown() -> InvalidRequest:
    """The error for a place that no event of the request has."""
    return InvalidRequest(
        "no event of this request has this id: give one that you were given, or none to begin at the first "
        "event"
    )
