"""Inputs made up from schemas: small ones that fit, or none."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field

from streamfleet_producer.cli.example_input import example


class Inner(BaseModel):
    score: float
    labels: list[str]


class Outer(BaseModel):
    text: str
    inner: Inner
    pair: tuple[int, bool]
    maybe: int | None
    left_out: str = "x"


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "string"}, "…"),
        ({"type": "integer"}, 1),
        ({"type": "number"}, 1),
        ({"type": "boolean"}, True),
        ({"type": "null"}, None),
        ({"type": ["string", "null"]}, "…"),
        ({"type": "array", "items": {"type": "integer"}}, [1]),
        ({"type": "array"}, ["…"]),
        ({"type": "object"}, {}),
        ({"type": "object", "required": ["a"]}, {"a": "…"}),
        ({"enum": ["calm", "angry"]}, "calm"),
        ({"const": 5}, 5),
        ({"type": "integer", "minimum": 3, "default": 4}, 4),
        ({"type": "string", "examples": ["2024-01-01"]}, "2024-01-01"),
        (
            Outer.model_json_schema(),
            {"text": "…", "inner": {"score": 1, "labels": ["…"]}, "pair": [1, True], "maybe": 1},
        ),
    ],
)
def test_a_small_value_that_fits(schema: dict[str, Any], wanted: Any) -> None:
    made = example(json.dumps(schema))
    assert made is not None
    assert json.loads(made) == wanted
    assert jsonschema_rs.is_valid(schema, wanted)


class Endless(BaseModel):
    next: Endless


class Narrow(BaseModel):
    code: str = Field(pattern="^[a-z]{4}$")


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "no json",
        "[]",
        "7",
        "false",
        json.dumps({"type": "integer", "minimum": 5}),
        json.dumps({"type": "colour"}),
        json.dumps({"enum": []}),
        json.dumps({"$ref": "https://elsewhere"}),
        json.dumps({"$ref": "#"}),
        json.dumps({"type": "object", "required": 5}),
        json.dumps(Endless.model_json_schema()),
        json.dumps(Narrow.model_json_schema()),
    ],
)
def test_none_where_none_is_simple(schema: str) -> None:
    assert example(schema) is None
