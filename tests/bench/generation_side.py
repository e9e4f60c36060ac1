"""One side of `generation.py`: a process that answers jobs when it is told to, and says what it took.

The standard library alone, since vLLM has an environment of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from side_lines import answer_lines


@dataclass(frozen=True)
class Job:
    """A greedy request."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Setup:
    """What every side is given."""

    model: str
    """As `models.load` takes it."""
    folder: str
    """Where that model's files are."""
    precision: str
    threads: int
    batch: int
    max_seq_len: int
    eos_token_ids: list[int]
    jobs: list[Job]
    records: bool = False
    """Tell when the pieces of each answer came, if the side can."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Setup:
        values = json.loads(file.read_text())
        return cls(**{**values, "jobs": [Job(**job) for job in values["jobs"]]})

    def useful(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The tokens that were asked for, without those that a row got for its batch's sake."""
        ids = list(token_ids[:max_tokens])
        ends = [place for place, token_id in enumerate(ids) if token_id in self.eos_token_ids]
        return ids[: ends[0] + 1] if ends else ids


@dataclass(frozen=True)
class Result:
    """What one round of one side took."""

    seconds: float
    tokens: int
    cpu_seconds: dict[str, float]
    """By process."""
    answers: list[list[int]] = field(default_factory=list)
    """Token ids of each job; empty where no jobs are answered."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Of each job, what `streamfleet report` reads; empty if it was not asked for, or cannot be told."""


class Pieces:
    """When the pieces of one answer came."""

    def __init__(self, job: Job, began: float) -> None:
        """The round `began` then, on the clock of `time.perf_counter`, as the job did."""
        self._job = job
        self._began = began
        self._at_ms: list[float] = []

    def __call__(self) -> None:
        """One has come."""
        self._at_ms.append(round((time.perf_counter() - self._began) * 1000, 3))

    def record(self, tokens: int, started_ms: float | None, batch: int | None = None) -> dict[str, Any]:
        """The line of the job, which has ended now and began to run `started_ms` after its submission."""
        self()
        *pieces, ended = self._at_ms
        return {
            "type": "request",
            "submitted_ms": 0.0,
            "started_ms": None
            if started_ms is None
            else min(float(started_ms), pieces[0] if pieces else ended),
            "first_token_ms": pieces[0] if pieces else None,
            "ended_ms": ended,
            "gaps_ms": [round(b - a, 3) for a, b in pairwise(pieces)],
            "prompt_tokens": len(self._job.prompt_token_ids),
            "completion_tokens": tokens,
            "batch_size": batch,
        }


class Side(Protocol):
    """One way to answer the jobs."""

    def reset(self) -> None:
        """Forget what the last round left: before each round, outside of the time that counts."""

    def run(self, jobs: Sequence[Job]) -> Result:
        """Answer the jobs, all there at once."""


def timed(run: Callable[[], list[list[int]]]) -> Result:
    """A round of this process alone."""
    began, cpu = time.perf_counter(), time.process_time()
    answers = run()
    cpu_seconds = {"process": time.process_time() - cpu}
    return Result(time.perf_counter() - began, sum(map(len, answers)), cpu_seconds, answers)


def serve(make: Callable[[Setup], Side], setup: Setup) -> None:
    """Answer lines with the numbers of jobs with lines of results, until they end.

    The side is ready once it is loaded, and warmed up with two jobs.
    """

    def made() -> Callable[[list[int]], dict[str, Any]]:
        side = make(setup)
        side.reset()
        side.run(setup.jobs[:2])

        def answer(numbers: list[int]) -> dict[str, Any]:
            side.reset()
            return asdict(side.run([setup.jobs[number] for number in numbers]))

        return answer

    answer_lines(made)
