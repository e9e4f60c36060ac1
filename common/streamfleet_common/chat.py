"""A chat: its turns, the tools that the model may call, and the calls that it has made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from streamfleet_common.message import LongText, Message, Name

MAX_TURNS = 1000
MAX_TOOLS = 128
MAX_CALLS = 128
"""In one turn."""
MAX_OBJECT_CHARS = 64 * 1024
"""Of a tool's parameters, or of a call's arguments."""
MAX_NESTED = 64
"""Lists and maps within each other in such an object; templates go down to the last."""
ANY_PARAMETERS = '{"type": "object", "properties": {}}'
"""Of a tool that says nothing of them."""


def _as_object(value: Any) -> Any:
    if not isinstance(value, str | Mapping):
        return value
    try:
        if isinstance(value, str):
            # Some models and clients write nothing for a call without arguments.
            text = value if value.strip() else "{}"
        else:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        made = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            # A lone surrogate, which no encoder takes, makes this fail.
            json.dumps(made, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        made = text = None
    if not isinstance(made, dict):
        # Without the error's own words, which may quote the value.
        raise ValueError("a JSON object is wanted, as text or as a map")
    if _is_deep(made):
        raise ValueError(f"lists and maps are nested more than {MAX_NESTED} deep: flatten them")
    return text


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTED):
        level = [
            part
            for holder in level
            for part in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(part, dict | list)
        ]
    return bool(level)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


if TYPE_CHECKING:
    # Whoever builds a request may write a list or a map; what it then holds is a tuple or text all the same.
    _Object = str | Mapping[str, Any]
else:
    _Object = Annotated[Annotated[str, Field(max_length=MAX_OBJECT_CHARS)], BeforeValidator(_as_object)]

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Tool(Message):
    """Something that the model may ask its caller to do."""

    name: ToolName
    description: Annotated[str, Field(max_length=MAX_OBJECT_CHARS)] = ""
    """What it does, in the words that the model sees."""
    parameters: _Object = ANY_PARAMETERS
    """A JSON schema of its arguments, as text or as a map."""

    @property
    def text(self) -> str:
        """What of it the model reads."""
        return f"{self.name} {self.description} {self.parameters}"


class ToolCall(Message):
    """A call that the model has asked for."""

    id: Name = ""
    """By which its result names it."""
    name: ToolName
    arguments: _Object = "{}"
    """A JSON object, as text or as a map."""


if TYPE_CHECKING:
    _Calls = Sequence[ToolCall]
else:
    _Calls = Annotated[tuple[ToolCall, ...], Field(strict=False, max_length=MAX_CALLS)]


class ChatMessage(Message):
    """One turn of a chat; the worker renders the turns with its model's own template."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText = ""
    """What was said; of a tool what it gave."""
    name: Name | None = None
    """Who it was, where several play one role; of a tool its own. Most templates leave it out."""
    tool_calls: _Calls = ()
    """What the assistant asked for in this turn."""
    tool_call_id: Name | None = None
    """Of a tool: which call this is the result of."""

    @property
    def text(self) -> str:
        """What was said, with the calls that were asked for."""
        return "\n".join(part for part in self._parts() if part)

    def _parts(self) -> Iterator[str]:
        yield self.content
        for call in self.tool_calls:
            yield f"{call.name} {call.arguments}"

    @model_validator(mode="after")
    def _consistent(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, and this turn is of role {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id is of a tool's result, and this turn is of role {self.role}")
        if self.role == "assistant" and not self.content and not self.tool_calls:
            raise ValueError("an assistant's turn has neither content nor tool_calls: it says nothing")
        return self


def _each_once(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"number {place} has the name of another")
    return tools


if TYPE_CHECKING:
    Turns = Sequence[ChatMessage]
    Tools = Sequence[Tool]
else:
    Turns = Annotated[tuple[ChatMessage, ...], Field(strict=False, max_length=MAX_TURNS)]
    Tools = Annotated[tuple[Tool, ...], Field(strict=False, max_length=MAX_TOOLS), AfterValidator(_each_once)]
