"""Runs a handler's batches on the thread that it is built on."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamfleet_worker.engine.item import Computed, ItemBatch, Outcome, Progress, Running
from streamfleet_worker.handlers.contexts import Contexts, awaited
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.outcomes import Outcomes, named
from streamfleet_worker.handlers.stepped_iterator import SteppedIterator


class HandlerRunner:
    """Calls the function of a handler. An event loop of its own runs what is asynchronous, batch by batch.

    Raises:
        ModelLoadFailed: one of its context objects cannot be built.
    """

    slots = 1
    memory: Mapping[str, int] = {}

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._runner = asyncio.Runner()
        try:
            self._contexts = Contexts(handler, self._runner)
        except BaseException:
            self._runner.close()
            raise

    def launch(self, batch: ItemBatch) -> Running:
        """Begin a batch of `CallInput`s. Raises as `named` does."""
        outcomes = Outcomes(self._handler, len(batch.values))
        if not self._handler.signature.streams:
            return Computed(lambda: self._compute(batch, outcomes))
        with named(self._handler):
            given = self._call(batch)
        if hasattr(given, "__next__"):
            return _Yielding(self._handler, given, outcomes)
        if hasattr(given, "__anext__") and hasattr(given, "aclose"):
            return _Yielding(self._handler, SteppedIterator(self._runner, given), outcomes)
        return Computed(lambda: outcomes.failure(f"gave {type(given).__name__}, and is said to yield lists"))

    def listen(self, wake: Callable[[], None]) -> None:
        """Nothing runs elsewhere, so nothing is ever told."""

    def is_broken(self) -> bool:
        """Never: what a handler raises for each of its inputs may be right."""
        return False

    def close(self) -> None:
        """Clean up the context objects."""
        with contextlib.closing(self._runner):
            self._contexts.close()

    def _compute(self, batch: ItemBatch, outcomes: Outcomes) -> list[Outcome]:
        with named(self._handler):
            given = self._call(batch)
            if inspect.isawaitable(given):
                given = self._runner.run(awaited(given))
        return outcomes.result(given)

    def _call(self, batch: ItemBatch) -> Any:
        inputs = [value.take() for value in batch.values]
        collate = self._handler.collate
        return self._handler.function(inputs if collate is None else collate(inputs), **self._contexts.values)


class _Yielding:
    """A batch whose outputs come in parts."""

    is_ready = True

    def __init__(self, handler: Handler, steps: Iterator[Any], outcomes: Outcomes) -> None:
        self._handler = handler
        self._steps = steps
        self._outcomes = outcomes

    def advance(self) -> Progress:
        began = time.perf_counter()
        with named(self._handler):
            try:
                given = next(self._steps)
            except StopIteration:
                news = self._outcomes.rest()
            else:
                news = self._outcomes.parts(given)
        if self._outcomes.is_over:
            self.close()
        return Progress(news, self._outcomes.is_over, time.perf_counter() - began)

    def close(self) -> None:
        # What it raises now is about nobody's output.
        with contextlib.suppress(Exception), named(self._handler):
            close = getattr(self._steps, "close", None)
            if close is not None:
                close()
