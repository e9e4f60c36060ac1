"""Who runs in the next step, and what it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfleet_worker.engine.admission import Admission
from streamfleet_worker.engine.prefill_line import Chunk, PrefillLine
from streamfleet_worker.engine.prefix_cache import BLOCK

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import Key, LaunchReason
    from streamfleet_worker.engine.prefix_cache import PrefixCache
    from streamfleet_worker.engine.sequence import Sequence

__all__ = ["Chunk", "Plan", "Scheduler"]

RESERVED_STEP = 64
"""Reservations are multiples of this many tokens."""

REGAINED_SHARE = 1 / 256
"""Of the budgets, that each step gives back after the memory was exhausted."""


@dataclass(slots=True)
class Plan:
    """What one step does."""

    admitted: list[Sequence]
    """They have a row from this step on. Keys and values of their `blocks` go into the cache first."""
    chunks: list[Chunk]
    """Parts of prompts to compute, one of a sequence at most."""
    decodes: list[Sequence]
    """Those that get one more token: all whose prompt is computed."""
    reason: LaunchReason | None = None
    """Why there was an admission now; None if there was none."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence, and what the scheduler knows of it."""

    sequence: Sequence
    row: tuple[Key, int]
    tokens: int
    """Of the cache, reserved while it runs."""
    added: int
    """The step before which it came."""
    digests: tuple[bytes, ...] = ()
    """Of the blocks of its prompt."""
    usable: int = 0
    """So many of these it may take from the prefix cache."""
    passed: int = 0
    """How many that came later went before it because it did not fit."""
    provider: _Entry | None = None
    """Who computes the block that it stands back for,"""
    awaited: int = 0
    """which is that one of its prompt's."""


