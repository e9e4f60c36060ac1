"""Calls are found in every form that models write them in, however their text is cut into pieces."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamfleet_common.chat import Tool
from streamfleet_producer.gateway import tool_calls
from streamfleet_producer.gateway.json_extent import JsonExtent
from streamfleet_producer.gateway.tool_calls import MAX_HELD, Call, Content, ToolCallParser

TOOLS = (Tool(name="weather"), Tool(name="now"))
Part = str | tuple[str, Any]


def told(given: Iterable[Content | Call]) -> list[Part]:
    """Content joined, calls with their arguments as values."""
    parts: list[Part] = []
    for one in given:
        if isinstance(one, Call):
            parts.append((one.name, json.loads(one.arguments)))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += one.text
        else:
            parts.append(one.text)
    return parts


def read(*pieces: str) -> list[Part]:
    parser = ToolCallParser(TOOLS)
    given = [one for piece in pieces for one in parser.feed(piece)]
    return told([*given, *parser.close()])


BERN: Part = ("weather", {"city": "Bern"})
NOW: Part = ("now", {})
AS_JSON = '{"name": "weather", "arguments": {"city": "Bern"}}'
AS_LLAMA = '{"name": "weather", "parameters": {"city": "Bern"}}'

FORMS: list[tuple[str, list[Part]]] = [
    # Hermes, Qwen, SmolLM2
    (f"<tool_call>{AS_JSON}</tool_call>", [BERN]),
    (f"<tool_call>\n{AS_JSON}\n</tool_call>", [BERN]),
    (f"<tool_call>[{AS_JSON}]</tool_call>", [BERN]),
    (f'<tool_call>\n[{AS_JSON}, {{"name": "now", "arguments": {{}}}}]\n</tool_call>', [BERN, NOW]),
    (f'<tool_call>{AS_JSON}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n', [BERN, NOW]),
    (f"Let me see.\n\n<tool_call>\n{AS_JSON}\n</tool_call>\nDone.", ["Let me see.", BERN, "Done."]),
    (f'<tool_call>{AS_JSON}\n{{"name": "now"}}</tool_call>', [BERN, NOW]),
    (f"<tool_call>{AS_JSON}", [BERN]),
    (f"<tool_call>{AS_JSON}<tool_call>{AS_JSON}", [BERN, BERN]),
    ('<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>', [("other", {"a": 1})]),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": [1]}"}</tool_call>', [("now", {"a": [1]})]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [NOW]),
    ('<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', [("now", {"a": "x\ny"})]),
    (
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>{\\"\\\\"}}</tool_call>',
        [("now", {"a": '</tool_call>{"\\'})],
    ),
    # Llama 3
    (AS_LLAMA, [BERN]),
    (f" \n{AS_LLAMA}\n", [BERN]),
    (f"<|python_tag|>{AS_LLAMA}", [BERN]),
    (f'{AS_LLAMA}; {{"name": "now", "parameters": {{}}}}', [BERN, NOW]),
    (f'[{AS_LLAMA}, {{"name": "now", "arguments": {{}}}}]', [BERN, NOW]),
    ('{"type": "function", "function": "now", "parameters": {}}', [NOW]),
    ('{"type": "function", "function": {"name": "now", "arguments": "{}"}}', [NOW]),
    ('{"parameters": {"city": "Bern"}, "name": "weather"}', [BERN]),
    # Mistral
    (f"[TOOL_CALLS][{AS_JSON}]", [BERN]),
    (f'[TOOL_CALLS] [{AS_JSON}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]', [BERN, NOW]),
    (f"Wait. [TOOL_CALLS] [{AS_JSON}]", ["Wait.", BERN]),
    ('[TOOL_CALLS]weather{"city": "Bern"}', [BERN]),
    ('[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]now[ARGS]{}', [BERN, NOW]),
]

CONTENT = [
    "",
    "Snow.",
    "a < b, and [TOOL] or <tool_",
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\nno call\n</tool_call>",
    '<tool_call>{"name": "now", "arguments": {}',
    '<tool_call>{"name": "now", "arguments": {"a": 1}',
    '<tool_call>{"name": "now", "arguments": {"a": ',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "not a name"}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": 7}</tool_call>',
    "<tool_call>{'name': 'now'}</tool_call>",
    '<tool_call>{"name": "now",}</tool_call>',
    '<tool_call>[{"name": "now"}, 7]</tool_call>',
    "<tool_call>[]</tool_call>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] []",
    "[TOOL_CALLS]now",
    "[TOOL_CALLS]now [1]",
    '[TOOL_CALLS]now{"a": }',
    "[TOOL_CALLS]{}",
    # An answer in JSON is no call, even with the name of a tool.
    '{"name": "weather", "city": "Bern"}',
    '{"name": "Bern", "parameters": {}}',
    '{"answer": {"name": "now", "parameters": {}}}',
    f"{AS_LLAMA} is what I would call.",
    f"{AS_LLAMA} {AS_LLAMA}",
    f'{AS_LLAMA}; {{"name": "other", "parameters": {{}}}}',
    "[1, 2]",
    "{",
    '["name"]',
    '{"na',
    "[",
    "<|python_tag|>print(1)",
    f"See: {AS_LLAMA}",
]


@pytest.mark.parametrize(("text", "parts"), FORMS)
def test_calls_are_found(text: str, parts: list[Part]) -> None:
    assert read(text) == parts
    assert read(*text) == parts


@pytest.mark.parametrize("text", CONTENT)
def test_what_is_none_stays_as_it_is(text: str) -> None:
    expected = [text] if text else []
    assert read(text) == expected
    assert read(*text) == expected


def test_a_call_behind_one_that_is_broken_is_found() -> None:
    broken = '<tool_call>{"name": "now", "arguments": {oh}}</tool_call>\n'
    assert read(f"{broken}<tool_call>{AS_JSON}</tool_call>") == [broken.rstrip(), BERN]
    unclosed = '<tool_call>{"name": "now", "arguments": {"a": 1} '
    assert read(f"{unclosed}<tool_call>{AS_JSON}</tool_call>") == [unclosed, BERN]


# --- as it comes


def test_nothing_is_held_back_that_cannot_be_a_call() -> None:
    parser = ToolCallParser(TOOLS)
    assert told(parser.feed("Snow falls")) == ["Snow falls"]
    # The space may stand before a call.
    assert told(parser.feed(" on <b")) == [" on <b"]
    assert told(parser.feed(" ")) == []
    assert told(parser.feed("<tool")) == []
    assert told(parser.feed("s>")) == [" <tools>"]
    assert told(parser.close()) == []


def test_a_call_is_given_as_soon_as_it_is_whole() -> None:
    parser = ToolCallParser(TOOLS)
    assert told(parser.feed(f"Hm. <tool_call>\n{AS_JSON[:-1]}")) == ["Hm."]
    assert told(parser.feed("}")) == [BERN]
    assert told(parser.feed("\n</tool_call>\n")) == []
    assert told(parser.feed("So.")) == ["So."]


def test_an_answer_in_json_is_shown_once_its_first_key_is_no_call_s() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.feed('{"na') == []
    assert told(parser.feed("tion")) == ['{"nation']
    assert told(parser.feed('": 1}')) == ['": 1}']


def test_arguments_are_one_object_as_text() -> None:
    (call,) = ToolCallParser(TOOLS).feed('<tool_call>{"name":"now","arguments":{"é": "\\u00fc", "a":1.0}}')
    assert call == Call("now", '{"é": "ü", "a": 1.0}')


def test_a_closed_one_reads_no_more() -> None:
    parser = ToolCallParser(TOOLS)
    parser.close()
    assert parser.close() == []
    with pytest.raises(ValueError, match="closed"):
        parser.feed("a")


# --- any text, in any pieces

PIECES = st.sampled_from(
    [
        *(text for text, _ in FORMS),
        *CONTENT,
        *'<>[]{}"\\:,; \né',
        "</tool_call>",
        '"name"',
        '"arguments": {',
        "now",
        "weather",
        "[ARGS]",
        " " * 70,
        "\n",
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *places, len(text)]
    return text, [text[start:end] for start, end in pairwise(edges)]


@given(cut_texts())
@example((" " * 70 + "<tool_call>", [" " * 66, "    <tool", "_call>"]))
def test_pieces_change_nothing(case: tuple[str, list[str]]) -> None:
    text, pieces = case
    whole = read(text)
    assert read(*pieces) == whole
    assert read(*text) == whole


@given(TEXTS.filter(lambda text: "{" not in text))
def test_text_without_any_object_comes_back(text: str) -> None:
    assert "".join(str(part) for part in read(text)) == text


@given(st.lists(st.sampled_from(["Snow.", "a < b", "[x]", "Ende", BERN, NOW]), max_size=6))
def test_what_was_put_together_is_taken_apart(parts: list[Part]) -> None:
    """Content and calls by turns, as a model trained on Hermes' form would write them."""
    texts = []
    expected: list[Part] = []
    for part in parts:
        if not isinstance(part, str):
            call = json.dumps({"name": part[0], "arguments": part[1]})
            texts.append(f"<tool_call>\n{call}\n</tool_call>")
            expected.append(part)
            continue
        texts.append(part)
        if expected and isinstance(expected[-1], str):
            expected[-1] += f"\n{part}"
        else:
            expected.append(part)
    assert read("\n".join(texts)) == expected


