"""The engine that serves a handler."""

from __future__ import annotations

import math

from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine.micro_batch import WINDOW, MicroBatchEngine
from streamfleet_worker.handlers.call_task import CallTask
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.handler_runner import HandlerRunner
from streamfleet_worker.handlers.process_pool import ProcessPool


def handler_engine(
    handler: Handler,
    *,
    max_batch_size: int | None = None,
    max_delay_s: float | None = None,
    answers: AnswerCache | None = None,
    batch_limit_s: float = math.inf,
) -> MicroBatchEngine:
    """Build it, with its context objects, which lie on a thread of the handler's own, or in processes.

    Args:
        handler: whose calls it takes.
        max_batch_size: inputs in one batch, if not as many as the handler says.
        max_delay_s: how long the oldest may wait for a batch to fill, if not as long as the handler says.
        answers: those that are kept, of a deterministic handler.
        batch_limit_s: a batch that takes longer ends the engine.

    Raises:
        ModelLoadFailed: a context object, or a process, cannot be built.
    """
    runner = ProcessPool(handler) if handler.processes else HandlerRunner(handler)
    info = EngineInfo(
        model=handler.name,
        revision=handler.revision,
        tasks=("call",),
        device=f"{handler.processes} processes" if handler.processes else "one thread",
        precision="none",
        max_batch_size=max_batch_size or handler.max_batch_size,
        max_seq_len=1,  # it knows no tokens
        vocab_size=0,
        window=WINDOW * max(1, handler.processes),
        handler=handler.card(),
    )
    return MicroBatchEngine(
        CallTask(handler),
        runner,
        info,
        max_delay_s=handler.max_delay_ms / 1000 if max_delay_s is None else max_delay_s,
        bisect=handler.bisect,
        answers=answers,
        batch_limit_s=batch_limit_s,
    )
