"""OpenAI's chats as requests of the fleet. No HTTP here: jobs without a gateway use it, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.chat import ChatMessage, Tool, ToolCall
from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer.gateway.forced_call import forced_call
from streamfleet_producer.gateway.openai_generation import (
    generate_request,
    generation_fields,
    guide,
    invalid,
    unsupported,
)
from streamfleet_producer.gateway.openai_schemas import Call, ChatBody, ToolChoice, Turn

_REFUSED = {
    "audio",
    "functions",
    "function_call",
    "moderation",
    "web_search_options",
    "modalities",
    "reasoning_effort",
    "verbosity",
}
"""Unless they ask for what happens anyway."""


@dataclass(frozen=True, slots=True)
class ChatWish:
    """What a chat asks of the fleet, and how its answers are to be told."""

    request: GenerateRequest
    logprobs: bool
    tools: tuple[Tool, ...] = field(default=())
    """What the answers may call; none if their text is content, whatever it looks like."""
    one_call: bool = False
    """No more than one call is to be told."""


def chat(body: ChatBody, model: str | None) -> ChatWish:
    """The request of a chat; `model` is what the queue calls it.

    Raises:
        Unsupported: it asks for what nothing here can do.
        InvalidRequest: it is not valid.
    """
    _refuse_unsupported(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: it needs logprobs: set that to true")
    choice = body.tool_choice or "auto"
    tools = tuple(_tools(body))
    if not tools and choice not in ("auto", "none"):
        raise invalid("tool_choice: a tool must be called, and there is none in tools")
    if choice == "none":
        tools = ()
    form = guide(body, body.response_format)
    if tools and form is not None:
        raise Unsupported(
            "response_format: an answer of a given form cannot call a tool as well: "
            'leave out one of them, or set tool_choice to "none"',
            feature="response_format with tools",
            problems=["response_format: not supported together with tools"],
        )
    if tools and choice != "auto":
        form = forced_call(tools, None if choice == "required" else _called(choice))
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    request = generate_request(
        {
            **generation_fields(body, model),
            "messages": [_message(turn, place) for place, turn in enumerate(body.messages)],
            "tools": tools,
            "guide": form,
            "max_tokens": "fit" if wanted is None else wanted,
            "n": body.n or 1,
            "logprobs": bool(body.logprobs),
            "top_logprobs": body.top_logprobs or 0,
        }
    )
    return ChatWish(request, bool(body.logprobs), tools, body.parallel_tool_calls is False)


def _refuse_unsupported(body: ChatBody) -> None:
    if body.model_fields_set.isdisjoint(_REFUSED):
        return
    asked = {
        "audio": body.audio,
        "functions": body.functions,
        "function_call": body.function_call,
        "moderation": body.moderation,
        "web_search_options": body.web_search_options,
        "modalities": [kind for kind in body.modalities or () if kind != "text"],
        "reasoning_effort": body.reasoning_effort not in (None, "none"),
        "verbosity": body.verbosity not in (None, "medium"),
    }
    instead = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "reasoning_effort": "leave it out, or ask for it in a message",
        "verbosity": "leave it out, or ask for it in a message",
    }
    names = [name for name, wish in asked.items() if wish]
    if names:
        faults = [f"{name}: not supported: {instead.get(name, 'leave it out')}" for name in names]
        raise Unsupported("; ".join(faults), feature=", ".join(names), problems=faults)


def _message(turn: Turn, place: int) -> ChatMessage:
    where = f"messages.{place}"
    if turn.role == "function":
        raise unsupported(f"{where}.role", 'function calls are old: use tools, and role "tool" for results')
    if turn.audio or turn.function_call:
        name = "audio" if turn.audio else "function_call"
        raise unsupported(f"{where}.{name}", "leave it out" if name == "audio" else "use tool_calls")
    content = _content(turn, where)
    calls = [
        _told_call(call, f"{where}.tool_calls.{number}") for number, call in enumerate(turn.tool_calls or ())
    ]
    try:
        return ChatMessage(
            # The newer name of the same thing, which no template knows.
            role="system" if turn.role == "developer" else turn.role,
            content=content,
            name=turn.name,
            tool_calls=calls,
            tool_call_id=turn.tool_call_id,
        )
    except InvalidRequest as error:
        raise invalid(*(f"{where}: {problem}" for problem in error.problems)) from None


def _told_call(call: Call, where: str) -> ToolCall:
    try:
        return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
    except InvalidRequest as error:
        raise invalid(*(f"{where}.function.{problem}" for problem in error.problems)) from None


def _content(turn: Turn, where: str) -> str:
    if turn.content is None:
        if turn.role == "assistant":
            return turn.refusal or ""
        raise invalid(f"{where}.content: it is missing")
    if isinstance(turn.content, str):
        return turn.content
    texts = []
    for place, part in enumerate(turn.content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None and part.type in ("text", "refusal"):
            raise invalid(f"{where}.content.{place}.{part.type}: it is missing")
        if text is None:
            raise unsupported(f"{where}.content.{place}.type", "send parts of type text")
        texts.append(text)
    return "\n".join(texts)


def _tools(body: ChatBody) -> list[Tool]:
    tools = []
    for place, tool in enumerate(body.tools or ()):
        where = f"tools.{place}"
        if tool.type != "function":
            raise unsupported(f"{where}.type", "tools are functions here")
        function = tool.function
        if function is None:
            raise invalid(f"{where}.function: it is missing")
        fields: dict[str, Any] = {"name": function.name, "description": function.description or ""}
        if function.parameters is not None:
            fields["parameters"] = function.parameters
        try:
            tools.append(Tool(**fields))
        except InvalidRequest as error:
            raise invalid(*(f"{where}.function.{problem}" for problem in error.problems)) from None
    return tools


def _called(choice: str | ToolChoice) -> str:
    if isinstance(choice, str) or choice.type != "function":
        raise unsupported("tool_choice.type", 'name a function, or say "auto" or "required"')
    if choice.function is None:
        raise invalid("tool_choice.function: it is missing")
    return choice.function.name