# --- bounds


@pytest.mark.parametrize(
    "start",
    ["<tool_call>", '<tool_call>{"name": "now", "arguments": {"a": "', AS_LLAMA[:-3], "[TOOL_CALLS]now{", ""],
)
@pytest.mark.parametrize("rest", [" ", "a", "<tool_call>"])
def test_what_is_held_is_bounded(start: str, rest: str) -> None:
    parser = ToolCallParser(TOOLS)
    given = parser.feed(start)
    shown = 0
    for _ in range(40):
        given += parser.feed(rest * (8192 // len(rest)))
        shown = sum(len(one.text) for one in given if isinstance(one, Content))
        assert len(parser._held) <= MAX_HELD + 8192
    assert shown > 40 * 8000 - MAX_HELD - 8192
    (text,) = told([*given, *parser.close()])
    assert text == start + rest * (8192 // len(rest)) * 40


def test_a_call_that_is_too_large_is_content_in_any_pieces() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "' + "a" * MAX_HELD + '"}}</tool_call>'
    assert read(text) == [text]
    assert read(*(text[at : at + 1000] for at in range(0, len(text), 1000))) == [text]
    # Too much to be sent back as a part of the chat.
    text = '<tool_call>{"name": "now", "arguments": {"a": "' + "a" * 65_536 + '"}}</tool_call>'
    assert read(text) == [text]


@pytest.mark.parametrize("unit", ['<tool_call>{"', "[TOOL_CALLS][", "{", '{"name":[', '<tool_call>{"a":"'])
def test_no_place_is_followed_again_and_again(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[tuple[int, JsonExtent]] = []

    class Spy(JsonExtent):
        def __init__(self, start: int, *, max_end: int, max_depth: int) -> None:
            super().__init__(start, max_end=max_end, max_depth=max_depth)
            followed.append((start, self))

    monkeypatch.setattr(tool_calls, "JsonExtent", Spy)
    text = unit * 20_000
    read(*(text[at : at + 50] for at in range(0, len(text), 50)))
    # Were each marker followed to the bound of what is held, it would be thousands of times the text. Twice
    # is what a text takes that might be nothing but calls.
    assert sum(extent.at - start for start, extent in followed) <= 2 * len(text)
