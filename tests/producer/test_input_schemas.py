"""A handler's schema at the door: what it finds, and what it cannot be made to do."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from streamfleet_producer.input_schemas import MAX_PROBLEMS, MAX_SCHEMAS, MAX_SEARCHED, InputSchemas


def faults(schema: Any, value: Any) -> list[str]:
    return InputSchemas().faults(schema if isinstance(schema, str) else json.dumps(schema), value)


def test_every_fault_is_told_with_its_place() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer", "minimum": 3}}},
        "required": ["a", "b"],
    }
    assert sorted(faults(schema, {"a": [3, 2, "x"]})) == [
        "input.a.1: the value is less than the minimum of 3",
        'input.a.2: the value is not of type "integer"',
        'input: "b" is a required property',
    ]
    assert faults(schema, {"a": [3], "b": None}) == []
    assert faults(schema, []) == ['input: the value is not of type "object"']


def test_of_alternatives_each_says_why_not() -> None:
    schema = {"anyOf": [{"type": "string"}, {"minimum": 5, "type": "integer"}]}
    (fault,) = faults(schema, 3)
    assert fault == 'input: the value is not of type "string", and the value is less than the minimum of 5'


def test_a_flood_of_faults_is_cut() -> None:
    found = faults({"items": {"type": "string"}}, list(range(1000)))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == "and more"


@pytest.mark.parametrize("value", [{"a": ["x"] * MAX_SEARCHED}, [["x", "y"]] * MAX_SEARCHED])
def test_of_a_large_value_the_first_fault_is_told(value: Any) -> None:
    schema = {"items": {"items": {"type": "integer"}}, "properties": {"a": {"items": {"type": "integer"}}}}
    place = "a.0" if isinstance(value, dict) else "0.0"
    assert faults(schema, value) == [f'input.{place}: the value is not of type "integer", and maybe more']
    assert faults({}, value) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"maxLength": 3},
        {"enum": ["a"]},
        {"const": 1},
        {"pattern": "^a$"},
        {"items": {"type": "integer"}},
        {"not": {"type": ["string", "array"]}},
        {"oneOf": [{"const": 1}, {"const": 2}]},
        False,
    ],
)
@pytest.mark.parametrize("value", ["s3cret", ["s3cret"]])
def test_no_value_is_repeated(schema: Any, value: Any) -> None:
    for line in faults(schema, value):
        assert "s3cret" not in line


def test_a_line_is_bounded_whatever_names_it_holds() -> None:
    name = "n" * 100_000
    for schema in ({"additionalProperties": False}, {"additionalProperties": {"type": "null"}}):
        (line,) = faults(schema, {name: 1})
        assert len(line) < 500


UNREADABLE = [
    *("", "{", "[]", "7", "[" * 100_000, '{"type": "strin"}', '{"$ref": "#/nowhere"}'),
    *('{"$schema": "http://example.org/mine"}', '{"pattern": "("}', '{"pattern": "(?=a)b"}'),
]


@pytest.mark.parametrize("schema", UNREADABLE)
def test_a_schema_that_cannot_be_read_refuses_nothing(schema: str) -> None:
    assert faults(schema, "anything") == []


def test_nothing_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        there = f"http://127.0.0.1:{server.getsockname()[1]}/x.json"
        for reference in (there, "file:///etc/hostname", "other.json"):
            assert faults({"$ref": reference}, 1) == []
            assert faults({"$id": reference, "items": {"$ref": f"{reference}#/x"}}, [1]) == []
            assert faults({"$schema": reference}, 1) == []
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody has come


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "^(a|aa)+$", "^(a|a?)+$", "(a*)*(b*)*c$", "^(a{1,100}){1,100}$"]
)
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    # An engine that tries one way after the other would be at it for longer than anybody lives.
    assert len(faults({"pattern": pattern}, "a" * 100_000 + "!")) <= 1


def test_a_schema_within_itself_ends() -> None:
    tree = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert faults(tree, [[[]], []]) == []
    assert faults(tree, [[[1]]]) == ['input.0.0.0: the value is not of type "array"']
    assert faults({"allOf": [{"$ref": "#"}]}, 1) == []


def test_what_is_kept_is_bounded() -> None:
    schemas = InputSchemas()
    for number in range(2 * MAX_SCHEMAS):
        assert schemas.faults(json.dumps({"const": number}), number) == []
        assert schemas.faults('{"type": "string"}', number) != []  # used all the time
    assert len(schemas) == MAX_SCHEMAS


def test_what_the_wire_does_not_take_is_left_to_it() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    assert faults({"type": "string"}, deep) == []
    assert faults({"type": "integer"}, "\ud800") == []
