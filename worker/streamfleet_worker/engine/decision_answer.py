"""A decide request in the engine: what its options score, and what it ends with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from streamfleet_common.decisions import Decision
from streamfleet_common.schemas import EndState, Timing, Usage
from streamfleet_worker.engine.base import Arrival, Finished, Key, Launch

if TYPE_CHECKING:
    from streamfleet_common.errors import StreamfleetError
    from streamfleet_worker.engine.decision import Part, PreparedDecision
    from streamfleet_worker.engine.sequence import Sequence


@dataclass(slots=True)
class DecisionAnswer:
    """What a key comes to. Each part is a sequence of its own, and not all of them are in the engine at once.

    An option's score is the sum of the log-probabilities of its tokens, each given all before it: the
    logarithm of the probability that the model goes on with just this. Divided by the option's length it
    would be that of no event, and in favour of long options whose ends go without saying.

    Times are seconds on the engine's clock.
    """

    key: Key
    arrival: Arrival
    added_at: float
    waiting: Iterator[tuple[int, Part]]
    """What is not in the engine yet, numbered."""
    parts: dict[int, Part] = field(default_factory=dict)
    """Those that are."""
    running: dict[int, Sequence] = field(default_factory=dict)
    ended: int = 0
    started_at: float = math.inf
    scores: dict[tuple[int, int], float] = field(default_factory=dict)
    """By the places of question and option."""
    cached: dict[int, int] = field(default_factory=dict)
    """How many tokens the prefix cache had of each question's prompt, state included."""
    launch: Launch | None = None
    """The last one that let a part of it in."""

    @classmethod
    def of(cls, key: Key, arrival: Arrival, now: float) -> DecisionAnswer:
        return cls(key, arrival, now, enumerate(arrival.prepared.parts()))

    @property
    def prepared(self) -> PreparedDecision:
        prepared: PreparedDecision = self.arrival.prepared
        return prepared

    def next(self, most: int) -> dict[int, Part]:
        """The next parts to go into the engine, so that `most` are there at once."""
        parts = dict(islice(self.waiting, max(0, most - len(self.running))))
        self.parts |= parts
        return parts

    def end(self, sequence: Sequence) -> bool:
        """Let one part end; whether it was the last."""
        del self.running[sequence.index]
        part = self.parts.pop(sequence.index)
        self.ended += 1
        self.started_at = min(self.started_at, sequence.started_at)
        # The first of a question's parts to start finds the least; the others what it has computed, too.
        self.cached[part.question] = min(sequence.cached, self.cached.get(part.question, sequence.cached))
        shared = len(part.prepared.prompt_token_ids) - part.scored_from
        before, last = sequence.scores.logprobs[:shared], sequence.scores.logprobs[shared:]
        for option, logprob in zip(part.options, last, strict=True):
            self.scores[part.question, option] = math.fsum([*before, logprob])
        return self.ended == self.prepared.n

    def finished(self, state: EndState, now: float, error: StreamfleetError | None = None) -> Finished:
        """The last output."""
        running = [sequence.started_at for sequence in self.running.values() if sequence.started_at]
        started = min([self.started_at, *running])
        has_started = math.isfinite(started)
        return Finished(
            state=state,
            answers=self._decisions() if state == "done" else (),
            usage=Usage(
                prompt_tokens=self.prepared.prompt_tokens if has_started else 0,
                cached_tokens=self._cached(),
                cut_tokens=self.prepared.cut_tokens,
                truncated=int(self.prepared.cut_tokens > 0),
            ),
            timing=Timing(
                wait_ms=max(0.0, min(started, now) - self.added_at) * 1000,
                prefill_ms=max(0.0, now - started) * 1000,
            ),
            error=error,
            launch=self.launch,
        )

    def _cached(self) -> int:
        """Tokens that were there before the request: of the state, and of each question."""
        state, found = len(self.prepared.state), self.cached.values()
        return min([state, *found]) + sum(max(0, tokens - state) for tokens in found) if found else 0

    def _decisions(self) -> tuple[Decision, ...]:
        return tuple(
            Decision.of(
                asked.question,
                [self.scores[place, option] for option in range(len(asked.options))],
                asked.temperature,
            )
            for place, asked in enumerate(self.prepared.questions)
        )
