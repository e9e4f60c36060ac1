"""An input that a handler would take, made up from the schema on its worker's card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamfleet_common.cards import Card
from streamfleet_producer.input_schemas import InputSchemas

TEXT = "…"
MAX_DEPTH = 8
_SIMPLE: dict[str, Any] = {"string": TEXT, "integer": 1, "number": 1, "boolean": True, "null": None}


class _TooHard(Exception):
    """No value is made for such a schema."""


def example_input(cards: Sequence[Card], handler: str) -> str | None:
    """The smallest input that a handler takes, as JSON; None if its card tells none, or it is too hard."""
    for card in cards:
        if card.model == handler and card.handler is not None and card.handler.input_schema:
            return example(card.handler.input_schema)
    return None


def example(schema: str) -> str | None:
    """A small value that fits a JSON schema, as JSON; None for a schema that is not simple."""
    try:
        root = json.loads(schema)
        value = _value(root, root, MAX_DEPTH)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, _TooHard):
        return None
    return None if InputSchemas().faults(schema, value) else json.dumps(value, ensure_ascii=False)


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not depth or schema is False:
        raise _TooHard
    if schema is True or schema == {}:
        return TEXT
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if name in schema:
            return schema[name][0]
    if "$ref" in schema:
        return _value(_referred(schema["$ref"], root), root, depth - 1)
    ways = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    return _value(ways[0], root, depth - 1) if ways else _of_type(schema, root, depth)


def _of_type(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: _value(fields.get(name, True), root, depth - 1) for name in schema.get("required", ())}
    if kind == "array":
        items: Sequence[Any] = schema.get("prefixItems") or [schema.get("items", True)]
        return [_value(item, root, depth - 1) for item in items]
    return _SIMPLE[str(kind)]


def _referred(reference: str, root: Any) -> Any:
    start, *path = reference.split("/")
    if start != "#":
        raise _TooHard
    for name in path:
        root = root[name]
    return root
