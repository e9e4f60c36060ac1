"""How an error is said: each family of routes has a form that its clients understand."""

from __future__ import annotations

import json
from typing import Any, Protocol

from starlette.responses import Response

from streamfleet_common.errors import InvalidRequest, ModelNotFound, QueueFull, StreamfleetError
from streamfleet_producer.gateway.refusals import Unauthorized, code_of, message_of, retry_after_s, status_of


class Dialect(Protocol):
    """Says an error as a response, or, once a stream is under way, as a chunk of it."""

    def response(self, error: StreamfleetError) -> Response: ...

    def chunk(self, error: StreamfleetError) -> bytes: ...


def json_bytes(value: Any) -> bytes:
    """Compact JSON.

    Raises:
        ValueError: a number that JSON has not.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of it. Raises as `json_bytes`."""
    return Response(json_bytes(value), status, headers, "application/json")


def error_headers(error: StreamfleetError) -> dict[str, str]:
    """What an error says in the header."""
    headers = {}
    after = retry_after_s(error)
    if after is not None:
        headers["Retry-After"] = str(after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


class OpenAIDialect:
    """OpenAI's form, which our own routes share: `{"error": {message, type, param, code, details}}`."""

    def response(self, error: StreamfleetError) -> Response:
        return json_response(self.body(error), status_of(error), error_headers(error))

    def chunk(self, error: StreamfleetError) -> bytes:
        return b"data: " + json_bytes(self.body(error)) + b"\n\n"

    def body(self, error: StreamfleetError) -> dict[str, Any]:
        return {
            "error": {
                "message": message_of(error),
                "type": _type(error),
                "param": _param(error),
                "code": code_of(error),
                "details": error.details,
            }
        }


def _type(error: StreamfleetError) -> str:
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, QueueFull):
        return "rate_limit_error"
    if isinstance(error, (InvalidRequest, ModelNotFound)) or status_of(error) < 500:
        return "invalid_request_error"
    return "server_error"


def _param(error: StreamfleetError) -> str | None:
    # "sampling.temperature: …" names the field; a message without one has no such head.
    problems = error.details.get("problems") or [""]
    head, colon, _ = str(problems[0]).partition(":")
    return head if colon and head and not any(map(str.isspace, head)) else None


OPENAI = OpenAIDialect()
