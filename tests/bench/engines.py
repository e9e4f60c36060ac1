"""Our generation engine as the benchmarks use it, in process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from streamfleet_common.schemas import GenerateRequest
from streamfleet_worker.engine.base import Arrival, Finished
from streamfleet_worker.engine.generation import GenerationEngine
from streamfleet_worker.engine.models import LoadedModel

FOREVER_S = 1e9


def make_engine(loaded: LoadedModel, batch: int, max_seq_len: int, **options: Any) -> GenerationEngine:
    """A warm engine."""
    engine = GenerationEngine(loaded, max_batch_size=batch, max_seq_len=max_seq_len, **options)
    engine.warm_up()
    return engine


def add(engine: GenerationEngine, requests: Sequence[GenerateRequest], first: int = 0) -> None:
    """All at once, none of them waiting for company; their keys are their numbers from `first` on."""
    now = time.monotonic()
    prepared = map(engine.prepare, requests)
    engine.add({(str(n), 1): Arrival(p, now - 1, now + FOREVER_S) for n, p in enumerate(prepared, first)})


def run(
    engine: GenerationEngine,
    requests: Sequence[GenerateRequest],
    arrivals: random.Random | None = None,
    seen: Callable[[int, object], None] = lambda _number, _event: None,
) -> list[Finished]:
    """Each request's end, when all have theirs. They come all at once, or a few at each step.

    `seen` is called with the number and the event of each output that comes.

    Raises:
        RuntimeError: one has failed.
    """
    ends: dict[int, Finished] = {}
    arrived = 0
    while len(ends) < len(requests):
        count = len(requests) if arrivals is None else arrivals.choice((0, 0, 1, 3))
        add(engine, requests[arrived : arrived + count], arrived)
        arrived += count
        for output in engine.step().outputs:
            seen(int(output.key[0]), output.event)
            if isinstance(output.event, Finished):
                if output.event.error is not None:
                    raise RuntimeError(f"request {output.key[0]} failed") from output.event.error
                ends[int(output.key[0])] = output.event
    return [ends[number] for number in range(len(requests))]


def answers(ends: Sequence[Finished]) -> list[list[int]]:
    """The token ids of each request's first choice."""
    return [list(end.choices[0].token_ids) for end in ends]
