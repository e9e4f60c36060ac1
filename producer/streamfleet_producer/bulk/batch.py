"""Batch: where a bulk job stands, as its starter sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from streamfleet_common.errors import StreamfleetError, from_wire
from streamfleet_producer.bulk.spec import Spec

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
"""The words of OpenAI's batches. One that waits for an RQ worker is `validating`."""
ENDED: frozenset[BatchStatus] = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of the input: all, those with an answer, those with an error, and those asked about now."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A bulk job. Times are Unix times in seconds, None for what has not happened."""

    id: str
    status: BatchStatus
    spec: Spec
    counts: Counts
    created_at: float
    times: dict[str, float] = field(default_factory=dict)
    """When each status was reached first."""
    error: StreamfleetError | None = None
    """Why it failed as a whole."""
    runs: int = 0
    """How many times an RQ worker began or went on with it."""

    @property
    def is_over(self) -> bool:
        return self.status in ENDED


@dataclass(slots=True)
class Progress:
    """What a job tells of itself in RQ's `job.meta`; written by whoever runs it alone."""

    status: BatchStatus = "validating"
    counts: Counts = field(default_factory=Counts)
    times: dict[str, float] = field(default_factory=dict)
    error: StreamfleetError | None = None
    runs: int = 0

    @classmethod
    def of(cls, meta: Any) -> Progress:
        """Read it; what is none stands at its default."""
        if not isinstance(meta, dict) or meta.get("status") not in BatchStatus.__args__:  # type: ignore[attr-defined]
            return cls()
        error = meta.get("error")
        return cls(
            meta["status"],
            Counts(**meta.get("counts", {})),
            dict(meta.get("times", {})),
            from_wire(error["code"], error["message"], error.get("details", {})) if error else None,
            int(meta.get("runs", 0)),
        )

    def meta(self) -> dict[str, Any]:
        """The JSON of it."""
        counts = self.counts
        error = self.error
        return {
            "status": self.status,
            "counts": {
                "total": counts.total,
                "completed": counts.completed,
                "failed": counts.failed,
                "in_flight": counts.in_flight,
            },
            "times": self.times,
            "error": None
            if error is None
            else {"code": error.code, "message": error.message, "details": error.details},
            "runs": self.runs,
        }

    def reach(self, status: BatchStatus, now: float) -> None:
        """Another status, at this Unix time."""
        self.status = status
        self.times.setdefault(status, now)
