"""What a guide forces is read as a call, and its schema says what the tools' own say."""

import json
from typing import Any

import jsonschema
import pytest

from guide_walk import walk
from streamfleet_common.chat import Tool
from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.forced_call import call_id, forced_call
from streamfleet_producer.gateway.tool_calls import Call, ToolCallParser
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import VOCAB_SIZE, build_tokenizer

END = 2
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.org/tree",
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
TOOLS = (Tool(name="weather", parameters=CITY), Tool(name="tree", parameters=TREE), Tool(name="now"))


def fits(answer: Any, name: str | None = None) -> bool:
    schema = json.loads(str(forced_call(TOOLS, name).json_schema))
    return bool(jsonschema.Draft202012Validator(schema).is_valid(answer))


GOOD: list[dict[str, Any]] = [
    {"name": "weather", "parameters": {"city": "Bern"}},
    {"name": "tree", "parameters": {"root": {"value": 1, "left": {"value": 2}}}},
    {"name": "tree", "parameters": {"root": {"value": 1}, "all": {"root": {"value": 3}}}},
    {"name": "now", "parameters": {}},
]
BAD: list[Any] = [
    {"name": "weather", "parameters": {"city": 7}},
    {"name": "weather", "parameters": {}},
    {"name": "weather"},
    {"name": "other", "parameters": {}},
    {"name": "now", "parameters": {}, "more": 1},
    {"name": "tree", "parameters": {"root": {"value": "1"}}},
    {"name": "tree", "parameters": {"root": {"value": 1, "left": {}}}},
    {"name": "tree", "parameters": {"root": {"value": 1}, "all": {}}},
    {"name": "weather", "parameters": {"root": {"value": 1}}},
    [],
]


@pytest.mark.parametrize("answer", GOOD)
def test_a_call_fits_and_is_read_as_one(answer: dict[str, Any]) -> None:
    assert fits(answer)
    assert fits(answer, answer["name"])
    parser = ToolCallParser(TOOLS)
    given = [*parser.feed(json.dumps(answer)), *parser.close()]
    assert given == [Call(answer["name"], json.dumps(answer["parameters"]))]


@pytest.mark.parametrize("answer", BAD)
def test_nothing_else_fits(answer: Any) -> None:
    assert not fits(answer)


@pytest.mark.parametrize("name", [None, "tree"])
def test_a_model_that_knows_nothing_can_only_call(name: str | None) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(build_tokenizer())
    guide = GuideCompiler(tokenizer, VOCAB_SIZE, {END}).compile(forced_call(TOOLS, name))
    for seed in range(5):
        _, text = walk(guide, tokenizer, VOCAB_SIZE, {END}, seed)
        parser = ToolCallParser(TOOLS)
        (call,) = [*parser.feed(text), *parser.close()]
        assert isinstance(call, Call)
        assert name in (None, call.name)
        assert fits({"name": call.name, "parameters": json.loads(call.arguments)}, name)


def test_the_one_that_is_named_must_be_called() -> None:
    assert fits({"name": "now", "parameters": {}}, "now")
    assert not fits({"name": "weather", "parameters": {"city": "Bern"}}, "now")


def test_there_must_be_something_to_call() -> None:
    with pytest.raises(InvalidRequest, match="there is none"):
        forced_call(())
    with pytest.raises(InvalidRequest, match="no tool has the name"):
        forced_call(TOOLS, "s3cret")


def test_too_much_for_a_guide_is_refused() -> None:
    large = {"type": "object", "description": "a" * 40_000}
    tools = [Tool(name=name, parameters=large) for name in "ab"]
    forced_call(tools, "a")
    with pytest.raises(InvalidRequest, match="65536"):
        forced_call(tools)


def test_ids_are_the_same_each_time_and_no_others() -> None:
    rid = "00" + "ab" * 16
    ids = {call_id(rid, choice, place) for choice in range(3) for place in range(20)}
    assert len(ids) == 60
    assert call_id(rid, 1, 2) in ids
    assert all(len(one) == 29 and one.startswith("call_") and one[5:].isalnum() for one in ids)
