"""Forms that the libraries for guided output are compared on."""

from __future__ import annotations

import json
from typing import Any

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
        "date": {"type": "string", "format": "date"},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 20,
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "minLength": 1, "maxLength": 200},
                    "count": {"type": "integer", "minimum": 1},
                    "price": {"type": "number", "minimum": 0},
                    "tax": {"enum": ["none", "reduced", "full"]},
                },
                "required": ["text", "count", "price", "tax"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["number", "date", "lines"],
    "additionalProperties": False,
}
TOOLS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "tool": {"const": name},
                "arguments": {
                    "type": "object",
                    "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
                    "required": list(arguments),
                    "additionalProperties": False,
                },
            },
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for name, arguments in {
            "search": {"query": "string", "limit": "integer"},
            "weather": {"city": "string", "days": "integer"},
            "calculate": {"expression": "string"},
            "remind": {"text": "string", "at": "string", "daily": "boolean"},
        }.items()
    ]
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
WIDE: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"field_{i}": [{"type": "string"}, {"type": "number"}, {"enum": ["low", "middle", "high"]}][i % 3]
        for i in range(60)
    },
    "required": [f"field_{i}" for i in range(0, 60, 2)],
    "additionalProperties": False,
}
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "person, flat": (PERSON, {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org"}),
    "invoice with lines": (
        INVOICE,
        {
            "number": "INV-004711",
            "date": "2026-03-01",
            "lines": [
                {"text": "Paper, A4, 500 sheets", "count": 12, "price": 4.95, "tax": "full"},
                {"text": "A book on queues", "count": 1, "price": 39, "tax": "reduced"},
            ],
        },
    ),
    "call of one of 4 tools": (
        TOOLS,
        {"tool": "remind", "arguments": {"text": "Tea with Grace", "at": "16:00", "daily": False}},
    ),
    "tree, recursive": (
        TREE,
        {"label": "root", "children": [{"label": "a leaf", "children": []}, {"label": "b", "children": []}]},
    ),
    "60 fields, half optional": (
        WIDE,
        {name: ["some text", 12.5, "middle"][i % 3] for i, name in enumerate(WIDE["properties"])},
    ),
}
"""With a document that fits, by which masks are timed."""

FEATURES: list[tuple[str, Any, list[str], list[str]]] = [
    ("enum", {"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    ("const", {"const": {"a": [1]}}, ['{"a":[1]}'], ['{"a":[2]}', "{}"]),
    (
        "required",
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"b":2}'],
    ),
    ("required alone", {"type": "object", "required": ["a"]}, ['{"a":1}'], ["{}"]),
    (
        "additionalProperties false",
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        ['{"a":1}', "{}"],
        ['{"b":2}'],
    ),
    (
        "additionalProperties schema",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ['{"b":2}', "{}"],
        ['{"b":"x"}'],
    ),
    (
        "nested arrays, min/maxItems",
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        },
        ["[[1],[2,3]]", "[]"],
        ["[[]]", "[[1,2,3]]"],
    ),
    (
        "prefixItems",
        {"prefixItems": [{"const": 1}], "items": {"const": 2}, "type": "array"},
        ["[1,2]"],
        ["[2]"],
    ),
    ("minimum, maximum", {"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "12"], ["-4", "13"]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1.5}, ["1.51", "2"], ["1.5", "1.50", "-2"]),
    ("multipleOf", {"type": "integer", "multipleOf": 5}, ["10", "0"], ["7"]),
    (
        "min/maxLength",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"éa"', '"abc"'],
        ['"a"', '"abcd"'],
    ),
    ("pattern", {"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    ("pattern, not anchored", {"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    (
        "pattern and maxLength",
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
        ['"abc"'],
        ['"abcd"'],
    ),
    ("$ref, recursive", TREE, ['{"label":"a","children":[]}'], ['{"label":"a","children":[1]}']),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"a"']),
    (
        "anyOf beside properties",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":"x"}'],
    ),
    (
        "allOf",
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        ["3", "5"],
        ["2", "6"],
    ),
    (
        "oneOf that overlap",
        {"oneOf": [{"type": "integer"}, {"minimum": 3, "type": "number"}]},
        ["1", "3.5"],
        ["4"],
    ),
    ("not", {"type": "integer", "not": {"const": 3}}, ["4"], ["3"]),
    ("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1,2]"], ["[1,1]"]),
    ("contains", {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}, ["[1,2]"], ["[1]"]),
    (
        "patternProperties",
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        ['{"n1":1}'],
        ['{"n1":"x"}', '{"a":1}'],
    ),
    (
        "patternProperties beside properties",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "patternProperties": {"^n": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"a":"x","n1":1}', '{"a":"x"}'],
        ['{"a":1}', '{"n1":"x"}'],
    ),
    ("minProperties", {"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"a":1}'], ['{"b":1}']),
    (
        "dependentRequired",
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependentRequired": {"a": ["b"]},
            "additionalProperties": False,
        },
        ['{"a":1,"b":1}', "{}"],
        ['{"a":1}'],
    ),
    ("if, then", {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, ["1", "6"], ["9"]),
    ("format date", {"type": "string", "format": "date"}, ['"2026-01-31"'], ['"2026-13-01"', '"x"']),
    ("format date-time", {"type": "string", "format": "date-time"}, ['"2026-01-31T10:00:00Z"'], ['"x"']),
    ("format email", {"type": "string", "format": "email"}, ['"a@example.org"'], ['"x"']),
    (
        "format uuid",
        {"type": "string", "format": "uuid"},
        [f'"{"0" * 8}-0000-4000-8000-{"0" * 12}"'],
        ['"x"'],
    ),
    ("format ipv4", {"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"']),
    ("format uri", {"type": "string", "format": "uri"}, ['"https://example.org/a?b"'], ['"x"']),
    ("format nobody knows", {"type": "string", "format": "colour"}, [], ['"x"']),
    (
        "x-guidance is only a word",
        {"type": "array", "x-guidance": {"lenient": True}, "uniqueItems": True},
        [],
        ["[1,1]"],
    ),
]
"""A name, a schema, documents that fit and documents that do not."""

REGEXES: list[tuple[str, str, list[str], list[str]]] = [
    (r"\d{3}-\d{4}", r"\d{3}-\d{4}", ["555-1234"], ["555-123", "a"]),
    (r"classes of Unicode, \p{L}", r"\p{L}+", ["größe"], ["1"]),
    ("flags, (?i)", "(?i)yes", ["YES"], ["no"]),
    ("anchors", "^ab$", ["ab"], ["a"]),
    ("sets, [^...] and .", "[^a]..", ["bé漢"], ["a12"]),
]

_MANY = {f"p{i}": {"type": "string"} for i in range(2000)}
HOSTILE: dict[str, dict[str, Any]] = {
    "regex ((b){1000,}){1000,}": {"regex": "((b){1000,}){1000,}"},
    "regex (a?){990}a{10000}": {"regex": "(a?){990}a{10000}"},
    "regex .{0,4000}": {"regex": ".{0,4000}"},
    "regex (\\w{1,100} ?){1,100}": {"regex": r"(\w{1,100} ?){1,100}"},
    "regex .* x 2000": {"regex": ".*" * 2000},
    "string of up to 10000": {"json_schema": {"type": "string", "maxLength": 10_000}},
    "pattern of up to 10000": {"json_schema": {"type": "string", "pattern": "^[a-z]{1,10000}$"}},
    "list of up to 100000": {"json_schema": {"type": "array", "items": {"const": 1}, "maxItems": 100_000}},
    "2000 optional properties": {"json_schema": {"type": "object", "properties": _MANY}},
    "multipleOf 1000003": {"json_schema": {"type": "integer", "multipleOf": 1_000_003}},
    "multiples of six primes": {
        "json_schema": {"allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]}
    },
    "product of 18 anyOf": {
        "json_schema": {
            "type": "object",
            "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(18)],
        }
    },
    "one of 1500 properties": {
        "json_schema": {
            "type": "object",
            "minProperties": 1,
            "properties": {f"p{i}": {"const": 1} for i in range(1500)},
            "additionalProperties": False,
        }
    },
    "60 lists in each other": {"json_schema": json.loads('{"type":"array","items":' * 60 + "{}" + "}" * 60)},
    "$ref to itself": {"json_schema": {"$ref": "#"}},
    "600 hard patterns": {
        "json_schema": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(é|[^x])*x{i}$", "maxLength": 80}
                for i in range(600)
            },
        }
    },
}
"""What a careless or a hostile caller may send, in the wire's fields."""
