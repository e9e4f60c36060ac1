"""From what a handler gives to what each item of its batch comes to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_worker.engine.faults import is_out_of_memory, words_of
from streamfleet_worker.engine.item import Done, Outcome, Part, RetryLater
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.marks import END
from streamfleet_worker.handlers.user_code import place_of

MAX_OUTPUT_BYTES = MAX_RESULT_BYTES - 64 * 1024
"""Of one item's outputs together; the rest of a result is the end's own."""

log = logging.getLogger(__name__)


class Outcomes:
    """The places of one batch, and which of them are still open.

    Args:
        handler: whose batch it is.
        n: items in it.
    """

    def __init__(self, handler: Handler, n: int) -> None:
        self._handler = handler
        self._output = handler.signature.output
        self._left = [MAX_OUTPUT_BYTES] * n
        self._open = [True] * n
        self._was_told = False

    @property
    def is_over(self) -> bool:
        """Whether every item has ended."""
        return not any(self._open)

    def result(self, given: Any) -> list[Outcome]:
        """What the items come to, of a handler that returns."""
        fault = self._fault(given, "returned")
        if fault is not None:
            return self.failure(fault)
        return [self._last(place, value) for place, value in enumerate(given)]

    def parts(self, given: Any) -> list[Outcome]:
        """What the items come to for now, of a handler that yields."""
        fault = self._fault(given, "yielded")
        if fault is not None:
            return self.failure(fault)
        return [self._next(place, value) for place, value in enumerate(given)]

    def rest(self) -> list[Outcome]:
        """What they come to when nothing more is yielded."""
        ends: list[Outcome] = [Done(()) if is_open else None for is_open in self._open]
        self._open = [False] * len(ends)
        return ends

    def failure(self, fault: str) -> list[Outcome]:
        """What they come to when the handler has broken its word: no item is to blame, and all fail."""
        ends: list[Outcome] = [
            GenerationFailed(f"{self._handler} {fault}") if is_open else None for is_open in self._open
        ]
        self._open = [False] * len(ends)
        return ends

    def _fault(self, given: Any, verb: str) -> str | None:
        wanted = len(self._open)
        if not isinstance(given, list | tuple):
            advice = " (.tolist() makes one)" if hasattr(given, "tolist") else ""
            return (
                f"{verb} {type(given).__name__}: a list with {_number(wanted, 'place')} is wanted, "
                f"one for each input{advice}"
            )
        if len(given) != wanted:
            return (
                f"{verb} {_number(len(given), 'place')} for {_number(wanted, 'input')}: "
                "one is wanted for each, in their order"
            )
        return None

    def _next(self, place: int, value: Any) -> Outcome:
        if value is None or not self._open[place]:
            return None
        if value is END:
            self._open[place] = False
            return Done(())
        outcome = self._checked(place, value)
        if isinstance(outcome, Exception):
            self._open[place] = False
            return outcome
        return Part(outcome[0])

    def _last(self, place: int, value: Any) -> Outcome:
        self._open[place] = False
        outcome = self._checked(place, value)
        return outcome if isinstance(outcome, Exception) else Done(outcome)

    def _checked(self, place: int, value: Any) -> tuple[Any] | Exception:
        if isinstance(value, BaseException):
            return _of_item(self._handler, value)
        if value is END:
            return GenerationFailed(f"{self._handler} returned END, which is for handlers that yield")
        try:
            plain, size = self._output.write(value)
        except ValueError as error:
            if error.__cause__ is not None:
                self._tell(error.__cause__)
            return GenerationFailed(
                f"{self._handler} gave an output that does not fit {self._output.name}: {words_of(error)}"
            )
        except Exception as error:  # noqa: BLE001  a validator or serializer that somebody wrote
            kind = type(error).__name__
            self._tell(error)
            return GenerationFailed(
                f"{self._handler} gave an output that cannot be told: {kind}: {words_of(error)}"
            )
        self._left[place] -= size
        if self._left[place] < 0:
            return GenerationFailed(
                f"{self._handler} gave {MAX_OUTPUT_BYTES - self._left[place]} bytes of output for one input, "
                f"and a result holds {MAX_OUTPUT_BYTES}: give less, or the place where it is kept"
            )
        return (plain,)

    def _tell(self, error: BaseException) -> None:
        """Once a batch, of which each item may come to the same."""
        _log(logging.DEBUG if self._was_told else logging.WARNING, self._handler, error)
        self._was_told = True


@contextmanager
def named(handler: Handler, *, again: bool = False) -> Iterator[None]:
    """Let out what a handler raises, under its name, and say where that is in its author's code.

    Args:
        handler: whose code runs.
        again: it runs on a part of a batch that has failed, of which enough has been said.

    Raises:
        StreamfleetError, RetryLater: as the handler raises it.
        GenerationFailed: in place of anything else, but for a lack of memory, which the engine heeds.
    """
    try:
        yield
    except (StreamfleetError, RetryLater):
        raise
    # Also what is no Exception: SystemExit, or a cancellation, would end the thread and with it the worker.
    except BaseException as error:
        _log(logging.DEBUG if again else logging.WARNING, handler, error)
        if isinstance(error, Exception) and is_out_of_memory(error):
            raise
        raise GenerationFailed(f"{handler} failed: {type(error).__name__}: {words_of(error)}") from error


def _of_item(handler: Handler, error: BaseException) -> Exception:
    if isinstance(error, StreamfleetError | RetryLater):
        return error
    if error.__traceback__ is not None:  # raised and caught, and may be one that nobody expected
        _log(logging.INFO, handler, error)
    failure = GenerationFailed(
        f"{handler} failed on this input: {type(error).__name__}: {words_of(error)}",
        retryable=is_out_of_memory(error),
    )
    failure.__cause__ = error
    return failure


def _log(level: int, handler: Handler, error: BaseException) -> None:
    place = place_of(error, handler.function)
    log.log(level, "%s raised %s at %s", handler, type(error).__name__, place)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
