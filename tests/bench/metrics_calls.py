"""What a worker tells its metrics of a batch of no-op requests, timed by itself."""

from __future__ import annotations

import random
import time

from load import TEXT
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.schemas import Choice, End, Timing, Usage
from streamfleet_worker import intake
from streamfleet_worker.engine.base import Launch, Room, Step, Tokens
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.metrics import Metrics

TIMES, BATCHES = 50, 200
"""So often, so many batches."""


def calls_us(batch: int) -> float:
    """CPU microseconds a request of all that a worker tells its metrics of such batches, at the least."""
    metrics = Metrics("bench", "0")
    metrics.first_success = lambda: None
    taken = [Delivery(Entry("0" * 34, "1-0", "normal", b""), "w", 1, 1010, 1000, 9000, 1, 0)] * batch
    choice = Choice(text=TEXT, token_ids=(0,), finish_reason="eos")
    timing = Timing(wait_ms=1.0, prefill_ms=0.25, decode_ms=0.0)
    ends = [
        End(state="done", choices=(choice,), usage=Usage(prompt_tokens=1, completion_tokens=1), timing=timing)
        for _ in range(batch)
    ]
    waits_s = [random.Random(number).random() / 50 for number in range(batch)]
    tokens = Tokens(0, [0], [TEXT])
    admitted = [intake.Admitted(1, None) for _ in range(batch)]
    launch = Launch(1, "full", batch, batch, 0.0, ())
    step = Step([], rows=batch, prompt_tokens=batch, generated_tokens=batch, launches=[launch])
    report = Report(step, 0.001, Room(0, batch, 0), 1.0)

    def tell() -> None:
        metrics.delivered(taken)
        metrics.stepped(report)
        for one in admitted:
            intake._follow(one, tokens, 1.0, {})
        metrics.first_tokens(waits_s)
        metrics.ended(metrics.noted(ends), waits_s)

    def timed() -> float:
        began = time.thread_time()
        for _ in range(BATCHES):
            tell()
        return (time.thread_time() - began) / BATCHES / batch * 1e6

    return min(timed() for _ in range(TIMES))
