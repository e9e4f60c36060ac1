"""What the scheduler sees of a sequence, without the rest of the engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from streamfleet_worker.engine.base import Arrival, Key

if TYPE_CHECKING:
    from streamfleet_worker.engine.sequence import Sequence

FOREVER = 1e9

_unique = itertools.count(1_000_000)


@dataclass(slots=True, eq=False)
class StandIn:
    key: Key
    index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival: Arrival
    reusable: int
    computed: int = 0
    blocks: list[Any] = field(default_factory=list)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)


def stand_in(
    name: str,
    *,
    prompt: int | tuple[int, ...] = 10,
    max_tokens: int = 5,
    at: float = 0.0,
    deadline: float = FOREVER,
    index: int = 0,
    scored_from: int | None = None,
) -> Sequence:
    """A sequence; of a prompt given by its length all tokens are its own."""
    ids = prompt if isinstance(prompt, tuple) else tuple(next(_unique) for _ in range(prompt))
    arrival = Arrival(None, accepted_at=at, deadline_at=deadline)
    reusable = (len(ids) if scored_from is None else scored_from) - 1
    return cast("Sequence", StandIn((name, 1), index, ids, max_tokens, arrival, reusable))


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.key[0] for sequence in sequences]
