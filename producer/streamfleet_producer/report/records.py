"""The lines of a file of records: what was run, each request, and how full the fleet was meanwhile.

JSON, one document a line, the head first. Times are milliseconds from the start of the run, on one clock.
docs/report.md describes the format for whoever writes it from another program.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import SEQUENCE, Message, problems

VERSION = 1
MAX_LINE_BYTES = 1024 * 1024
MAX_GAPS = 32_768
MAX_MS = 1e11
"""Three years: what is beyond is a time of day, not a time from the start."""

_Ms = Annotated[float, Field(ge=0.0, le=MAX_MS)]
_Word = Annotated[str, Field(max_length=200)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Facts = Annotated[dict[_Word, Annotated[str, Field(max_length=2000)]], Field(max_length=64)]

Outcome = Literal["done", "failed", "cancelled", "expired", "dead", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("done", "refused", "expired", "cancelled", "failed", "dead")


class Head(Message):
    """What was run; the first line."""

    type: Literal["head"] = "head"
    version: Literal[1] = 1
    label: Annotated[str, Field(min_length=1, max_length=80)]
    """What the plots call this run."""
    command: Annotated[str, Field(max_length=2000)] = ""
    """Without passwords: it is shown."""
    began_at: Annotated[str, Field(max_length=64)] = ""
    """Date and time, for people."""
    loop: Literal["open", "closed", ""] = ""
    """"open": requests were sent when it was their time, and count from then on, however late they were sent.
    "closed": each caller sent his next one after the answer to his last."""
    warmup_ms: _Ms = 0.0
    """Requests submitted before are in no figure."""
    machine: _Facts = Field(default_factory=dict)
    versions: _Facts = Field(default_factory=dict)
    model: _Facts = Field(default_factory=dict)
    settings: _Facts = Field(default_factory=dict)


class RequestLine(Message):
    """One request."""

    type: Literal["request"] = "request"
    kind: Annotated[str, Field(min_length=1, max_length=40)] = "generate"
    """Requests of one kind make one set of figures."""
    submitted_ms: _Ms
    """In an open loop the time at which it was to be sent."""
    sent_ms: _Ms | None = None
    """When it really was, if that is another time."""
    started_ms: _Ms | None = None
    """When a worker took it."""
    first_token_ms: _Ms | None = None
    ended_ms: _Ms
    """When its end was known here, however it ended."""
    gaps_ms: Annotated[tuple[_Ms, ...], SEQUENCE, Field(max_length=MAX_GAPS)] = ()
    """Between one piece of the answer and the next, as the caller got them."""
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    outcome: Outcome = "done"
    error: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    """The error's code."""
    batch_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Requests of the batch that it ran in."""


class SampleLine(Message):
    """How full the fleet was at one time; what is not known is left out."""

    type: Literal["sample"] = "sample"
    at_ms: _Ms
    queued: _Count | None = None
    running: _Count | None = None
    rows: _Count | None = None
    """Rows of the workers' batches that are in use."""
    max_rows: _Count | None = None
    """Rows that all batches have together."""


Line = Head | RequestLine | SampleLine
_TYPES: dict[str, type[Line]] = {"head": Head, "request": RequestLine, "sample": SampleLine}


def encode(line: Line) -> bytes:
    """The line, its end included."""
    told: dict[str, Any] = {"type": line.type}
    if isinstance(line, Head):
        told["version"] = line.version
    told.update(line.model_dump(mode="json", exclude_defaults=True))
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def decode(data: bytes) -> Line:
    """What a line says.

    Raises:
        InvalidRequest: it is none; the message says why, without repeating it.
    """
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest("it is no JSON") from None
    if not isinstance(told, dict) or told.get("type") not in (*_TYPES,):
        raise InvalidRequest('it is no object whose "type" is "head", "request" or "sample"')
    if told["type"] == "head" and told.get("version") != VERSION:
        raise InvalidRequest(f'its "version" is not {VERSION}: this program knows no other')
    try:
        line = _TYPES[told["type"]].model_validate(told)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest("; ".join(faults), problems=faults) from None
    if isinstance(line, RequestLine):
        _check_order(line)
    return line


def _check_order(line: RequestLine) -> None:
    for name in ("sent_ms", "started_ms", "first_token_ms", "ended_ms"):
        at = getattr(line, name)
        if at is not None and at < line.submitted_ms:
            raise InvalidRequest(f"{name} is before submitted_ms: give all times on one clock")
    if line.first_token_ms is not None and line.ended_ms < line.first_token_ms:
        raise InvalidRequest("ended_ms is before first_token_ms: give all times on one clock")