class Scheduler:
    """Waiting and running sequences, and how the first become the second.

    First come, first served, whenever `Admission` opens. Prompt and longest answer of whoever is admitted are
    reserved in the cache for life, so that nothing that runs is ever stopped for want of memory. Who does not
    fit yet is passed by those behind that do: by `max_overtakes` of them in all its time, then by nobody.

    Hence, while a row is free, nobody waits beyond the step at which the sooner of `max_waiting_tokens` and
    `max_waiting_s` is reached, except for room in the cache, or behind one that waits for room and has been
    passed so often.

    While a running sequence computes the next block that another could share, that other stands back: it does
    not count as waiting, nor as passed. When the block is there its turn has been, and admission is open.

    All rows whose prompt is computed decode in every step. Beside them a step computes `prefill_chunk` prompt
    tokens at most, `max_prefill_tokens` if nothing decodes, but always a chunk: see `PrefillLine`.

    Args:
        max_batch_size: rows.
        max_delay_s: how long the first of a batch waits for company.
        cache_tokens: tokens there is room for in the cache, in all rows together.
        max_waiting_tokens: steps after which newcomers join, however few.
        max_waiting_s: age at which a newcomer joins, whatever else.
        max_prefill_tokens: prompt tokens of a step in which nothing decodes.
        prefill_chunk: tokens of a chunk.
        max_overtakes: how many may pass one that does not fit.
        prefix: where prompts find beginnings that are computed already.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_delay_s: float,
        cache_tokens: int,
        max_waiting_tokens: int = 16,
        max_waiting_s: float = 1.0,
        max_prefill_tokens: int = 2048,
        prefill_chunk: int = 512,
        max_overtakes: int = 4,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._cache_tokens = cache_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self._prefill_chunk = prefill_chunk
        self._max_overtakes = max_overtakes
        self._prefix = prefix if prefix is not None and prefix.max_bytes else None
        self._keys: dict[Key, dict[int, _Entry]] = {}
        self._waiting: dict[tuple[Key, int], _Entry] = {}
        self._standing_back: dict[tuple[Key, int], _Entry] = {}
        self._running: dict[tuple[Key, int], _Entry] = {}
        self._prefills = PrefillLine(prefill_chunk)
        self._admission = Admission(
            max_delay_s=max_delay_s,
            max_waiting_tokens=max_waiting_tokens,
            max_waiting_s=max_waiting_s,
            prefill_chunk=prefill_chunk,
        )
        self._next_deadline = math.inf
        self._steps = 0
        self._last_admission = 0
        self._share = 1.0
        self.reserved = 0
        """Tokens of the cache that running sequences may fill."""

    @property
    def waiting(self) -> int:
        """Sequences that have no row yet."""
        return len(self._waiting)

    @property
    def cache_used(self) -> float:
        """The share of the cache that is reserved."""
        return self.reserved / self._cache_tokens

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a row, in order of admission."""
        return [entry.sequence for entry in self._running.values()]

    @property
    def running_count(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def free(self) -> int:
        """Rows nobody has."""
        return self._max_batch_size - len(self._running)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether such a sequence could run if it were alone."""
        return _reservation(prompt_tokens + max_tokens) <= self._cache_tokens

    def add(self, sequence: Sequence) -> None:
        """Put it at the end of the line.

        Raises:
            ValueError: it is here already, or could never run.
        """
        if not self.fits(sequence.prompt_length, sequence.max_tokens):
            raise ValueError(
                f"{sequence.prompt_length} + {sequence.max_tokens} tokens never fit {self._cache_tokens}"
            )
        row = (sequence.key, sequence.index)
        choices = self._keys.setdefault(sequence.key, {})
        if sequence.index in choices:
            raise ValueError(f"{row} is here already")
        entry = _Entry(sequence, row, _reservation(sequence.prompt_length + sequence.max_tokens), self._steps)
        if self._prefix is not None:
            entry.digests = self._prefix.chain(sequence.prompt_token_ids, sequence.arrival.scope)
            entry.usable = sequence.reusable // BLOCK
        choices[sequence.index] = self._waiting[row] = entry
        self._next_deadline = min(self._next_deadline, sequence.arrival.deadline_at)

    def remove(self, key: Key, index: int | None = None) -> list[Sequence]:
        """Take out a choice, or all choices of a key, wherever they are; returns those that were here."""
        choices = self._keys.get(key, {})
        gone = [entry for i, entry in choices.items() if index is None or i == index]
        for entry in gone:
            del choices[entry.sequence.index]
            self._standing_back.pop(entry.row, None)
            if self._waiting.pop(entry.row, None) is None:
                del self._running[entry.row]
                self._prefills.discard(entry.sequence)
                self.reserved -= entry.tokens
        if not choices:
            self._keys.pop(key, None)
        return [entry.sequence for entry in gone]

    def expire(self, now: float) -> list[Sequence]:
        """Take out everything whose deadline has come."""
        if now < self._next_deadline:
            return []
        everything = [e.sequence for choices in self._keys.values() for e in choices.values()]
        late = [s for s in everything if s.arrival.deadline_at <= now]
        for sequence in late:
            self.remove(sequence.key, sequence.index)
        self._next_deadline = min(
            (s.arrival.deadline_at for s in everything if s.arrival.deadline_at > now), default=math.inf
        )
        return late

    def schedule(self, now: float) -> Plan:
        """Say what the next step does, and give rows to those whose turn it is.

        Whoever runs the step does the rest before the next call: `computed` of a chunk's sequence goes to the
        chunk's end, blocks that this completes go into the prefix cache, and who has ended is removed.
        """
        if self._running:
            self._steps += 1
        self._share = min(1.0, self._share + REGAINED_SHARE)
        reason = self._opens(now)
        admitted = self._admit() if reason else []
        rows = [entry.sequence for entry in self._running.values()]
        decodes = [s for s in rows if s.computed == s.prompt_length and s.max_tokens]
        budget = int(self._share * self._max_prefill_tokens)
        chunks = self._prefills.take(min(budget, self._prefill_chunk) if decodes else budget)
        return Plan(admitted, chunks, decodes, reason if admitted else None)

    def lower_budget(self) -> None:
        """After the memory was exhausted: reserve and compute half as much at once, but one sequence always.

        Each step gives back a little.
        """
        self._share /= 2

    def drain(self) -> None:
        """Let nobody wait for company from now on."""
        self._admission.is_draining = True

    def observe(self, step_s: float) -> None:
        """Learn how long a step takes, in seconds, to see missed deadlines coming."""
        self._admission.observe(step_s)

    def due_in(self, now: float) -> float | None:
        """Seconds until a step has something to do; None if nothing is here."""
        if self._running:
            return 0.0
        if not self._waiting:
            return None
        if self._opens(now):
            return 0.0
        return self._admission.due_in(now, (entry.sequence for entry in self._waiting.values()))

    # --- admission --------------------------------------------------------------------------

    def _opens(self, now: float) -> LaunchReason | None:
        """Why newcomers are admitted now; None if they are not."""
        if self.free and any(not self._stands_back(entry) for entry in self._standing_back.values()):
            return "waited"
        ready = [e for row, e in self._waiting.items() if row not in self._standing_back] if self.free else []
        if not ready:
            return None
        first = ready[0].added
        return self._admission.opens(
            now,
            (entry.sequence for entry in ready),
            len(ready),
            running=len(self._running),
            free=self.free,
            steps=self._steps - (min(first, self._last_admission) if self._running else first),
        )

    def _admit(self) -> list[Sequence]:
        """Give rows to the first in line."""
        admitted: list[_Entry] = []
        passed: list[_Entry] = []
        shut = False
        for entry in self._waiting.values():
            if shut or not self.free:
                break
            self._standing_back.pop(entry.row, None)
            if self._running and self.reserved + entry.tokens > self._share * self._cache_tokens:
                passed.append(entry)
                shut = entry.passed >= self._max_overtakes
                continue
            if self._stands_back(entry):
                self._standing_back[entry.row] = entry
                continue
            for earlier in passed:
                earlier.passed += 1
                shut = shut or earlier.passed >= self._max_overtakes
            self._start(entry)
            admitted.append(entry)
        for entry in admitted:
            del self._waiting[entry.row]
        if admitted:
            self._last_admission = self._steps
        return [entry.sequence for entry in admitted]

    def _start(self, entry: _Entry) -> None:
        sequence = entry.sequence
        self._running[entry.row] = entry
        self.reserved += entry.tokens
        if self._prefix is not None:
            sequence.blocks = self._prefix.match(
                sequence.prompt_token_ids, sequence.reusable, sequence.arrival.scope
            )
            sequence.computed = BLOCK * len(sequence.blocks)
        self._prefills.add(sequence)

    def _stands_back(self, entry: _Entry) -> bool:
        """Whether a running sequence is computing the next block that this one could use."""
        if self._prefix is None:
            return False
        if entry.provider is not None and self._provides(entry.provider, entry.awaited):
            return True
        entry.provider = None
        held = self._prefix.held(entry.digests[: entry.usable])
        if held < entry.usable:
            entry.awaited = held
            for other in self._running.values():
                same = held < len(other.digests) and other.digests[held] == entry.digests[held]
                if same and self._provides(other, held):
                    entry.provider = other
        return entry.provider is not None

    def _provides(self, entry: _Entry, block: int) -> bool:
        """Whether it runs, and has not computed this block of its prompt."""
        return self._running.get(entry.row) is entry and entry.sequence.computed < (block + 1) * BLOCK


def _reservation(tokens: int) -> int:
    return -(-tokens // RESERVED_STEP) * RESERVED_STEP
