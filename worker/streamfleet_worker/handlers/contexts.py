"""What a handler is given beside the batch: built once, where the handler runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.stepped_iterator import SteppedIterator
from streamfleet_worker.handlers.user_code import place_of, trace_of

log = logging.getLogger(__name__)


class Contexts:
    """The named objects of a handler, built in their order, and cleaned up in the reverse.

    Args:
        handler: whose they are.
        runner: where those that are built asynchronously are built.

    Raises:
        ModelLoadFailed: one cannot be built.
    """

    def __init__(self, handler: Handler, runner: asyncio.Runner) -> None:
        self.values: dict[str, Any] = {}
        self._runner = runner
        self._exits = contextlib.ExitStack()
        for name, factory in handler.contexts.items():
            try:
                self.values[name] = self._build(factory)
            # Also what is no Exception: a library that calls sys.exit, say.
            except BaseException as error:
                with contextlib.suppress(Exception):
                    self.close()
                kind, place = type(error).__name__, place_of(error, handler.function)
                log.error("context %r of %s raised %s:%s", name, handler, kind, trace_of(error))
                raise ModelLoadFailed(
                    f"context {name!r} of {handler} could not be built: {kind}: {error} (at {place})"
                ) from error

    def close(self) -> None:
        """Go on with the factories that have yielded."""
        self._exits.close()

    def _build(self, factory: Callable[[], Any]) -> Any:
        made = factory()
        if inspect.isasyncgenfunction(factory):
            return self._enter(SteppedIterator(self._runner, made))
        if inspect.isgeneratorfunction(factory):
            return self._enter(made)
        return self._runner.run(awaited(made)) if inspect.isawaitable(made) else made

    def _enter(self, steps: Iterator[Any]) -> Any:
        try:
            value = next(steps)
        except StopIteration:
            raise TypeError("it yields nothing: yield the object once, and clean up after that") from None
        self._exits.callback(next, steps, None)
        return value


async def awaited(made: Awaitable[Any]) -> Any:
    """What an awaitable gives, as a coroutine, which alone a runner runs."""
    return await made
