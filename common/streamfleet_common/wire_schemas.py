"""JSON Schema of every message, made of the models themselves; and in words what no schema can say.

A message on the wire is msgpack. In a schema its byte strings are strings in base64; numbers keep their type
on the wire, though some validators take 7.0 for an integer. What one field asks of another is there as far
as JSON Schema can say it; the rest is in each schema's `$comment`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from streamfleet_common import codec
from streamfleet_common.cards import Card
from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import Message
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import (
    Delta,
    End,
    Envelope,
    GenerateRequest,
    Parts,
    Prefill,
    Restart,
    Start,
)
from streamfleet_common.scripts import Script, ScriptName

DIALECT = "https://json-schema.org/draft/2020-12/schema"
REQUESTS: dict[str, type[Message]] = {
    "generate": GenerateRequest,
    "decide": DecideRequest,
    "embed": EmbedRequest,
    "classify": ClassifyRequest,
    "rerank": RerankRequest,
    "call": CallRequest,
}
"""What an envelope may hold; none of them is a message of its own."""
EVENTS: dict[str, type[Message]] = {
    "start": Start,
    "prefill": Prefill,
    "delta": Delta,
    "parts": Parts,
    "restart": Restart,
    "end": End,
}
MESSAGES: dict[str, type[Message]] = {"envelope": Envelope, **EVENTS, "card": Card}
"""What is encoded alone, with the protocol's version."""
FORMS = {
    "frame": "A head in ASCII, one space, one event in msgpack. The head is EPOCH-SEQ; of a start and an end "
    "EPOCH-SEQ,QUEUED,STARTED,NOW,ATTEMPTS, times in ms on the server's clock. On a channel, a frame of "
    "16 KiB or more has no event behind the space: it is in the log under the id EPOCH-SEQ, or in the "
    "record.",
    "record": "Open: Q (waiting) or R (running), then DEADLINE|EPOCH|PLACE|OWNER|STARTED|ATTEMPTS|CRASHES|"
    "SOLO LOSSES|ACCEPTED|LANE LETTER|s or -|RESULT TTL|ATTEMPTS.BACKOFF.r or f|TOKENS|TENANT|DIGEST, and "
    "while it waits for its next try a line feed and the payload. Ended: E and a state letter (D done, "
    "F failed, C cancelled, X expired, P dead), then |CRASHES|SOLO LOSSES|TENANT|DIGEST, a line feed, and "
    "the frame of the end.",
}
"""What is no msgpack map, in words; see docs/protocol.md."""


SCRIPTS: dict[str, ScriptName] = {"submit.lua": "submit", "cancel.lua": "cancel", "sweep.lua": "sweep"}
"""What a producer in another language sends to Redis."""


def _only_one(*names: str) -> dict[str, Any]:
    return {
        "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]
    }


def _worded(*names: str) -> dict[str, Any]:
    return {"properties": {name: {"anyOf": [{"type": "null"}, _not_blank()]} for name in names}}


def _not_blank() -> dict[str, Any]:
    return {"if": {"type": "string"}, "then": {"pattern": r"\S"}, "else": {"minItems": 1}}


def _each_worded(*names: str) -> dict[str, Any]:
    return {"properties": {name: {"items": {"pattern": r"\S"}} for name in names}}


_RULES: dict[str, list[dict[str, Any]]] = {
    "GenerateRequest": [
        _only_one("prompt", "prompt_token_ids", "messages"),
        _worded("prompt", "prompt_token_ids", "messages"),
        {
            "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"minimum": 1}}},
            "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
        },
        {
            "if": {"required": ["guide"], "properties": {"guide": {"type": "object"}}},
            "then": {"properties": {"ignore_eos": {"const": False}, "min_tokens": {"const": 0}}},
        },
    ],
    "Guide": [_only_one("json_schema", "regex", "choice")],
    "DecideRequest": [
        _only_one("state", "state_json", "messages"),
        _worded("state", "state_json", "messages"),
    ],
    "EmbedRequest": [_each_worded("texts")],
    "ClassifyRequest": [_each_worded("texts", "pairs")],
    "RerankRequest": [{"properties": {"query": {"pattern": r"\S"}}}, _each_worded("documents")],
}
"""What the models check in code of their own, by class."""
_UNSAID = {
    "GenerateRequest": "min_tokens is at most max_tokens. What a message says of tools fits its role.",
    "Guide": "json_schema is a JSON document.",
    "ClassifyRequest": "pairs is empty, or as long as texts.",
    "DecideRequest": "Ids of questions and numbers of options in temperatures are there once; all questions "
    "together have at most 1,024 options. state_json is a JSON document.",
    "Question": "Each option is there once and none is blank; a yes_no question has two or leaves them "
    "out, a choice has some.",
    "Embedding": "In msgpack data is a byte string: numbers of float32, little-endian.",
    "CallRequest": "input is nested at most 14 levels deep, numbers are finite.",
    "Envelope": "Encoded it has at most 256 KiB, unless the workers' cards say less.",
}


