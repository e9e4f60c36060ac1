"""The trace that a request belongs to, as W3C Trace Context writes it. Needs no OpenTelemetry."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

SAMPLED = 1
"""The flag of a trace that is recorded."""
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_VERSION = "ff"


class TraceContext(NamedTuple):
    """A place in a trace: the span that what follows belongs under."""

    trace_id: int
    span_id: int
    flags: int = SAMPLED

    @classmethod
    def parse(cls, traceparent: str | None) -> Self | None:
        """Read one; None if it is none, which is to be taken for no trace at all, says the standard."""
        found = None if traceparent is None else _FORM.fullmatch(traceparent)
        if found is None or found[1] == _NO_VERSION:
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        return cls(trace_id, span_id, int(found[4], 16)) if trace_id and span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def trace_of(traceparent: str | None) -> dict[str, str]:
    """What a log line says of it: `trace_id`, or nothing."""
    context = TraceContext.parse(traceparent)
    return {} if context is None else {"trace_id": f"{context.trace_id:032x}"}
