"""A guide that lets a model answer with nothing but the call of a tool."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from streamfleet_common.chat import Tool
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import Guide


def forced_call(tools: Sequence[Tool], name: str | None = None) -> Guide:
    """The guide of an answer that calls one of these tools, in a form that `ToolCallParser` reads.

    Args:
        tools: of the request.
        name: of the one that must be called; None lets the model choose.

    Raises:
        InvalidRequest: there is no tool, or none of that name; or all of them together are too large.
    """
    chosen = [tool for tool in tools if name is None or tool.name == name]
    if not chosen:
        message = (
            "a tool must be called, and there is none" if name is None else "no tool has the name wanted"
        )
        raise InvalidRequest(f"{message}: name one of those in tools")
    calls = [_call(tool, place) for place, tool in enumerate(chosen)]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    definitions = {str(place): _parameters(tool, place) for place, tool in enumerate(chosen)}
    return Guide(json_schema={**schema, "$defs": definitions})


def call_id(rid: str, choice: int, place: int) -> str:
    """The id of a call: the same one whenever the answer is read again."""
    return f"call_{hashlib.sha256(f'{rid} {choice} {place}'.encode()).hexdigest()[:24]}"


def _call(tool: Tool, place: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{place}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool, place: int) -> Any:
    schema = json.loads(str(tool.parameters))
    # They would begin a document of their own, within which ours cannot be referred to.
    schema = {key: part for key, part in schema.items() if key not in ("$schema", "$id", "id")}
    return _moved(schema, f"#/$defs/{place}")


def _moved(value: Any, root: str) -> Any:
    """A schema whose references to its own root lead to its new place."""
    if isinstance(value, list):
        return [_moved(part, root) for part in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(part, root) for key, part in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = root + target[1:]
    return moved
