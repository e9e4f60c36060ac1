"""A model's chat template: turns, tools and calls to the text that the model was trained to read."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from streamfleet_common.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from streamfleet_common.chat import ChatMessage, Tool, ToolCall

Show = Callable[[str], str]
"""How a text that comes from outside is given to the template."""

_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What templates raise on what they were not written for, besides errors of their own language."""
_LONG_ID = "call_a1B2c3D4e5F6g7H8i9J0k1L2"
_SHORT_ID = 9
"""Letters and digits of an id, as Mistral's templates insist on."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template shows of what it is given."""

    tools: bool
    calls: bool
    """Calls and their results."""
    short_ids: bool
    """It refuses ids of calls but for those of `_SHORT_ID` letters and digits."""


class ChatTemplate:
    """Renders chats as transformers does, in its sandbox; safe to use from several threads.

    Args:
        source: a transformers tokenizer.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    @property
    def exists(self) -> bool:
        """Whether the model has one."""
        return bool(self._source.chat_template)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], show: Show) -> str:
        """The text of a chat, up to where the assistant's turn begins.

        Raises:
            Unsupported: there is no template, or it would leave out tools, calls or results.
            InvalidRequest: it refuses these messages, or fails on them.
        """
        self._check(messages, tools)
        show_id = _short_id if self.has_calls(messages) and self._abilities.short_ids else show
        names = _names(messages)
        turns = [_turn(message, name, show, show_id) for message, name in zip(messages, names, strict=True)]
        return self.text(turns, [_tool(tool, show) for tool in tools])

    @staticmethod
    def has_calls(messages: Sequence[ChatMessage]) -> bool:
        """Whether any turn calls a tool, or says which call it is the result of."""
        return any(message.tool_calls or message.tool_call_id is not None for message in messages)

    def text(self, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The text of turns in transformers' own form.

        Raises:
            InvalidRequest: the template refuses them, or fails on them.
        """
        try:
            return self._text(turns, tools)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from None
        except _FAULTS as error:
            # Without the error's own words, which may quote the messages.
            kind = type(error).__name__
            raise InvalidRequest(
                f"the model's chat template fails on these messages ({kind}): it was not written for such"
            ) from None

    def _text(self, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        text = self._source.apply_chat_template(
            list(turns), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def _check(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> None:
        if not self.exists:
            raise Unsupported(
                "this model has no chat template: send a prompt instead of messages",
                feature="messages",
            )
        if tools and not self._abilities.tools:
            raise Unsupported(
                "this model's chat template knows nothing of tools: send them to a model that was trained "
                "for them, describe them in a system message, or give the model's folder a template that "
                "shows them",
                feature="tools",
            )
        if any(message.tool_calls for message in messages) and not self._abilities.calls:
            raise Unsupported(
                "this model's chat template would leave out tool_calls, or their results: send them to a "
                "model that was trained for tools, or tell of them in the content of the turns",
                feature="tools",
            )

    @cached_property
    def _abilities(self) -> Abilities:
        """Found by trying: what a template mentions it need not show."""
        name, argument, result = (f"mark{secrets.token_hex(8)}" for _ in range(3))
        user = {"role": "user", "content": "a"}
        parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
        function = {"name": name, "description": "a", "parameters": parameters}
        shown = self._try([user], [{"type": "function", "function": function}])
        tools = shown is None or name in shown
        for call_id in (_LONG_ID, _short_id(_LONG_ID)):
            call = {"name": name, "arguments": {"a": argument}}
            calls = [{"id": call_id, "type": "function", "function": call}]
            assistant = {"role": "assistant", "content": "", "tool_calls": calls}
            tool = {"role": "tool", "name": name, "content": result, "tool_call_id": call_id}
            shown = self._try([user, assistant, tool], ())
            if shown is not None:
                is_whole = all(mark in shown for mark in (name, argument, result))
                return Abilities(tools, is_whole, short_ids=call_id != _LONG_ID)
        # It says itself why not, when it is asked.
        return Abilities(tools, calls=True, short_ids=False)

    def _try(self, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str | None:
        try:
            return self._text(turns, tools)
        except (jinja2.TemplateError, *_FAULTS):
            return None


def _names(messages: Sequence[ChatMessage]) -> list[str | None]:
    """The names of turns. Results have those of the tools that were called: some templates insist on it."""
    called: dict[str, str] = {}
    names = []
    for message in messages:
        called |= {call.id: call.name for call in message.tool_calls}
        known = None if message.tool_call_id is None else called.get(message.tool_call_id)
        names.append(known if message.name is None else message.name)
    return names


def _turn(message: ChatMessage, name: str | None, show: Show, show_id: Show) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": show(message.content)}
    if name is not None:
        turn["name"] = show(name)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, show, show_id) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = show_id(message.tool_call_id)
    return turn


def _call(call: ToolCall, show: Show, show_id: Show) -> dict[str, Any]:
    function = {"name": show(call.name), "arguments": _shown(json.loads(str(call.arguments)), show)}
    made: dict[str, Any] = {"type": "function", "function": function}
    return {"id": show_id(call.id), **made} if call.id else made


def _tool(tool: Tool, show: Show) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": show(tool.name),
            "description": show(tool.description),
            "parameters": _shown(json.loads(str(tool.parameters)), show),
        },
    }


def _shown(value: Any, show: Show) -> Any:
    """A JSON value with all of its texts shown."""
    if isinstance(value, str):
        return show(value)
    if isinstance(value, dict):
        return {show(name): _shown(part, show) for name, part in value.items()}
    if isinstance(value, list):
        return [_shown(part, show) for part in value]
    return value


def _short_id(call_id: str) -> str:
    return call_id if _is_short(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID]


def _is_short(call_id: str) -> bool:
    return len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()
