"""A scheduler, and what an engine does with its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stand_in_sequence import names, stand_in
from streamfleet_worker.engine.prefix_cache import BLOCK, PrefixCache
from streamfleet_worker.engine.scheduler import Plan, Scheduler

if TYPE_CHECKING:
    from streamfleet_worker.engine.sequence import Sequence


@dataclass(frozen=True)
class Values:
    bytes: int = 1


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(**{"max_batch_size": 8, "max_delay_s": 0.5, "cache_tokens": 100_000, **settings})


def fill(made: Scheduler, count: int) -> list[Sequence]:
    """Make `count` sequences decode, of 64 tokens each."""
    filling = [stand_in(f"running{number}", at=-100.0) for number in range(count)]
    for sequence in filling:
        made.add(sequence)
    assert len(admit(made)) == count
    return filling


def compute(plan: Plan, prefix: PrefixCache | None = None) -> Plan:
    """Do what the engine does after a step."""
    for chunk in plan.chunks:
        chunk.sequence.computed = chunk.end
        if prefix is not None:
            first, last = chunk.start // BLOCK, chunk.end // BLOCK
            prefix.insert(chunk.sequence.prompt_token_ids, first, [Values()] * (last - first))
    for sequence in plan.admitted:
        if prefix is not None:
            prefix.release(sequence.blocks)
    return plan


def admit(made: Scheduler, now: float = 0.0) -> list[str]:
    return names(compute(made.schedule(now)).admitted)


def chunks(plan: Plan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.key[0], chunk.start, chunk.end) for chunk in plan.chunks]
