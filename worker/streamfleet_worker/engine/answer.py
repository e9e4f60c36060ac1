"""One request in the engine: its choices, its prompt's scores, and what it ends with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamfleet_common.schemas import EndState, Prefill, Timing, Usage
from streamfleet_worker.engine.base import Arrival, Finished, Key, Launch
from streamfleet_worker.engine.sequence import Sequence

if TYPE_CHECKING:
    from streamfleet_common.errors import StreamfleetError
    from streamfleet_worker.engine.models import LoadedModel
    from streamfleet_worker.engine.prepared import Prepared

SEED_BITS = 53
"""Any JSON reader gives such a number back unharmed."""


def draw_seed(rid: str) -> int:
    """The seed of a request that names none: the same in each of its attempts."""
    return _bits(rid.encode())


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several choices; the first has the request's own."""
    return seed if index == 0 else _bits(b"%d %d" % (seed, index))


def _bits(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> (64 - SEED_BITS)


@dataclass(slots=True)
class Answer:
    """What a key comes to. Times are seconds on the engine's clock."""

    key: Key
    prepared: Prepared
    added_at: float
    seed: int | None
    running: dict[int, Sequence] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    prefill: Prefill | None = None
    launch: Launch | None = None
    """The last one that let a choice of it in."""

    @classmethod
    def of(cls, loaded: LoadedModel, key: Key, arrival: Arrival, now: float) -> Answer:
        """An answer of which nothing has begun."""
        prepared: Prepared = arrival.prepared
        seed = prepared.sampling.seed
        if seed is None and prepared.sampling.temperature > 0:
            seed = draw_seed(key[0])
        answer = cls(key, prepared, now, seed)
        unscored = len(prepared.prompt_token_ids) + 1
        for index in range(prepared.n):
            answer.running[index] = Sequence.of(
                loaded,
                key,
                index,
                prepared,
                arrival,
                seed=None if seed is None else choice_seed(seed, index),
                # Once, however many choices there are.
                scored_from=1 if prepared.prompt_logprobs and index == 0 else unscored,
            )
        return answer

    def end(self, sequence: Sequence) -> bool:
        """Let one choice end; whether it was the last."""
        self.ended.append(self.running.pop(sequence.index))
        return not self.running

    def finished(self, state: EndState, now: float, error: StreamfleetError | None = None) -> Finished:
        """The last output."""
        sequences = sorted([*self.ended, *self.running.values()], key=lambda s: s.index)
        started = [s for s in sequences if s.started_at]
        return Finished(
            state=state,
            choices=tuple(s.choice() for s in sequences),
            prefill=self.prefill,
            usage=Usage(
                prompt_tokens=len(self.prepared.prompt_token_ids) if started else 0,
                completion_tokens=sum(len(s.token_ids) for s in sequences),
                cached_tokens=max((s.cached for s in sequences if s.index == 0), default=0),
                cut_tokens=self.prepared.cut_tokens,
                truncated=int(self.prepared.cut_tokens > 0),
            ),
            seed=self.seed,
            timing=self._timing(started, now),
            error=error,
            launch=self.launch,
        )

    def _timing(self, sequences: list[Sequence], now: float) -> Timing:
        started = min((s.started_at for s in sequences), default=now)
        first = min((s.first_token_at for s in sequences if s.first_token_at), default=now)
        last = max((s.last_token_at for s in sequences), default=0.0) or first
        return Timing(
            wait_ms=max(0.0, started - self.added_at) * 1000,
            prefill_ms=max(0.0, first - started) * 1000,
            decode_ms=max(0.0, last - first) * 1000,
        )
