"""Who runs in the next step, and in which cache slot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import Key
    from streamfleet_worker.engine.sequence import Sequence

PROMPT_BUCKET = 32
"""Prompts are padded to multiples of this many tokens; only prompts of one padded length are computed
together, which keeps a row's numbers independent of its company."""

RESUME_SHARE = 0.3
"""While rows run, newcomers wait until they are this share of the running: a prefill stops all rows, so it
should serve several."""


def padded(length: int) -> int:
    """`length` tokens, rounded up to whole buckets."""
    return -(-length // PROMPT_BUCKET) * PROMPT_BUCKET


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `length` cached tokens of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


class Scheduler:
    """Waiting and running sequences, and the rule by which the first become the second.

    First come, first served. A sequence owns one slot of `max_seq_len` tokens until it ends, so whatever
    was admitted can run to its end. With R running rows, W waiting, `free` slots and s steps since the
    last admission, newcomers are admitted when there is a free slot and

    * nothing runs, and the batch is full or its oldest has waited `max_delay_s` since the fleet accepted
      it; or
    * rows run, and W ≥ min(free, ceil(0.3 R)); or
    * rows run, and s ≥ `max_waiting_tokens`, or the oldest is `max_waiting_s` old; or
    * the deadline of one that waits would be missed if it waited on.

    So no entry waits beyond the step at which the sooner of the last two bounds is reached, while a slot
    is free. One admission takes at most `max_prefill_tokens` padded prompt tokens, but always at least
    one sequence.

    The rule is that of text-generation-inference, without its lock-out of newcomers above half load.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_delay_s: float,
        max_waiting_tokens: int = 16,
        max_waiting_s: float = 1.0,
        max_prefill_tokens: int = 2048,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._max_delay_s = max_delay_s
        self._max_waiting_tokens = max_waiting_tokens
        self._max_waiting_s = max_waiting_s
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: dict[Key, Sequence] = {}
        self._slots: list[Sequence | None] = [None] * max_batch_size
        self._slot_of: dict[Key, int] = {}
        self._steps_since_admission = 0
        self._step_s = 0.0

    @property
    def waiting(self) -> int:
        """Sequences that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a slot, in the order of their slots."""
        return [sequence for sequence in self._slots if sequence is not None]

    @property
    def running_count(self) -> int:
        """Sequences that have a slot."""
        return len(self._slot_of)

    @property
    def free(self) -> int:
        """Slots nobody owns."""
        return self._max_batch_size - len(self._slot_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting or key in self._slot_of

    def add(self, sequence: Sequence) -> None:
        """Put it at the end of the line."""
        self._waiting[sequence.key] = sequence

    def remove(self, key: Key) -> Sequence | None:
        """Take it out wherever it is; None if it is not here."""
        if key in self._waiting:
            return self._waiting.pop(key)
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return None
        sequence, self._slots[slot] = self._slots[slot], None
        return sequence

    def expire(self, now: float) -> list[Sequence]:
        """Take out everything whose deadline has come."""
        late = [s for s in self._everything() if s.arrival.deadline_at <= now]
        for sequence in late:
            self.remove(sequence.key)
        return late

    def admit(self, now: float) -> list[Sequence]:
        """Give slots to those whose turn it is, if the rule says so now."""
        self._steps_since_admission += 1
        if not self._ready(now):
            return []
        self._steps_since_admission = 0
        admitted: list[Sequence] = []
        tokens = 0
        for sequence in list(self._waiting.values()):
            tokens += padded(sequence.prefill_length)
            if not self.free or (admitted and tokens > self._max_prefill_tokens):
                break
            del self._waiting[sequence.key]
            self._place(sequence, self._slots.index(None))
            admitted.append(sequence)
        return admitted

    def compact(self) -> list[Move]:
        """Close the holes between running rows; one row moves for each hole."""
        moves: list[Move] = []
        count = self.running_count
        holes = [slot for slot in range(count) if self._slots[slot] is None]
        for source in range(count, self._max_batch_size):
            sequence = self._slots[source]
            if sequence is not None:
                target = holes.pop(0)
                self._slots[source] = None
                self._place(sequence, target)
                moves.append(Move(source, target, sequence.cached))
        return moves

    def observe(self, step_s: float) -> None:
        """Learn how long a step takes, in seconds, to see missed deadlines coming."""
        self._step_s = step_s if not self._step_s else 0.9 * self._step_s + 0.1 * step_s

    def due_in(self, now: float) -> float | None:
        """Seconds until a step has something to do; None if nothing is here."""
        if self._slot_of:
            return 0.0
        if not self._waiting:
            return None
        if self._ready(now):
            return 0.0
        waiting = self._waiting.values()
        full_delay = min(s.arrival.accepted_at for s in waiting) + self._max_delay_s
        last_call = min(map(self._last_call, waiting))
        return max(0.0, min(full_delay, last_call) - now)

    def _ready(self, now: float) -> bool:
        if not self._waiting or not self.free:
            return False
        oldest = min(s.arrival.accepted_at for s in self._waiting.values())
        if min(map(self._last_call, self._waiting.values())) <= now:
            return True
        running, waiting = self.running_count, self.waiting
        if not running:
            return waiting >= self.free or oldest + self._max_delay_s <= now
        return (
            waiting >= min(self.free, math.ceil(RESUME_SHARE * running))
            or self._steps_since_admission >= self._max_waiting_tokens
            or oldest + self._max_waiting_s <= now
        )

    def _last_call(self, sequence: Sequence) -> float:
        """When it must start to end before its deadline, as far as the pace of the steps tells."""
        return sequence.arrival.deadline_at - sequence.prepared.max_tokens * self._step_s

    def _place(self, sequence: Sequence, slot: int) -> None:
        self._slots[slot] = sequence
        self._slot_of[sequence.key] = slot
        sequence.slot = slot

    def _everything(self) -> Iterator[Sequence]:
        yield from self._waiting.values()
        yield from self.running
