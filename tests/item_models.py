"""Tasks and runners without a model, and a bench that drives a micro-batch engine under its own clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_driver import Clock
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import Request, Usage
from streamfleet_worker.engine.base import Arrival, EngineInfo, Finished, Key, Parts, Step
from streamfleet_worker.engine.item import Computed, Done, ItemBatch, ItemSpec, Outcome, Progress, Running
from streamfleet_worker.engine.micro_batch import MicroBatchEngine

BYTES = 10
"""What each item is said to take."""


def text(value: Any, *, length: int = 0, group: Any = None, digest: bytes | None = None) -> ItemSpec:
    """An item."""
    return ItemSpec(value, length, group, digest, BYTES)


def equal(value: Any, **fields: Any) -> ItemSpec:
    """An item that is like all others of this value."""
    return text(value, digest=str(value).encode(), **fields)


@dataclass
class ListJob:
    """A request whose answer lists the results of its items."""

    items: Sequence[ItemSpec]
    usage: Usage = field(default_factory=Usage)
    tokenize_s: float = 0.0
    fault: Exception | None = None

    @property
    def n(self) -> int:
        return len(self.items)

    def answer(self, results: Sequence[Any]) -> Mapping[str, Any]:
        if self.fault is not None:
            raise self.fault
        return {"outputs": tuple(results)}


class ListTask:
    """Makes no jobs: the tests do."""

    counts: Mapping[str, int] = {"tokenization_cache_hits": 7}

    def prepare(self, request: Request, scope: str = "") -> ListJob:
        raise NotImplementedError


class ListRunner:
    """Gives `result(value)` for each item, and keeps what it ran.

    Args:
        result: may give an outcome, or raise, which is that item's own outcome.
        fails: what a whole batch raises, if anything; of its values.
    """

    slots = 1
    ahead = 0

    def __init__(
        self,
        result: Callable[[Any], Any] = lambda value: ("result", value),
        fails: Callable[[list[Any]], Exception | None] = lambda values: None,
    ) -> None:
        self.result = result
        self.fails = fails
        self.batches: list[ItemBatch] = []
        self.memory: Mapping[str, int] = {"weights": 1}
        self.broken = False
        self.asked = 0
        """How often it was asked whether it is broken."""
        self.closed = False

    @property
    def values(self) -> list[list[Any]]:
        return [batch.values for batch in self.batches]

    def launch(self, batch: ItemBatch) -> Running:
        self.batches.append(batch)
        return Computed(lambda: self._compute(batch))

    def _compute(self, batch: ItemBatch) -> list[Outcome]:
        error = self.fails(batch.values)
        if error is not None:
            raise error
        return [self._outcome(value) for value in batch.values]

    def _outcome(self, value: Any) -> Outcome:
        try:
            result = self.result(value)
        except Exception as error:  # noqa: BLE001
            return error
        return result if isinstance(result, Done) else Done(result)

    def listen(self, wake: Callable[[], None]) -> None:
        pass

    def is_broken(self) -> bool:
        self.asked += 1
        return self.broken

    def close(self) -> None:
        self.closed = True


class Elsewhere:
    """A batch that is ready when a test says so, and gives what it says."""

    def __init__(self, batch: ItemBatch) -> None:
        self.batch = batch
        self.news: list[Progress | Exception] = []
        self.closed = 0
        self.advanced_after_close = False
        self.fault_of_close: Exception | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.news)

    def tell(self, *outcomes: Outcome, ended: bool = True, device_s: float = 0.0) -> None:
        self.news.append(Progress(list(outcomes), ended, device_s))

    def advance(self) -> Progress:
        self.advanced_after_close |= bool(self.closed)
        news = self.news.pop(0)
        if isinstance(news, Exception):
            raise news
        return news

    def close(self) -> None:
        self.closed += 1
        if self.fault_of_close is not None:
            raise self.fault_of_close


class ElsewhereRunner(ListRunner):
    """Runs batches elsewhere: each waits for the test's word."""

    def __init__(self, slots: int = 1, ahead: int = 0) -> None:
        super().__init__()
        self.slots = slots
        self.ahead = ahead
        self.running: list[Elsewhere] = []
        self.wake: Callable[[], None] = lambda: None

    def launch(self, batch: ItemBatch) -> Elsewhere:
        self.batches.append(batch)
        self.running.append(Elsewhere(batch))
        return self.running[-1]

    def listen(self, wake: Callable[[], None]) -> None:
        self.wake = wake


