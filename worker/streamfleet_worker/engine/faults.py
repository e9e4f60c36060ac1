"""What an error says: about the machine, and to whom. Without torch, which names its own plainly enough."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from streamfleet_common.errors import GenerationFailed, StreamfleetError, from_wire
from streamfleet_common.schemas import Failure
from streamfleet_worker.engine.item import RetryLater

PROBLEM_CHARS = 1000


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine had no memory left for something."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError":
        return True
    words = words_of(error)
    return "out of memory" in words or "can't allocate memory" in words


def words_of(error: BaseException) -> str:
    """The beginning of what it says; whatever it is, it says something."""
    try:
        return str(error)[:PROBLEM_CHARS]
    except Exception:  # noqa: BLE001  an error whose words are an error
        return "?"


def of_company(error: Exception, n: int) -> Exception:
    """What each of `n` items is told of an error that they raised together.

    Not its words, which may quote an item that is another's, unless they were chosen for the sender.
    """
    is_chosen = isinstance(error, StreamfleetError) and not isinstance(error, GenerationFailed)
    if n == 1 or is_chosen or isinstance(error, RetryLater):
        return error
    kind = type(error.__cause__ or error).__name__
    is_retryable = isinstance(error, StreamfleetError) and error.retryable
    return GenerationFailed(
        f"the batch that it ran in failed ({kind})", retryable=is_retryable or is_out_of_memory(error)
    )


def failure_of(error: Exception, place: int | None = None) -> StreamfleetError:
    """What a request fails with. `place` is that of the item that is to blame, if it has several."""
    try:
        if isinstance(error, StreamfleetError):
            code, message, details, is_retryable = error.code, error.message, error.details, error.retryable
        else:
            code, message, details = GenerationFailed.code, words_of(error), {}
            is_retryable = is_out_of_memory(error) or isinstance(error, RetryLater)
            if not isinstance(error, RetryLater):
                message = f"it failed on this request: {type(error).__name__}: {message}"
        if place is not None:
            message, details = f"item {place}: {message}", {**details, "item": place}
        # A copy, without the frames of what raised it: they hold a batch.
        failure = from_wire(code, message, details)
        if isinstance(failure, GenerationFailed):
            failure.details["retryable"] = is_retryable  # for who asked, when its tries are used up
        Failure.of(failure)  # which will be told
    except Exception:  # noqa: BLE001  an error of somebody's own that lacks what ours have
        return GenerationFailed(f"it failed on this request: {type(error).__name__}")
    failure.retryable = is_retryable
    return failure


def about(key: tuple[str, int]) -> Mapping[str, Any]:
    """The `extra` of a log line that is about a request."""
    return {"rid": key[0], "epoch": key[1]}


def death_of(error: BaseException) -> str:
    """What a log may have of an error that ended more than a request.

    Its words only where the machine, or we, have chosen them: those of any other may quote what was at hand.
    """
    kind = type(error).__name__
    machines = isinstance(error, (MemoryError, OSError, RuntimeError, StreamfleetError))
    return f"{kind}: {words_of(error)}" if machines else kind


def frames_of(error: BaseException, most: int = 8) -> list[str]:
    """Where it was raised, the innermost place last. Without its words, as in `place_of`."""
    frames = traceback.extract_tb(error.__traceback__)[-most:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


def place_of(error: Exception) -> str:
    """Its kind and where it was raised: what a log may have of it, since its words may quote a request.

    No place of one of ours, which was made on purpose: whoever made it of another has told that one's place.
    """
    if isinstance(error, StreamfleetError):
        return type(error.__cause__ or error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"