@cache
def _parts() -> dict[str, dict[str, Any]]:
    """A schema for each class, by its name."""
    kinds = dict.fromkeys([*MESSAGES.values(), *REQUESTS.values()])
    _, made = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/$defs/{model}")
    parts: dict[str, dict[str, Any]] = made["$defs"]
    for name, part in parts.items():
        _mend(part)
        kind = part["properties"].get("kind", {})
        if kind.get("const", "generate") != "generate":
            part["required"] = sorted({*part.get("required", ()), "kind"})  # one of no kind is to generate
        if name in _RULES:
            part["allOf"] = _RULES[name]
        if name in _UNSAID:
            part["$comment"] = _UNSAID[name]
    return parts


def _mend(node: Any) -> None:
    """Take out what pydantic says of Python alone, and put right what it says of arrays and bytes."""
    if isinstance(node, list):
        for one in node:
            _mend(one)
    if not isinstance(node, dict):
        return
    if node.get("type") == "array" and "maxLength" in node:
        node["maxItems"] = node.pop("maxLength")
    if node.get("format") == "base64url":
        for word in ("format", "minLength", "maxLength"):
            node.pop(word, None)
        node["contentEncoding"] = "base64"
    for word, value in node.items():
        if word == "properties":
            for about in value.values():
                about.pop("title", None)
                _mend(about)
        elif word not in ("default", "const", "enum"):
            _mend(value)


def names() -> list[str]:
    """Everything that has a schema of its own."""
    return [*MESSAGES, "event", *REQUESTS]


def schema(name: str) -> dict[str, Any]:
    """The schema of a message, of `event` (any of them), or of a kind of request; complete in itself.

    Raises:
        InvalidRequest: there is no such message.
    """
    if name not in names():
        raise InvalidRequest(f"no message {name!r}: there are {', '.join([*names(), *FORMS, *SCRIPTS])}")
    made = _message(name)
    return {"$schema": DIALECT, **made, "$defs": _reached(made)}


def script(name: str) -> str:
    """The text of one of `SCRIPTS`, byte for byte as it is sent."""
    return Script.load(SCRIPTS[name]).text


def document() -> dict[str, Any]:
    """One schema that holds all: its `$defs` has every message by its name, and every part by its class."""
    return {
        "$schema": DIALECT,
        "title": f"streamfleet, protocol version {codec.VERSION}",
        "description": "Any message: an envelope, an event or a card.",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("envelope", "event", "card")],
        "$comment": " ".join(f"A {name}: {words}" for name, words in FORMS.items()),
        "$defs": {**{name: _message(name) for name in names()}, **_parts()},
    }


def _message(name: str) -> dict[str, Any]:
    if name == "event":
        return {"title": "Event", "oneOf": [_message(one) for one in EVENTS]}
    if name in REQUESTS:
        return dict(_parts()[REQUESTS[name].__name__])
    part = _parts()[MESSAGES[name].__name__]
    version = {"const": codec.VERSION, "description": "The protocol's version."}
    return {
        **part,
        "properties": {"v": version, **part["properties"]},
        # An event within another needs no name.
        "required": ["v", *(["type"] if name in EVENTS else []), *part.get("required", ())],
    }


def _reached(node: Any) -> dict[str, Any]:
    """The parts that a schema refers to, directly or through others."""
    reached: dict[str, Any] = {}
    left = _references(node)
    while left:
        name = left.pop()
        if name not in reached:
            reached[name] = _parts()[name]
            left |= _references(reached[name])
    return dict(sorted(reached.items()))


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return {name for one in node for name in _references(one)}
    if not isinstance(node, dict):
        return set()
    found = {name for one in node.values() for name in _references(one)}
    if isinstance(reference := node.get("$ref"), str):
        found.add(reference.rpartition("/")[2])
    return found
