"""In which order a worker looks into the lanes."""

from __future__ import annotations

from collections.abc import Sequence

from streamfleet_common.schemas import LANES, Lane

WEIGHTS: dict[Lane, int] = {"high": 8, "normal": 4, "bulk": 1}
AGED_MS = 30_000
"""A lane whose oldest request has waited for so long has every second turn, whatever its weight."""


class LaneRotation:
    """Smooth weighted round robin: of 13 turns, `high` comes first in 8, `normal` in 4 and `bulk` in 1.

    No lane waits forever while another has work, and the turns of one lane are spread, not bunched. A lane
    that has waited too long shares the turns with all the others; of several, the one that waits longest.
    """

    def __init__(self) -> None:
        self._credit: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._aged: Lane | None = None
        self._turn = 0

    def waited(self, ms: Sequence[int]) -> None:
        """How long the oldest request of each lane has waited."""
        longest, lane = max(zip(ms, LANES, strict=True), key=lambda pair: pair[0])
        self._aged = lane if longest >= AGED_MS else None

    def turn(self) -> list[Lane]:
        """The lanes, in the order in which to look into them now."""
        self._turn += 1
        if self._aged is not None and self._turn % 2 == 0:
            # A gift, not charged: it would be paid for with turns when nothing waits too long any more.
            return [self._aged, *(lane for lane in self._order() if lane != self._aged)]
        for lane, weight in WEIGHTS.items():
            self._credit[lane] += weight
        order = self._order()
        self._credit[order[0]] -= sum(WEIGHTS.values())
        return order

    def _order(self) -> list[Lane]:
        return sorted(LANES, key=lambda lane: -self._credit[lane])
