"""What items come to, as plain values that travel between processes."""

from __future__ import annotations

from typing import Any

from streamfleet_common.errors import GenerationFailed, StreamfleetError, from_wire
from streamfleet_common.schemas import Failure
from streamfleet_worker.engine.faults import is_out_of_memory
from streamfleet_worker.engine.item import Done, Outcome, Part, RetryLater


def to_report(outcome: Outcome) -> list[Any] | None:
    """The plain form of an outcome."""
    match outcome:
        case None:
            return None
        case Part(value):
            return ["part", value]
        case Done(value):
            return ["done", value]
        case RetryLater():
            return ["retry", outcome.after_s]
        case StreamfleetError():
            failure = Failure.of(outcome)
            return ["failed", failure.code, failure.message, failure.details]
    # Whatever else a handler raises has come to be one of ours by then, but for a lack of memory.
    return ["memory" if is_out_of_memory(outcome) else "raised", f"{type(outcome).__name__}: {outcome}"]


def from_report(report: list[Any] | None) -> Outcome:
    """The outcome that a plain form stands for."""
    outcome: Outcome = GenerationFailed("the process that ran it sent what is no outcome")
    match report:
        case None:
            outcome = None
        case ["part", value]:
            outcome = Part(value)
        case ["done", value]:
            outcome = Done(value)
        case ["retry", float(after_s)]:
            outcome = RetryLater(after_s)
        case ["failed", str(code), str(message), dict(details)]:
            outcome = from_wire(code, message, details)
        case ["memory", str(words)]:
            outcome = MemoryError(words)
        case ["raised", str(words)]:
            outcome = GenerationFailed(words)
    return outcome


def failure_of(report: list[Any] | None) -> Exception:
    """The error that a plain form stands for."""
    outcome = from_report(report)
    return outcome if isinstance(outcome, Exception) else GenerationFailed("it failed, and does not say how")
