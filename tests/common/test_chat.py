"""Turns, tools and calls: what of them is valid, how much there may be, and that they cross the wire."""

import json
from typing import Any

import pytest

from streamfleet_common import codec
from streamfleet_common.chat import ChatMessage, Tool, ToolCall
from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import Message
from streamfleet_common.schemas import Envelope, GenerateRequest
from streamfleet_common.submissions import Submission

USER = ChatMessage(role="user", content="Hi")
NO_OBJECT = "a JSON object is wanted, as text or as a map"


def faults_of(kind: type[Message], fields: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        kind(**fields)
    return caught.value.problems


def test_a_conversation_with_a_call_crosses_the_wire() -> None:
    call = ToolCall(id="call_1", name="weather", arguments={"city": "Zürich", "days": 2})
    request = GenerateRequest(
        messages=[
            USER,
            ChatMessage(role="assistant", tool_calls=[call]),
            ChatMessage(role="tool", name="weather", content="snow", tool_call_id="call_1"),
        ],
        tools=[
            Tool(name="weather", description="Of a city.", parameters={"type": "object"}),
            Tool(name="now"),
        ],
    )
    there = codec.decode_envelope(codec.encode(Envelope(request=request))).request
    assert there == request
    assert isinstance(there, GenerateRequest)
    assert there.messages is not None
    assert there.messages[1].tool_calls[0].arguments == '{"city": "Zürich", "days": 2}'
    assert json.loads(str(there.tools[1].parameters)) == {"type": "object", "properties": {}}


def test_a_request_without_tools_has_the_bytes_it_always_had() -> None:
    envelope = Envelope(rid="00" + "ab" * 16, request=GenerateRequest(messages=[USER]))
    # A map of 2: messages, a list of one map of 2, and kind.
    tail = b"\x82\xa8messages\x91\x82\xa4role\xa4user\xa7content\xa2Hi\xa4kind\xa8generate"
    assert codec.encode(envelope).endswith(b"\xa7request" + tail)


@pytest.mark.parametrize("text", ["", " \n", "{}", '{"a": [1, {"b": null}]}', '{"a": "\\ud83d\\ude00"}'])
def test_arguments_are_an_object_and_none_is_an_empty_one(text: str) -> None:
    assert ToolCall(name="f", arguments=text).arguments == (text if text.strip() else "{}")


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "[1]",
        '"a"',
        "null",
        '{"a": NaN}',
        "[" * 60_000,
        '{"a": "\\ud83d"}',
        {"a": {1}},
        {"a": float("inf")},
    ],
)
def test_anything_else_is_refused_and_not_repeated(value: Any) -> None:
    assert faults_of(ToolCall, {"name": "f", "arguments": value}) == [f"arguments: {NO_OBJECT}"]
    assert faults_of(Tool, {"name": "f", "parameters": value}) == [f"parameters: {NO_OBJECT}"]


def test_objects_may_be_nested_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "[]" + "}" * (depth - 1)

    ToolCall(name="f", arguments=nested(64))
    fault = "arguments: lists and maps are nested more than 64 deep: flatten them"
    assert faults_of(ToolCall, {"name": "f", "arguments": nested(65)}) == [fault]
    assert faults_of(ToolCall, {"name": "f", "arguments": json.loads(nested(65))}) == [fault]


@pytest.mark.parametrize("value", [None, 7, ["{}"], b"{}", {"a": "\ud83d"}])
def test_what_is_neither_text_nor_a_map_is_refused(value: Any) -> None:
    assert faults_of(ToolCall, {"name": "f", "arguments": value})[0].startswith("arguments: ")


@pytest.mark.parametrize("name", ["f", "get_weather", "a.b/c:d-9", "f" * 128])
def test_names(name: str) -> None:
    assert Tool(name=name).name == ToolCall(name=name).name == name


@pytest.mark.parametrize("name", ["", "f" * 129, "a b", "f\n", "<|im_end|>", "é", None])
def test_names_that_none_has(name: Any) -> None:
    for kind in (Tool, ToolCall):
        assert faults_of(kind, {"name": name})[0].startswith("name: ")


def test_everything_is_bounded() -> None:
    longest = '"' + "a" * 65_526 + '"'
    ToolCall(name="f", arguments=f'{{"a":{longest}}}')  # 65,534 characters
    assert faults_of(ToolCall, {"name": "f", "arguments": f'{{"abcd":{longest}}}'})
    assert faults_of(Tool, {"name": "f", "description": "a" * 65_537})
    calls = [ToolCall(name="f")] * 128
    ChatMessage(role="assistant", tool_calls=calls)
    assert faults_of(ChatMessage, {"role": "assistant", "tool_calls": [*calls, ToolCall(name="f")]})
    tools = [Tool(name=f"f{place}") for place in range(129)]
    GenerateRequest(messages=[USER], tools=tools[:128])
    assert faults_of(GenerateRequest, {"messages": [USER], "tools": tools})[0].startswith("tools: ")
    assert faults_of(ChatMessage, {"role": "tool", "content": "a", "tool_call_id": "c" * 201})


def test_who_may_say_what() -> None:
    call = {"name": "f"}
    assert faults_of(ChatMessage, {"role": "user", "content": "a", "tool_calls": [call]}) == [
        "tool_calls are the assistant's, and this turn is of role user"
    ]
    assert faults_of(ChatMessage, {"role": "user", "content": "a", "tool_call_id": "c"}) == [
        "tool_call_id is of a tool's result, and this turn is of role user"
    ]
    assert faults_of(ChatMessage, {"role": "assistant"}) == [
        "an assistant's turn has neither content nor tool_calls: it says nothing"
    ]
    # Some clients send no id, and tools may give nothing.
    assert ChatMessage(role="tool").content == ""
    ChatMessage(role="assistant", content="a", tool_calls=[ToolCall(**call)])


def test_tools_have_names_of_their_own_and_need_a_chat() -> None:
    twice = [Tool(name="f"), Tool(name="g"), Tool(name="f")]
    assert faults_of(GenerateRequest, {"messages": [USER], "tools": twice}) == [
        "tools: number 2 has the name of another"
    ]
    assert faults_of(GenerateRequest, {"prompt": "a", "tools": [Tool(name="f")]}) == [
        "tools need messages: it is the model's chat template that tells it of them"
    ]


def test_what_admission_goes_by_counts_calls_and_tools() -> None:
    def tokens(**more: Any) -> int:
        return Submission.of(Envelope(request=GenerateRequest(max_tokens=1, **more))).tokens

    # "Hi", then "f" and a space, then 9 characters around the 92 of the string: {"a": ""}.
    said = ChatMessage(role="assistant", tool_calls=[ToolCall(name="f", arguments={"a": "b" * 92})])
    assert tokens(messages=[USER, said]) == 1 + -(-(2 + 2 + 9 + 92) // 4)
    tool = Tool(name="f", description="d" * 9, parameters='{"x":' + " " * 50 + "1}")
    assert tokens(messages=[USER], tools=[tool]) == 1 + -(-(2 + 1 + 1 + 9 + 1 + 57) // 4)


def test_a_chat_that_is_decided_about_shows_its_calls() -> None:
    turns = [
        USER,
        ChatMessage(role="assistant", content="Wait.", tool_calls=[ToolCall(name="f", arguments='{"a":1}')]),
        ChatMessage(role="tool", content="7"),
    ]
    assert DecideRequest(messages=turns).text == 'user: Hi\nassistant: Wait.\nf {"a":1}\ntool: 7'
