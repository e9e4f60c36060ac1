"""Tool calls in generated text, found as it comes.

Models write a call in the form that they were trained on:

* `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or a list of such objects between the tags: Hermes,
  Qwen, SmolLM2 and many others;
* `{"name": …, "parameters": {…}}` and nothing else, several with `;` between them or as a list: Llama 3, and
  answers that a guide has forced;
* `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}`: Mistral.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

from streamfleet_common.chat import MAX_NESTED, MAX_OBJECT_CHARS, Tool, ToolCall
from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.json_extent import JsonExtent

MAX_HELD = 2 * MAX_OBJECT_CHARS
"""Characters of what may be a call, or several in one list: what is longer is content."""
MAX_SPACE = 64
"""Characters of white space that go with the call that they stand before: of more the last ones."""
MAX_OPENING = 512
"""Characters that show whether a text may be nothing but calls."""

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL, _MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_LLAMA = "<|python_tag|>"
_MARKERS = (_HERMES, _MISTRAL)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_FIRST_KEYS = ('"name"', '"type"', '"id"', '"function"', '"parameters"', '"arguments"')

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{0,128}")
_SPACE = re.compile(r"\s*")

_Steps = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call."""

    name: str
    arguments: str
    """A JSON object as text."""


class ToolCallParser:
    """Tells calls from content in the text of one answer, whatever pieces it comes in.

    What cannot be a call any more is given at once, what may become one is held back. White space around a
    call goes with it. What is malformed, or never ends, is content as the model wrote it.

    Args:
        tools: what may be called. Behind a marker a call of something else is a call too, since the model
            says so; a text of nothing but JSON is a call only of one of these.
    """

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)
        self._held = ""
        self._is_over = False
        self._given: list[Content | Call] = []
        # It stops wherever it needs more text.
        self._steps = self._parse()
        next(self._steps)

    def feed(self, text: str) -> list[Content | Call]:
        """Read on; gives what has become clear.

        Raises:
            ValueError: it is closed.
        """
        if self._is_over:
            raise ValueError("the parser is closed")
        if text:
            self._held += text
            next(self._steps)
        return self._taken()

    def close(self) -> list[Content | Call]:
        """The text is over; gives the rest."""
        self._is_over = True
        for _ in self._steps:
            pass
        return self._taken()

    def _taken(self) -> list[Content | Call]:
        given, self._given = self._given, []
        return given

    def _give(self, end: int) -> None:
        """What is held is content up to there."""
        if end:
            self._given.append(Content(self._held[:end]))
        self._held = self._held[end:]

    def _parse(self) -> _Steps:
        if (yield from self._opens()):
            calls = yield from self._only_calls()
            if calls:
                self._given += calls
                self._held = ""
        while True:
            at = yield from self._content()
            if not at:
                return
            yield from self._hermes(at) if self._held[at - 1] == ">" else self._mistral(at)

    # --- a text of nothing but calls

    def _opens(self) -> Generator[None, None, bool]:
        while True:
            opens = _may_be_calls(self._held[:MAX_OPENING])
            if opens is not None or self._is_over or len(self._held) >= MAX_OPENING:
                return bool(opens)
            yield

    def _only_calls(self) -> Generator[None, None, list[Call]]:
        """The calls; none if there is anything else, or if one of them is none."""
        calls: list[Call] = []
        at = yield from self._past_space(0)
        if self._held.startswith(_LLAMA, at):
            at = yield from self._past_space(at + len(_LLAMA))
        while True:
            end, is_whole = yield from self._value(at)
            found = _calls(self._held[at:end], with_arguments=True) if is_whole else []
            if not found or any(call.name not in self._names for call in found):
                return []
            calls += found
            at = yield from self._past_space(end)
            if self._held[at : at + 1] == ";":
                at = yield from self._past_space(at + 1)
            elif at < len(self._held):
                return []
            if at == len(self._held):
                return calls

    # --- content, with calls in it

    def _content(self) -> Generator[None, None, int]:
        """Give content up to the next marker; gives where in the held text that marker ends, 0 for none."""
        while True:
            found = _MARKER.search(self._held)
            if found is not None:
                start = _before_space(self._held, found.start())
                self._give(start)
                return found.end() - start
            if self._is_over:
                self._give(len(self._held))
                return 0
            self._give(_before_space(self._held, len(self._held) - _begun(self._held)))
            yield

    def _hermes(self, at: int) -> _Steps:
        while True:
            at = yield from self._past_space(at)
            end, is_whole = yield from self._value(at)
            calls = _calls(self._held[at:end]) if is_whole else []
            if not calls:
                self._give(end)
                return
            # Their tag may never be closed.
            yield from self._called(calls, end)
            if (yield from self._is_next(0, _HERMES_END)):
                yield from self._called([], len(_HERMES_END))
                return
            if not self._held.startswith("{"):
                return
            at = 0

    def _mistral(self, at: int) -> _Steps:
        at = yield from self._past_space(at)
        start = at
        if not self._held.startswith(("{", "["), at):
            at = yield from self._past_name(at)
            name = self._held[start:at]
            if (yield from self._is_next(at, _MISTRAL_ARGUMENTS)):
                at += len(_MISTRAL_ARGUMENTS)
            at = yield from self._past_space(at)
            if not name or not self._held.startswith("{", at):
                self._give(at)
                return
            end, is_whole = yield from self._value(at)
            arguments = _parsed(self._held[at:end]) if is_whole else None
            call = None if arguments is None else _made(name, arguments)
            calls = [] if call is None else [call]
        else:
            end, is_whole = yield from self._value(at)
            calls = _calls(self._held[at:end]) if is_whole else []
        if calls:
            yield from self._called(calls, end)
        else:
            self._give(end)

    def _called(self, calls: list[Call], end: int) -> _Steps:
        """What is held is these calls up to there, and white space behind them goes with them."""
        self._given += calls
        self._held = self._held[end:].lstrip()
        while not self._held and not self._is_over:
            yield
            self._held = self._held.lstrip()

    # --- steps within what is held

    def _past_space(self, at: int) -> Generator[None, None, int]:
        while True:
            end = _past(_SPACE, self._held, at)
            if end < len(self._held) or self._is_over or len(self._held) >= MAX_HELD:
                return min(end, max(at, MAX_HELD))
            yield

    def _past_name(self, at: int) -> Generator[None, None, int]:
        while True:
            end = _past(_NAME, self._held, at)
            if end < len(self._held) or self._is_over:
                return end
            yield

    def _is_next(self, at: int, word: str) -> Generator[None, None, bool]:
        while True:
            ahead = self._held[at : at + len(word)]
            if ahead == word or self._is_over or not word.startswith(ahead):
                return ahead == word
            yield

    def _value(self, at: int) -> Generator[None, None, tuple[int, bool]]:
        """Where a JSON object or list ends that begins at a place, or where it shows that it is none."""
        extent = JsonExtent(at, max_end=MAX_HELD, max_depth=MAX_NESTED + 4)
        while True:
            is_whole = extent.follow(self._held)
            if is_whole is not None or self._is_over:
                return extent.at, bool(is_whole)
            yield


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _may_be_calls(text: str) -> bool | None:
    """Whether a text that begins so may be nothing but calls; None if more of it must be seen."""
    rest = text.lstrip()
    for word in (_LLAMA, "["):
        if rest.startswith(word):
            rest = rest[len(word) :].lstrip()
        elif word.startswith(rest):
            return None
    if not rest:
        return None
    if not rest.startswith("{"):
        return False
    rest = rest[1:].lstrip()
    if any(key.startswith(rest) for key in _FIRST_KEYS):
        return None
    return rest.startswith(_FIRST_KEYS)


def _before_space(text: str, end: int) -> int:
    """Where the white space begins that goes with what stands behind it."""
    floor = max(0, end - MAX_SPACE)
    return floor + len(text[floor:end].rstrip())


def _begun(text: str) -> int:
    """How many characters at the end of a text may be the start of a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _MARKERS):
            return length
    return 0


def _parsed(text: str) -> Any:
    """A JSON value; None if it is none. Line breaks within texts pass, for models write them."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _calls(text: str, *, with_arguments: bool = False) -> list[Call]:
    """The calls of a JSON object or list; none if any part of it is none."""
    value = _parsed(text)
    values = value if isinstance(value, list) else [value]
    calls = [_call(one, with_arguments=with_arguments) for one in values]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(value: Any, *, with_arguments: bool) -> Call | None:
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if with_arguments and not given:
        return None
    return _made(value.get("name", function), given[0] if given else {})


def _made(name: Any, arguments: Any) -> Call | None:
    if isinstance(arguments, str) and arguments.strip():
        arguments = _parsed(arguments)
    elif not arguments:
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        # What could not be sent back as a part of the chat is none.
        call = ToolCall(name=name, arguments=arguments)
    except InvalidRequest:
        return None
    return Call(call.name, str(call.arguments))
