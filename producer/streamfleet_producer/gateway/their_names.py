"""What the fleet finds wrong with a request, in the names of the fields that the caller has sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response

from streamfleet_common.errors import StreamfleetError, from_wire
from streamfleet_producer.gateway.dialects import Dialect

Rename = Callable[[str], str]
"""A problem, which begins with the name of a field, with that field's other name."""


def renamed(error: StreamfleetError, rename: Rename) -> StreamfleetError:
    """The error with other names in its words and its problems; itself, if there are none to change."""
    problems = [str(problem) for problem in error.details.get("problems") or [error.message]]
    told = [rename(problem) for problem in problems]
    if told == problems:
        return error
    message = error.message
    for ours, theirs in zip(problems, told, strict=True):
        message = message.replace(ours, theirs, 1)
    made = from_wire(error.code, message, {**error.details, "problems": told})
    made.retryable = error.retryable
    return made


def head_of(problem: str) -> str:
    """The name with which a problem begins, without places in the field; "" if that is no name."""
    head, colon, _ = problem.partition(":")
    return head.partition(".")[0] if colon else ""


@dataclass(frozen=True, slots=True)
class InTheirNames:
    """A dialect that says errors in the names of one request's body."""

    dialect: Dialect
    rename: Rename

    def response(self, error: StreamfleetError) -> Response:
        return self.dialect.response(renamed(error, self.rename))

    def chunk(self, error: StreamfleetError) -> bytes:
        return self.dialect.chunk(renamed(error, self.rename))
