"""What only a gateway refuses, and which HTTP status each error of the fleet has."""

from __future__ import annotations

import math

from streamfleet_common.errors import (
    BrokerUnavailable,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotFound,
    QueueFull,
    RequestNotFound,
    StreamfleetError,
    TooLong,
)


class Unauthorized(StreamfleetError):
    """No key, or one that nobody has."""

    code = "invalid_api_key"


class ForeignSite(StreamfleetError):
    """A browser sent it for a page of another site."""

    code = "foreign_site"


class NoSuchPath(StreamfleetError):
    """Nothing of the interface is there."""

    code = "no_such_path"


class NoSuchMethod(StreamfleetError):
    """What is there has no such method."""

    code = "no_such_method"


class NoWorker(StreamfleetError):
    """The queue has no live worker, and the gateway is told not to wait for one."""

    code = "no_worker"
    retryable = True


class Ending(StreamfleetError):
    """The gateway was told to end, and has waited as long as it may."""

    code = "gateway_ending"
    retryable = True


ENDING = "this gateway ends: send the request again, to another one or in a moment"


class Overloaded(StreamfleetError):
    """The gateway has as many requests under way as it may."""

    code = "overloaded"
    retryable = True


class BodyTooLarge(InvalidRequest):
    """More bytes than `limit` in a body, a file or the header."""

    code = "too_large"


class HeaderTooLarge(InvalidRequest):
    """More header fields, or more bytes of them, than allowed."""

    code = "header_too_large"


_STATUSES: tuple[tuple[type[StreamfleetError], int], ...] = (
    (Unauthorized, 401),
    (ForeignSite, 403),
    (NoSuchPath, 404),
    (NoSuchMethod, 405),
    (NoWorker, 503),
    (Ending, 503),
    (Overloaded, 429),
    (BodyTooLarge, 413),
    (HeaderTooLarge, 431),
    (QueueFull, 429),
    (Conflict, 409),
    (ModelNotFound, 404),
    (RequestNotFound, 404),
    (DeadlineExceeded, 504),
    # As servers log a client that closed its request: somebody took this one back.
    (Cancelled, 499),
    (BrokerUnavailable, 503),
    (ModelLoadFailed, 503),
    (GenerationFailed, 500),
    (IncompleteGeneration, 500),
    (InvalidRequest, 400),
)


def status_of(error: StreamfleetError) -> int:
    """The HTTP status of an error; 500 for one of no known kind."""
    if error.details.get("bytes") is not None and isinstance(error, InvalidRequest):
        return 413  # encoded, it is over what a worker takes
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def code_of(error: StreamfleetError) -> str:
    """The code of an error in OpenAI's form; one of what is too large, whoever has found it so."""
    if isinstance(error, TooLong):
        return "context_length_exceeded"
    return BodyTooLarge.code if status_of(error) == 413 else error.code


def message_of(error: StreamfleetError) -> str:
    """What a client is told. Not where Redis is, nor what it says: that is for whoever runs the gateway."""
    if isinstance(error, BrokerUnavailable):
        return f"Redis cannot be used now ({error.reason}): try again in a moment"
    return error.message


def retry_after_s(error: StreamfleetError) -> int | None:
    """Whole seconds after which the same request may succeed, for a `Retry-After`; None if it will not."""
    if isinstance(error, (QueueFull, Overloaded)):
        return max(1, math.ceil(float(error.details.get("retry_after", 1.0))))
    return 1 if status_of(error) == 503 else None
