"""What waits in a queue, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamfleet_common.steps import Steps

MOST_SEEN = 1000
"""Of each line so many are looked at: an answer must not hold the server up."""


@dataclass(frozen=True, slots=True)
class Line:
    """What waits in one stream of work, the next one first."""

    letter: str
    """The stream's, as in a place: "H" is read before "h"."""
    sub_lane: int
    oldest_ms: int
    """How long the first one has waited there."""
    rids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that no worker has read, up to a bound for each line."""

    lines: tuple[Line, ...]

    @property
    def oldest_ms(self) -> int:
        """How long the one that has waited longest waits; 0 if none does."""
        return max((line.oldest_ms for line in self.lines), default=0)

    def positions(self) -> dict[str, int]:
        """The place of each in its lane, the next one being 1.

        Of newcomers as many come from each sub-lane; what came back from a worker is before them all. How
        lanes take turns is the workers' affair, so nothing is said of other lanes.
        """
        places = {}
        for lane in "hnb":
            again = [rid for line in self.lines if line.letter == lane.upper() for rid in line.rids]
            places.update({rid: place for place, rid in enumerate(again, 1)})
            split = [line.rids for line in self.lines if line.letter == lane]
            for number, rids in enumerate(split):
                for turn, rid in enumerate(rids):
                    before = sum(min(len(others), turn) for others in split)
                    # Of those whose turn it is as well, the earlier sub-lanes are taken first.
                    before += sum(len(others) > turn for others in split[:number])
                    places[rid] = len(again) + before + 1
        suspects = [rid for line in self.lines if line.letter == "S" for rid in line.rids]
        places.update({rid: place for place, rid in enumerate(suspects, 1)})
        return places


class Backlogs(Steps):
    """The question what waits."""

    async def backlog(self, most: int = MOST_SEEN) -> Backlog:
        """What waits now: of each stream of work the first `most` requests."""
        now, *lines = await self._calls.script("backlog", [most])
        return Backlog(tuple(_line(int(now), line) for line in lines))


def _line(now_ms: int, line: Sequence[Any]) -> Line:
    letter, sub_lane, since, *rids = line
    return Line(
        letter.decode(), int(sub_lane), max(0, now_ms - int(since)), tuple(rid.decode() for rid in rids)
    )
