"""The forms of lines: ours, and those of others; a form reads requests and writes answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.message import problems
from streamfleet_common.schemas import End, Failure, Request

DialectName = Literal["streamfleet", "openai"]
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
_OF_A_LINE = {"custom_id", "request"}


class Asked(Protocol):
    """What one line asks of the fleet, and how its answer is told."""

    @property
    def requests(self) -> Sequence[Request]:
        """At least one; they are asked one after the other."""

    def answer(self, custom_id: str, ids: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
        """The output's line, JSON values; `ids` (`<queue>:<rid>`) and `ends` are parallel to the requests."""


class Dialect(Protocol):
    """How the lines of a job look. Pure: it knows no file, no job, no fleet."""

    def parse(self, line: dict[str, Any]) -> Asked:
        """What a line asks, which has a good `custom_id`.

        Raises:
            InvalidRequest: nothing that can be asked, with every problem found.
        """

    def refusal(self, custom_id: str | None, error: StreamfleetError) -> dict[str, Any]:
        """The error file's line for a line that failed; without an id for one that has none of its own."""


class OwnDialect:
    """`{"custom_id": "…", "request": {"kind": "generate", …}}`, answered with the `end` of the wire."""

    def parse(self, line: dict[str, Any]) -> Asked:
        others = sorted(line.keys() - _OF_A_LINE)
        if others or "request" not in line:
            raise InvalidRequest(
                'a line is {"custom_id": "…", "request": {"kind": "generate", …}}'
                + (f"; it has {len(others)} other fields" if others else "")
            )
        try:
            return _OwnAsked((_REQUEST.validate_python(line["request"]),))
        except ValidationError as error:
            faults = problems(error)
            raise InvalidRequest(f"the request is not valid: {'; '.join(faults)}", problems=faults) from None

    def refusal(self, custom_id: str | None, error: StreamfleetError) -> dict[str, Any]:
        return {"custom_id": custom_id, "error": Failure.of(error).model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class _OwnAsked:
    requests: tuple[Request]

    def answer(self, custom_id: str, ids: Sequence[str], ends: Sequence[End]) -> dict[str, Any]:
        ((id_,), (end,)) = ids, ends
        answer = end.model_dump(mode="json", exclude={"embeddings"}, exclude_defaults=True)
        answer["state"] = end.state
        if end.embeddings:
            answer["embeddings"] = [embedding.numbers for embedding in end.embeddings]
        return {"custom_id": custom_id, "id": id_, "kind": self.requests[0].kind, "answer": answer}


def dialect(name: DialectName, queue: str) -> Dialect:
    """The form of this name, for lines that this queue answers."""
    if name == "openai":
        from streamfleet_producer.bulk.openai_dialect import OpenAIDialect  # noqa: PLC0415 - it knows this module

        return OpenAIDialect(queue)
    return OwnDialect()
