"""What a worker says in its card of its last half minute: enough for rates and percentiles of a queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from streamfleet_common.message import Message

WINDOW_S = 30.0
"""How far back a worker looks. It says how far it did: a young one cannot look so far."""
WAIT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0),
)
"""Upper bounds, in seconds, of the counts of waits; what is longer than the last is counted behind it."""
TOKEN_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Upper bounds, in seconds, of the counts of times between two tokens."""

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Waits = Annotated[tuple[_Count, ...], Field(max_length=len(WAIT_BOUNDS_S) + 1, strict=False)]
_Gaps = Annotated[tuple[_Count, ...], Field(max_length=len(TOKEN_BOUNDS_S) + 1, strict=False)]


class WorkerStats(Message):
    """One worker over its window. Counts, not rates and percentiles: those of several workers can be added.

    In each list the i-th number is how many values lay above bound i - 1 and not above bound i; one number
    more than there are bounds, or none at all where nothing was measured.
    """

    window_s: float = Field(default=0.0, ge=0.0)
    """How many seconds the counts cover; 0 if the worker has just begun."""
    ended: _Count = 0
    """Requests that this worker ended, failed ones among them."""
    failed: _Count = 0
    prompt_tokens: _Count = 0
    """Prompt tokens computed: what the prefix cache held is not among them."""
    generated_tokens: _Count = 0
    batches: _Count = 0
    """Forward passes over rows that decode, and micro-batches."""
    batch_rows: _Count = 0
    """Rows, or items, of all of them together: divided by `batches`, how full they were."""
    running: _Count = 0
    """Rows in the batch now."""
    waiting: _Count = 0
    """Rows that were pulled and are not in the batch yet, now."""
    kv_usage: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of the key-value cache that is reserved for what runs now; None of an engine without one."""
    ttft: _Waits = ()
    """Of requests by the time from acceptance to the first token, by `WAIT_BOUNDS_S`."""
    e2e: _Waits = ()
    """Of requests by the time from acceptance to the end, by `WAIT_BOUNDS_S`."""
    itl: _Gaps = ()
    """Of tokens by the time since the token before them, by `TOKEN_BOUNDS_S`."""