class Bench:
    """An engine, its clock, and what each request has heard.

    It checks what holds for every engine: nothing after an end, and an end once.
    """

    def __init__(
        self, runner: ListRunner, *, size: int = 4, window: int = 4, delay: float = 1.0, **options: Any
    ) -> None:
        self.clock = Clock()
        self.runner = runner
        self.info = EngineInfo("m", "r", ("call",), "cpu", "float32", size, 0, 0, window=window)
        self.engine = MicroBatchEngine(
            ListTask(), runner, self.info, max_delay_s=delay, clock=self.clock, **options
        )
        self.ends: dict[str, Finished] = {}
        self.ended_at: dict[str, float] = {}
        self.parts: dict[str, list[Any]] = {}
        self.known: set[str] = set()

    def ask(
        self,
        name: str,
        *items: ItemSpec | int | str,
        age: float = 0.0,
        life: float = 1e9,
        scope: str = "",
        **fields: Any,
    ) -> Key:
        """Add a request that was accepted `age` seconds ago and expires in `life`."""
        specs = [one if isinstance(one, ItemSpec) else text(one) for one in items]
        key = (name, 1)
        self.known.add(name)
        now = self.clock.now
        self.engine.add({key: Arrival(ListJob(specs, **fields), now - age, now + life, scope)})
        return key

    def cancel(self, *names: str) -> None:
        self.engine.cancel([(name, 1) for name in names])
        self.known -= set(names)

    def step(self) -> Step:
        step = self.engine.step()
        for output in step.outputs:
            name, _ = output.key
            assert name in self.known, "an output of what was cancelled"
            assert name not in self.ends, "an output after the end"
            if isinstance(output.event, Parts):
                self.parts.setdefault(name, []).extend(output.event.values)
            else:
                assert isinstance(output.event, Finished)
                assert (output.event.error is None) == (output.event.state == "done")
                self.ends[name] = output.event
                self.ended_at[name] = self.clock.now
        return step

    def run(self) -> dict[str, Finished]:
        """Step until nothing is due, letting the clock jump over delays; no step may be for nothing."""
        for _ in range(100_000):
            due_in = self.engine.due_in()
            if due_in is None:
                return self.ends
            self.clock.now += due_in
            self.step()
        raise AssertionError("it never comes to rest")

    def run_now(self) -> dict[str, Finished]:
        """The same, without letting time pass."""
        for _ in range(100_000):
            if self.engine.due_in() != 0:
                return self.ends
            self.step()
        raise AssertionError("it never comes to rest")

    def outputs(self, name: str) -> list[Any]:
        """The answer of a request that is done."""
        end = self.ends[name]
        assert end.error is None, end.error
        return list(end.outputs)

    def error(self, name: str) -> StreamfleetError:
        error = self.ends[name].error
        assert error is not None
        return error

    def assert_empty(self) -> None:
        """Nothing is left of all that was."""
        engine: Any = self.engine
        assert engine.due_in() is None
        pending = engine._pending
        left = (pending._asked, pending._shared, engine._running, list(engine._halves), engine._line._buckets)
        assert left == ({}, {}, [], [], {})
        room = engine.room()
        assert (room.rows, room.running, room.waiting) == (self.info.max_rows, 0, 0)
        assert engine.memory["items"] == 0
