"""Runs a handler's batches on a thread of its own, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from streamfleet_worker.engine.item import Computed, ItemBatch, Outcome, Progress, Running
from streamfleet_worker.handlers.contexts import Contexts, awaited
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.handler_thread import Called, HandlerThread, Job
from streamfleet_worker.handlers.outcomes import Outcomes, named
from streamfleet_worker.handlers.stepped_iterator import SteppedIterator


class HandlerRunner:
    """Calls the function of a handler. An event loop of its own runs what is asynchronous, batch by batch.

    While a batch runs the next one is put together, and the outputs of the last one are told; so the function
    has hardly a moment's rest under load.

    Raises:
        ModelLoadFailed: one of its context objects cannot be built.
    """

    slots = 1
    memory: Mapping[str, int] = {}

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._thread = HandlerThread()
        try:
            self._thread.call(self._open)
        except BaseException:
            self._thread.close()
            raise

    @property
    def ahead(self) -> int:
        """Full batches that wait for it. One that yields needs the thread for each of its parts."""
        return 0 if self._handler.signature.streams else 1

    def launch(self, batch: ItemBatch) -> Running:
        """Begin a batch of `CallInput`s. Raises as `named` does."""
        outcomes = Outcomes(self._handler, len(batch.values))
        again = any(value.was_given for value in batch.values)
        with named(self._handler, again=again):  # a type may read its values with code of the user's
            inputs = [value.take() for value in batch.values]
        if not self._handler.signature.streams:
            job = Job(partial(self._compute, inputs, outcomes, again))
            self._thread.put(job)
            return Called(job)
        given = self._thread.call(partial(self._begin, inputs, again))
        if hasattr(given, "__next__"):
            return _Yielding(self._handler, self._thread, given, outcomes, again)
        fault = f"gave {type(given).__name__}, and is said to yield lists"
        return Computed(lambda: outcomes.failure(fault))

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from the handler's thread, whenever a batch becomes ready."""
        self._thread.done = wake

    def is_broken(self) -> bool:
        """Never: what a handler raises for each of its inputs may be right."""
        return False

    def close(self) -> None:
        """Clean up the context objects, after the batch that runs."""
        try:
            self._thread.call(self._shut)
        finally:
            self._thread.close()

    # --- on the handler's thread

    def _open(self) -> None:
        self._runner = asyncio.Runner()
        try:
            self._contexts = Contexts(self._handler, self._runner)
        except BaseException:
            self._runner.close()
            raise

    def _shut(self) -> None:
        with contextlib.closing(self._runner):
            self._contexts.close()

    def _compute(self, inputs: list[Any], outcomes: Outcomes, again: bool) -> list[Outcome]:
        with named(self._handler, again=again):
            given = self._call(inputs)
            if inspect.isawaitable(given):
                given = self._runner.run(awaited(given))
        # Here, since the next batch may change what this one gave: a buffer that is used again, say.
        return outcomes.result(given)

    def _begin(self, inputs: list[Any], again: bool) -> Any:
        with named(self._handler, again=again):
            given = self._call(inputs)
        if hasattr(given, "__anext__") and hasattr(given, "aclose"):
            return SteppedIterator(self._runner, given)
        return given

    def _call(self, inputs: list[Any]) -> Any:
        collate = self._handler.collate
        return self._handler.function(inputs if collate is None else collate(inputs), **self._contexts.values)


class _Yielding:
    """A batch whose outputs come in parts."""

    is_ready = True

    def __init__(
        self, handler: Handler, thread: HandlerThread, steps: Iterator[Any], outcomes: Outcomes, again: bool
    ) -> None:
        self._named = partial(named, handler, again=again)
        self._thread = thread
        self._steps = steps
        self._outcomes = outcomes

    def advance(self) -> Progress:
        began = time.perf_counter()
        given = self._thread.call(self._next)
        news = self._outcomes.rest() if given is None else self._outcomes.parts(given[0])
        if self._outcomes.is_over:
            self.close()
        return Progress(news, self._outcomes.is_over, time.perf_counter() - began)

    def close(self) -> None:
        # What it raises now is about nobody's output.
        with contextlib.suppress(Exception):
            self._thread.call(self._close)

    def _next(self) -> tuple[Any] | None:
        with self._named():
            try:
                return (next(self._steps),)
            except StopIteration:
                return None

    def _close(self) -> None:
        with self._named():
            close = getattr(self._steps, "close", None)
            if close is not None:
                close()
