"""One side of `generation.py`: a process that answers jobs when it is told to, and says what it took.

The standard library alone, since vLLM has an environment of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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
