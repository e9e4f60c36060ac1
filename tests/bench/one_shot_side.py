"""One side of `one_shot.py`: a process that makes vectors of texts when it is told to, and says what it took.

The standard library alone, since sentence-transformers has an environment of its own.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import mul
from pathlib import Path
from typing import Any, Protocol

from side_lines import answer_lines

LEAST_COSINE = 0.999
"""Vectors that are farther from the reference than this are wrong, and no figure counts."""

Vectors = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Setup:
    """What every side is given."""

    model: str
    """As our worker takes it."""
    folder: str
    """Where that model's files are."""
    precision: str
    threads: int
    batch: int
    rounds: list[list[str]]
    """The texts of each round."""
    warm_up: list[str]
    references: str
    """The file with the right vectors of all rounds' texts: float32, one after the other."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Setup:
        return cls(**json.loads(file.read_text()))


@dataclass(frozen=True)
class Result:
    """What one round of one side took."""

    seconds: float
    texts: int
    cpu_seconds: dict[str, float]
    """By process."""
    least_cosine: float
    """Of the vectors to the right ones."""


class Side(Protocol):
    """One way to have the vectors."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One vector of length 1 for each text; all texts are there at once."""

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time used so far, by process."""


class References:
    """The right vectors."""

    def __init__(self, setup: Setup) -> None:
        numbers = array("f", Path(setup.references).read_bytes())
        width = len(numbers) // sum(map(len, setup.rounds))
        self._vectors = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        self._texts = len(setup.rounds[0])

    def least_cosine(self, vectors: Vectors, round_: int, every: int) -> float:
        """How alike the least right one is; `vectors` are those of every so manyth text of a round.

        Raises:
            ValueError: not alike enough.
        """
        right = self._vectors[round_ * self._texts : (round_ + 1) * self._texts : every]
        least = min(cosine(a, b) for a, b in zip(vectors, right, strict=True))
        # A comparison that NaN fails, too.
        if not least > LEAST_COSINE:
            raise ValueError(f"wrong vectors: cosine {least} to the right one")
        return least


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """How alike two vectors are; 1 if they point the same way."""
    return float(sum(map(mul, a, b)) / math.sqrt(sum(map(mul, a, a)) * sum(map(mul, b, b))))


def own_cpu_seconds() -> dict[str, float]:
    """Of a side that is one process."""
    return {"process": time.process_time()}


def serve(make: Callable[[Setup], Side], setup: Setup) -> None:
    """Answer lines of `[round, every]` with lines of results, until they end.

    The side is ready once it is loaded, and warmed up.
    """

    def made() -> Callable[[list[int]], dict[str, Any]]:
        references = References(setup)
        side = make(setup)
        side.embed(setup.warm_up)

        def answer(asked: list[int]) -> dict[str, Any]:
            round_, every = asked
            texts = setup.rounds[round_][::every]
            before = side.cpu_seconds()
            began = time.perf_counter()
            vectors = side.embed(texts)
            seconds = time.perf_counter() - began
            used = {name: total - before[name] for name, total in side.cpu_seconds().items()}
            return asdict(Result(seconds, len(texts), used, references.least_cosine(vectors, round_, every)))

        return answer

    answer_lines(made)
