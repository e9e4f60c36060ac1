"""When newcomers join."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import LaunchReason
    from streamfleet_worker.engine.sequence import Sequence

RESUME_SHARE = 0.3
"""While rows run, newcomers wait until they are this share of the running: what the first chunks of prompts
cost all rows should serve several."""


class Admission:
    """The rule that opens and shuts the door to the batch.

    With R running rows, W waiting, `free` rows, and s steps since the first in line came, or since the last
    admission if that is more and rows run, it is open when a row is free and

    * full: W ≥ free; or
    * ratio: rows run, and W ≥ ceil(0.3 R); or
    * waited: s ≥ `max_waiting_tokens`, or one is `max_waiting_s` old while rows run; or
    * delay: nothing runs, and one has waited `max_delay_s` since the fleet accepted it; or
    * deadline: that of one would be missed if it waited on; or
    * drain: hardly anybody comes any more.

    The rule is that of text-generation-inference, without its lock-out of newcomers above half load.
    """

    def __init__(
        self, *, max_delay_s: float, max_waiting_tokens: int, max_waiting_s: float, prefill_chunk: int
    ) -> None:
        self._max_delay_s = min(max_delay_s, max_waiting_s)
        self._max_waiting_tokens = max_waiting_tokens
        self._max_waiting_s = max_waiting_s
        self._prefill_chunk = prefill_chunk
        self._step_s = 0.0
        self.is_draining = False

    def observe(self, step_s: float) -> None:
        """Learn how long a step takes, in seconds, to see missed deadlines coming."""
        self._step_s = step_s if not self._step_s else 0.9 * self._step_s + 0.1 * step_s

    def opens(
        self, now: float, waiting: Iterable[Sequence], count: int, *, running: int, free: int, steps: int
    ) -> LaunchReason | None:
        """Why newcomers join now, or None if they do not; `waiting` are `count` sequences.

        Of several reasons the first one as they stand above.
        """
        if not count or not free:
            return None
        if count >= free:
            return "full"
        if running and count >= math.ceil(RESUME_SHARE * running):
            return "ratio"
        if steps >= self._max_waiting_tokens:
            return "waited"
        return self._due(now, waiting, bool(running)) or ("drain" if self.is_draining else None)

    def due_in(self, now: float, waiting: Iterable[Sequence]) -> float:
        """Seconds until it opens for some that wait, while nothing runs."""
        return max(0.0, min(self._due_at(sequence, False) for sequence in waiting) - now)

    def _due(self, now: float, waiting: Iterable[Sequence], running: bool) -> LaunchReason | None:
        """Why one of these can wait no longer, if one cannot."""
        reason: LaunchReason | None = None
        for sequence in waiting:
            if sequence.arrival.accepted_at + self._patience_s(running) <= now:
                return "waited" if running else "delay"
            if self._due_at(sequence, running) <= now:
                reason = "deadline"
        return reason

    def _patience_s(self, running: bool) -> float:
        return self._max_waiting_s if running else self._max_delay_s

    def _due_at(self, sequence: Sequence, running: bool) -> float:
        arrival = sequence.arrival
        steps = -(-sequence.prompt_length // self._prefill_chunk) + max(0, sequence.max_tokens - 1)
        return min(
            arrival.accepted_at + self._patience_s(running), arrival.deadline_at - steps * self._step_s
        )
