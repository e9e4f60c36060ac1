"""How TGI says an error: `{"error", "error_type"}`, with the statuses that its clients know."""

from __future__ import annotations

from starlette.responses import Response

from streamfleet_common.errors import (
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestNotFound,
    StreamfleetError,
    TooLong,
)
from streamfleet_producer.gateway.dialects import error_headers, json_bytes, json_response
from streamfleet_producer.gateway.refusals import Overloaded, Unauthorized, message_of, status_of

_KINDS: tuple[tuple[type[StreamfleetError], int | None, str], ...] = (
    (TooLong, 422, "validation"),
    (QueueFull, 429, "overloaded"),
    (Overloaded, 429, "overloaded"),
    (GenerationFailed, 424, "generation"),
    (IncompleteGeneration, 500, "incomplete_generation"),
    (DeadlineExceeded, 504, "timeout"),
    (ModelNotFound, 404, "not_found"),
    (RequestNotFound, 404, "not_found"),
    (Unauthorized, 401, "authentication"),
    (InvalidRequest, None, "validation"),
)
"""None keeps the status that the error has elsewhere, but for 400."""
_VALIDATION = 422


class TgiDialect:
    """TGI's form."""

    def response(self, error: StreamfleetError) -> Response:
        status, kind = _said(error)
        return json_response({"error": _message(error), "error_type": kind}, status, error_headers(error))

    def chunk(self, error: StreamfleetError) -> bytes:
        kind = _said(error)[1]
        if isinstance(error, (DeadlineExceeded, Cancelled)):
            kind = "incomplete_generation"  # that is what clients know for a text that breaks off
        return b"data: " + json_bytes({"error": _message(error), "error_type": kind}) + b"\n\n"


def _said(error: StreamfleetError) -> tuple[int, str]:
    status = status_of(error)
    for kind, own, name in _KINDS:
        if isinstance(error, kind):
            return own or (_VALIDATION if status == 400 else status), name
    return status, error.code


def _message(error: StreamfleetError) -> str:
    # Clients look at the beginnings, too.
    if isinstance(error, TooLong):
        return f"Input validation error: {_too_long(error)}"
    if isinstance(error, InvalidRequest):
        return f"Input validation error: {message_of(error)}"
    if isinstance(error, GenerationFailed):
        return f"Request failed during generation: {message_of(error)}"
    return message_of(error)


def _too_long(error: TooLong) -> str:
    """The same in the names of TGI's parameters."""
    found = f"`inputs` of {error.prompt_tokens} tokens"
    if error.prompt_tokens >= error.limit:
        return f"{found} must be below the limit of {error.limit}: shorten or `truncate` them"
    return (
        f"{found} + `max_new_tokens` of {error.max_tokens} must be at most {error.limit}: ask for at most "
        f"{error.limit - error.prompt_tokens}, or shorten or `truncate` the inputs"
    )


TGI = TgiDialect()
