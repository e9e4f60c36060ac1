"""Whose prompt is computed in the next step, and which part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import Key
    from streamfleet_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, end)` of a prompt, whose keys and values one step computes.

    If `end` is the prompt's length, the step gives its first token too.
    """

    sequence: Sequence
    start: int
    end: int


class PrefillLine:
    """Admitted sequences whose prompts are not computed yet, and the order in which they are.

    A prompt is cut at multiples of `chunk`, counted from its first token, and a step computes one chunk of it
    at most: so its cuts do not depend on its company. What is one chunk when it joins is *short*, all else
    *long*.

    A step begins with the short ones, in order of admission. If it leaves out all long ones, the next begins
    with the one of these that has the fewest tokens left; now and then with the eldest. What is left of a
    step's budget goes to whoever fits in. Counted in steps that compute prompts,

    * some long one gets a chunk at least every second step, and the eldest of them at least every fourth;
    * with B the lesser of the budget and a chunk, a short one of t tokens is computed within
      2 (1 + b / (B - t + 1)) steps, where b is the tokens of short ones before it (B - t + 1 is at least 1).

    Neither bound depends on who comes later.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._short: dict[tuple[Key, int], Sequence] = {}
        self._long: dict[tuple[Key, int], Sequence] = {}
        self._long_served = True
        self._long_first = False
        self._eldest_left_out = 0

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def add(self, sequence: Sequence) -> None:
        """Put it at the end; some of its prompt is still to be computed."""
        short = self._end(sequence) == sequence.prompt_length
        line = self._short if short else self._long
        line[sequence.key, sequence.index] = sequence

    def discard(self, sequence: Sequence) -> None:
        """Forget it, if it is here."""
        self._short.pop((sequence.key, sequence.index), None)
        self._long.pop((sequence.key, sequence.index), None)

    def take(self, budget: int) -> list[Chunk]:
        """The chunks of the next step: `budget` tokens at most, but one chunk at least, if anybody is here.

        A prompt goes on from its `computed`, and leaves when all of it is.
        """
        for line in self._short, self._long:
            for row in [row for row, s in line.items() if s.computed == s.prompt_length]:
                del line[row]
        long = sorted(self._long.values(), key=lambda s: s.prompt_length - s.computed)
        first = self._first(long)
        self._long_first = first is not None
        order = [first] if first else []
        order += self._short.values()
        order += (s for s in long if s is not first)
        chunks: list[Chunk] = []
        for sequence in order:
            end = self._end(sequence)
            size = end - sequence.computed
            if size <= budget or not chunks:
                chunks.append(Chunk(sequence, sequence.computed, end))
                budget -= size
            if budget <= 0:
                break
        if long:
            served = {id(chunk.sequence) for chunk in chunks}
            self._long_served = any(id(s) in served for s in long)
            self._eldest_left_out += 1
            if id(self._eldest) in served:
                self._eldest_left_out = 0
        return chunks

    @property
    def _eldest(self) -> Sequence:
        return next(iter(self._long.values()))

    def _first(self, long: list[Sequence]) -> Sequence | None:
        """The long one that begins the step, if one does: never in two steps in a row."""
        if not long or self._long_first:
            return None
        if self._eldest_left_out >= 2:
            return self._eldest
        return None if self._long_served else long[0]

    def _end(self, sequence: Sequence) -> int:
        return min(sequence.prompt_length, (sequence.computed // self._chunk + 1) * self._chunk)
