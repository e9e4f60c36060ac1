"""Items: the units of one-shot work, and the faces of what makes them, runs them and answers with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from streamfleet_common.schemas import Request, Usage


@dataclass(slots=True)
class ItemSpec:
    """One text, pair, option or input, as its task makes it."""

    value: Any
    """What the runner is given."""
    length: int = 0
    """Tokens; 0 if it has no length."""
    group: Hashable = None
    """Only items of one group share a batch."""
    digest: bytes | None = None
    """Items of one scope, one group and one digest have one result; None is like no other."""
    bytes: int = 0
    """Memory that it takes while it waits."""


class Job(Protocol):
    """A request made ready: a `Ready` of the micro-batch engine."""

    @property
    def n(self) -> int:
        """Rows of the batch that it takes: its items."""

    @property
    def items(self) -> Sequence[ItemSpec]:
        """Its items, in their order; it may have none."""

    @property
    def usage(self) -> Usage:
        """Its tokens, and what was cut."""

    @property
    def tokenize_s(self) -> float:
        """How long it took to make it ready."""

    def answer(self, results: Sequence[Any]) -> Mapping[str, Any]:
        """Fields of `Finished`, made of the results of its items, in their order.

        Raises:
            StreamfleetError: they make no answer.
        """


class Task(Protocol):
    """What one model, or one handler, can be asked for."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What its caches have counted so far, by name; may be read from any thread."""

    def prepare(self, request: Request, scope: str = "", /) -> Job:
        """Check a request and make it ready; callable from any thread.

        What it keeps of a request is for others of its scope alone.

        Raises:
            InvalidRequest: it cannot be run here, and why; `TooLong`, `Unsupported` among them.
            ModelNotFound: it names another model.
        """


# --- running


@dataclass(slots=True)
class ItemBatch:
    """What runs together."""

    values: list[Any]
    group: Hashable = None
    length: int = 0
    """Tokens that each row is filled up to; 0 where items have no length."""
    lengths: tuple[int, ...] = ()
    """Tokens of each."""


@dataclass(slots=True)
class Part:
    """An outcome: more of an item's output, which goes on."""

    value: Any


@dataclass(slots=True)
class Done:
    """An outcome: an item's result, or the end of its parts."""

    value: Any = None


class RetryLater(Exception):
    """An outcome: the item's request is to be tried again after so many seconds."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"to be tried again after {after_s:g} s")
        self.after_s = after_s


Outcome = Part | Done | Exception | None
"""What an item has come to; None is nothing new."""


@dataclass(slots=True)
class Progress:
    """What a batch has brought forth since it was last asked."""

    outcomes: Sequence[Outcome]
    """One for each item."""
    ended: bool = True
    """The batch is over. An item that has not ended by then has failed."""
    device_s: float = 0.0
    """Seconds that it was computed."""


class Running(Protocol):
    """A batch under way."""

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to do or to give, without waiting for others."""

    def advance(self) -> Progress:
        """Go on with it.

        Raises:
            Exception: the batch as a whole has failed.
        """

    def close(self) -> None:
        """Nobody wants the rest of it; `is_ready` tells when it is over."""


class Runner(Protocol):
    """Runs batches; belongs to the engine's thread."""

    @property
    def slots(self) -> int:
        """Batches that run at once; more than one only where they run elsewhere."""

    @property
    def ahead(self) -> int:
        """Full batches that may be launched beyond these, to wait for their turn where they run."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now, by use; may be read from any thread."""

    def launch(self, batch: ItemBatch) -> Running:
        """Begin a batch.

        Raises:
            Exception: the batch as a whole has failed.
        """

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, whenever a batch that runs elsewhere becomes ready."""

    def is_broken(self) -> bool:
        """Whether nothing can be run any more. Asked when all items of a batch have failed one by one."""

    def close(self) -> None:
        """Free what it holds."""


class Computed:
    """A batch that one call computes, on the thread that asks for it."""

    def __init__(self, compute: Callable[[], Sequence[Outcome]]) -> None:
        self._compute = compute

    @property
    def is_ready(self) -> bool:
        return True

    def advance(self) -> Progress:
        began = time.perf_counter()
        outcomes = self._compute()
        return Progress(outcomes, device_s=time.perf_counter() - began)

    def close(self) -> None:
        pass
